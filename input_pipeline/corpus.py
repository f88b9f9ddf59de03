# SPDX-License-Identifier: Apache-2.0
"""Prepares a corpus: documents are found, split, tokenized once, stored, and opened as window sources."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from input_pipeline.cache import cache_folder, digest_of_json
from input_pipeline.chat.encoding import ChatTokenizer
from input_pipeline.chat.windows import ConversationWindows, PreferenceWindows
from input_pipeline.errors import DataError
from input_pipeline.mixture import History, Mixture, parse, parse_stream
from input_pipeline.reading.documents import Document, Span, hold_out, scan
from input_pipeline.shards import Announce, Splits, Store, TokenWindows, open_windows
from input_pipeline.sources import read_source
from input_pipeline.tasks.questions import QuestionWindows
from input_pipeline.tokenization import AnyTokenizer, make_tokenizer, open_tokenizer
from input_pipeline.unigram import unigram_bits_per_byte
from input_pipeline.windows import Windows

say = partial(print, flush=True)  # so that lines appear at once if the output is a file
WINDOWS = {"chat": ConversationWindows, "preferences": PreferenceWindows}  # by source; others have TokenWindows
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
    read = partial(_read, data, paths, vocab_size=vocab_size, seed=seed)
    found = read(announce)
    if isinstance(found[0], tuple):
        return _of_windows(
            Mixture(tuple(train for train, _ in found), history), [rest for _, rest in found], paths, data
        )

    def again(announce: Announce) -> list[Splits]:
        return _parts(data, paths, read(announce), announce)

    parts = _parts(data, paths, found, announce)
    tokenizer = _tokenizer(parts, data, vocab_size, vocab_size_typed, announce)
    stores = _stores(parts, again, tokenizer, data, announce)
    kind = WINDOWS.get(data.source, TokenWindows)
    trained_on = [open_windows([store], "train", kind) for store in stores if "train" in store.manifest["splits"]]
    train = Mixture(tuple(trained_on), history)
    kept = tuple([span.document for span in part["train"]] for part in parts if "train" in part)
    names = tuple(path or "python" for path in paths)  # the source that needs no path
    tasks = ()
    if data.stream and not data.validation_path:
        tasks = tuple(open_windows([store], "heldout", kind) for store in stores)
    return replace(
        _corpus(tokenizer, train, stores, kind), names=names, documents=kept if with_documents else None, tasks=tasks
    )


def prepare_to_evaluate(data, *, vocab_size: int, announce: Announce = say) -> Corpus:
    """Return a corpus whose documents are all held out: those of `data.validation_path`, else those of all paths.

    A source with its own held-out split contributes that split.

    Raises:
        DataError: as `prepare`.
    """
    paths = [data.validation_path] if data.validation_path else _plan(data)[0]
    read = partial(_read, data, paths, vocab_size=vocab_size, seed=0)
    found = read(announce)
    if isinstance(found[0], tuple):
        return _of_windows(Mixture((), ()), [heldout for _, heldout in found], paths, data)

    def again(announce: Announce) -> list[Splits]:
        return _held_out(data, paths, read(announce), announce)

    tokenizer = open_tokenizer(data.tokenizer)
    stores = _stores(_held_out(data, paths, found, announce), again, tokenizer, data, announce)
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


def _parts(data, paths: list[str], found: list, announce: Announce) -> list[Splits]:
    """Return the documents of each path, and of data.validation_path after them, read and split."""
    parts = [_split(path, documents, data, announce) for path, documents in zip(paths, found, strict=True)]
    if data.validation_path:
        (validation,) = _read(data, [data.validation_path], announce, vocab_size=0, seed=0)
        parts += _held_out(data, [data.validation_path], [validation], announce)
    for path, part in zip(paths, parts, strict=False):
        _leave_out_heldout(path, part, parts, announce)
    return parts


def _held_out(data, paths: list[str], found: list, announce: Announce) -> list[Splits]:
    """Return the documents of each path, all of them held out."""
    scanned = [_scan(path, documents, data, announce) for path, documents in zip(paths, found, strict=True)]
    return [{"heldout": spans} for spans in scanned]


def _leave_out_heldout(path: str, part: Splits, parts: list[Splits], announce: Announce) -> None:
    """Remove from a part's training documents those that another part, or the validation set, holds out."""
    elsewhere = {span.digest for other in parts if other is not part for span in other.get("heldout", ())}
    kept = [span for span in part["train"] if span.digest not in elsewhere]
    if len(kept) == len(part["train"]):
        return
    if not kept:
        raise DataError(f"data path {path!r}: all documents are held out elsewhere; add others to train on")
    announce(f"{path}: not trained on {len(part['train']) - len(kept):,} documents that are held out elsewhere")
    part["train"] = kept


def _split(path: str, documents, data, announce: Announce) -> Splits:
    """Return the documents of a source; some are held out unless data.validation_path supplies held-out documents."""
    spans = _scan(path, documents, data, announce)
    if data.validation_path:
        return {"train": spans}
    if data.source in WINDOWS and len({span.digest for span in spans}) == 1:
        raise DataError(
            f"data path {path!r}: a single line cannot be split; name held-out data with --config.data.validation_path"
        )
    train, heldout = hold_out(spans, data.holdout_fraction)
    return {"train": train, "heldout": heldout}


def _scan(path: str, documents, data, announce: Announce) -> list[Span]:
    spans = scan(documents, data.bad_documents, announce)
    if not spans:
        raise DataError(f"data path {path!r} (data.source={data.source}): there is no text; name files with text")
    return spans


def _tokenizer(parts: list[Splits], data, vocab_size: int, vocab_size_typed: bool, announce):
    """Return the one tokenizer of all parts; it does not depend on their weights."""
    spans = [span for part in parts for span in part.get("train", ())]
    tokenizer = make_tokenizer(data.tokenizer, vocab_size, spans, cache_folder(data.cache_dir), announce)
    if data.tokenizer == "sentencepiece" and tokenizer.vocab_size < vocab_size:
        few = f"the documents give only {tokenizer.vocab_size:,} pieces, not model.vocab_size={vocab_size}"
        if vocab_size_typed:
            raise DataError(f"{few}; use --config.model.vocab_size={tokenizer.vocab_size}, or more text")
        announce(f"{few}; using {tokenizer.vocab_size:,}")
    return tokenizer


def _stores(
    parts: list[Splits], again: Callable[[Announce], list[Splits]], tokenizer, data, announce: Announce
) -> list[Store]:
    """Return the shards of each part under a tokenizer; `again` reads all parts again."""
    cache = cache_folder(data.cache_dir)
    tokenizer = ChatTokenizer(tokenizer) if data.source in WINDOWS else tokenizer

    def of_one(number: int) -> Callable[[Announce], Splits]:
        return lambda announce: again(announce)[number]

    return [Store(cache, part, tokenizer, of_one(number), announce) for number, part in enumerate(parts)]
