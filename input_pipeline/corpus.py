# SPDX-License-Identifier: Apache-2.0
"""Prepares a corpus: documents are found, split, tokenized once, stored, and opened as window sources."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from input_pipeline.cache import digest_of_json
from input_pipeline.chat.windows import ConversationWindows
from input_pipeline.mixture import History, Mixture, parse, parse_stream
from input_pipeline.reading.documents import Document
from input_pipeline.shards import Announce, Store, TokenWindows, open_windows
from input_pipeline.sources import read_source
from input_pipeline.tasks.questions import QuestionWindows
from input_pipeline.texts import WINDOWS, Texts, held_out_splits, training_splits
from input_pipeline.tokenization import AnyTokenizer, given_tokenizer, open_tokenizer
from input_pipeline.unigram import unigram_bits_per_byte
from input_pipeline.windows import Windows

say = partial(print, flush=True)  # so that lines appear at once if the output is a file
FACTS = "format", "documents", "tokenizer", "end_of_document", "token", "splits"  # of manifests, for a corpus's digest


@dataclass(frozen=True)
class Corpus:
    """The data of a run."""

    tokenizer: AnyTokenizer | None  # None if tokens do not encode text
    train: Mixture  # the window sources that are trained on, and their weights
    heldout: Windows
    digest: str  # depends on documents, tokenizer and split, not on the weights
    unigram_bits_per_byte: float | None = None  # of the held-out documents; None if there is no training text
    names: tuple[str, ...] = ()  # of the parts of .train: their data paths, or the source if it has no path
    documents: tuple[list[Document], ...] | None = None  # of each part of .train, in stored order, if asked for
    stores: tuple[Store, ...] = ()  # of its shards
    tasks: tuple[Windows, ...] = ()  # held-out data of each part of a stream, which are evaluated apart

    @property
    def is_of_conversations(self) -> bool:
        """Whether the training data are conversations, so that a model should not continue plain text."""
        return isinstance(self.heldout, ConversationWindows | QuestionWindows)

    @property
    def is_plain_text(self) -> bool:
        """Whether the data are documents of text; otherwise they are conversations, puzzles or random tokens."""
        return type(self.heldout) is TokenWindows

    def resume(self, record: dict) -> "Corpus":
        """Return this corpus for a resumed run: its parts continue at their positions, with the present weights.

        Args:
            record: of the checkpoint, with `mixture`, the result of .train.record(); `skips`, the value of
                .train.skips, empty if missing; and `examples`, the number consumed so far.
        """
        train = self.train.resume(record.get("mixture"), record["examples"], record.get("skips", ()))
        return replace(self, train=train)

    def announce_rebuilds_to(self, announce: Announce) -> None:
        """Send progress lines of rebuilt shards to `announce` from now on; it is called from any thread."""
        for store in self.stores:
            store.announce = announce


def prepare(
    data, *, vocab_size: int, vocab_size_typed: bool, seed: int = 0,
    announce: Announce = say, with_documents: bool = False,
) -> Corpus:  # fmt: skip
    """Return the corpus that the `data` section describes, from the cache if it was made before.

    Args:
        data: the section of the configuration.
        vocab_size: number of ids of the model.
        vocab_size_typed: the user typed this size; otherwise a small corpus may have fewer pieces.
        seed: of a source that draws at random.
        announce: called with a line of progress while something is built.
        with_documents: keep the list of training documents for the ledger: at least a hundred bytes each.

    Raises:
        DataError: an error that the user can correct, in one line.
    """
    paths, history = _plan(data)
    read = partial(_read, data, [*paths, *filter(None, [data.validation_path])], vocab_size=vocab_size, seed=seed)
    found = read(announce)
    if isinstance(found[0], tuple):
        train, heldout = zip(*found[: len(paths)], strict=True)
        return _of_windows(Mixture(train, history), heldout, paths, data)
    given = given_tokenizer(data.tokenizer, vocab_size)
    texts = Texts(data, paths, read, training_splits, given, vocab_size, vocab_size_typed)
    tokenizer, stores = texts.stores(found, announce)
    kind = WINDOWS.get(data.source, TokenWindows)
    trained_on = [open_windows([store], "train", kind) for store in stores if "train" in store.manifest["splits"]]
    train = Mixture(tuple(trained_on), history)
    names = tuple(path or "python" for path in paths)  # the source that needs no path
    tasks = ()
    if data.stream and not data.validation_path:
        tasks = tuple(open_windows([store], "heldout", kind) for store in stores)
    corpus = replace(_corpus(tokenizer, train, stores, kind), names=names, tasks=tasks)
    return replace(corpus, documents=texts.training_documents(stores)) if with_documents else corpus


def prepare_to_evaluate(data, *, vocab_size: int, announce: Announce = say) -> Corpus:
    """Return a corpus whose documents are all held out: those of `data.validation_path`, else those of all paths.

    A source with its own held-out split contributes that split. Raises DataError as `prepare`.
    """
    paths = [data.validation_path] if data.validation_path else _plan(data)[0]
    read = partial(_read, data, paths, vocab_size=vocab_size, seed=0)
    found = read(announce)
    if isinstance(found[0], tuple):
        return _of_windows(Mixture((), ()), [heldout for _, heldout in found], paths, data)
    texts = Texts(data, paths, read, held_out_splits, open_tokenizer(data.tokenizer))
    tokenizer, stores = texts.stores(found, announce)
    return _corpus(tokenizer, Mixture((), ()), stores, WINDOWS.get(data.source, TokenWindows))


def _plan(data) -> tuple[list[str], History]:
    """Return the paths of the parts, and the sections of the run."""
    if data.stream:
        return parse_stream(data.stream)
    if data.mixture:
        paths, weights = parse(data.mixture)
        return paths, ((0, weights),)
    return [data.path], ((0, (Fraction(1),)),)


def _read(data, paths: list[str], announce: Announce, *, vocab_size: int, seed: int) -> list:
    """Return the content of the source for each path."""
    return [read_source(data, path=path, vocab_size=vocab_size, seed=seed, announce=announce) for path in paths]


def _corpus(tokenizer, train: Mixture, stores: list[Store], kind: type[TokenWindows]) -> Corpus:
    heldout = open_windows([store for store in stores if "heldout" in store.manifest["splits"]], "heldout", kind)
    facts = [{key: store.manifest[key] for key in FACTS} for store in stores]
    corpus = Corpus(tokenizer, train, heldout, digest_of_json(facts), stores=tuple(stores))
    if not (train.parts and corpus.is_plain_text):
        return corpus
    return replace(corpus, unigram_bits_per_byte=unigram_bits_per_byte(train.parts, heldout, tokenizer.vocab_size))


def _of_windows(train: Mixture, heldout: Sequence[Windows], paths: list[str], data) -> Corpus:
    """Return the corpus of window sources; that of a stream is evaluated on its first task, and on each by name."""
    names = tuple(path or data.source for path in paths)
    if len(heldout) == 1:
        return Corpus(heldout[0].tokenizer, train, heldout[0], heldout[0].digest, names=names)
    digest = digest_of_json([windows.digest for windows in heldout])
    return Corpus(None, train, heldout[0], digest, names=names, tasks=tuple(heldout))
