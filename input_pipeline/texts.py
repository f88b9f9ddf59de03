# SPDX-License-Identifier: Apache-2.0
"""Turns documents into shards: they are read, split, and tokenized, or their shards of an earlier start are reused."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from input_pipeline import preparations, shards
from input_pipeline.cache import cache_folder
from input_pipeline.chat.encoding import ChatTokenizer
from input_pipeline.chat.windows import ConversationWindows, PreferenceWindows
from input_pipeline.errors import DataError
from input_pipeline.reading.documents import Document, Span, hold_out, scan
from input_pipeline.shards import Announce, Splits, Store
from input_pipeline.sources import FromFiles
from input_pipeline.tokenization import AnyTokenizer, make_tokenizer, open_tokenizer, trained_tokenizer

WINDOWS = {"chat": ConversationWindows, "preferences": PreferenceWindows}  # by source; others have TokenWindows


@dataclass
class Said:
    """Announces lines, and keeps those about the documents, which later starts announce again."""

    announce: Announce
    notes: list[str] = field(default_factory=list)

    def note(self, line: str) -> None:
        self.notes.append(line)
        self.announce(line)


@dataclass(frozen=True)
class Texts:
    """The documents of the parts of a corpus, and how they are split and tokenized.

    Attributes:
        data: the section of the configuration.
        read: returns the documents of each path.
        split: returns the splits of each part.
        make_tokenizer: returns the one tokenizer of all parts.
        facts: what the shards depend on, besides `data` and the documents, in JSON types.
    """

    data: object
    read: Callable[[Announce], list[Iterable[Document]]]
    split: Callable[[list[Iterable[Document]], Said], list[Splits]]
    make_tokenizer: Callable[[list[Splits], Said], AnyTokenizer]
    facts: tuple = ()

    def stores(self, found: list[Iterable[Document]], announce: Announce) -> tuple[AnyTokenizer, list[Store]]:
        """Return the tokenizer and the shards of each part; unchanged files are not read again.

        Args:
            found: the result of `read`.
        """
        cache = cache_folder(self.data.cache_dir)
        path = None
        if all(isinstance(documents, FromFiles) for documents in found):
            files = [file for documents in found for file in documents.files]
            path = preparations.path_of(cache, self.data, files, self.facts)
        if path and (earlier := self._earlier(cache, path, announce)):
            return earlier
        said = Said(announce)
        parts = self.split(found, said)
        tokenizer = self.make_tokenizer(parts, said)
        encoder = self._encoder(tokenizer)
        made = [shards.load_or_build(cache, part, encoder, announce) for part in parts]
        if path:
            names = [folder.name for folder, _ in made]
            preparations.keep(path, {"tokenizer": tokenizer.digest, "shards": names, "notes": said.notes})
        return tokenizer, self._opened(made, encoder, announce)

    def _earlier(self, cache: Path, path: Path, announce: Announce) -> tuple[AnyTokenizer, list[Store]] | None:
        """Return what an earlier start made of the same files; None if there is none, or a part of it is damaged."""
        kept, name = preparations.read(path), self.data.tokenizer
        if kept is None:
            return None
        tokenizer = trained_tokenizer(kept["tokenizer"], cache) if name == "sentencepiece" else open_tokenizer(name)
        if tokenizer is None or tokenizer.digest != kept["tokenizer"]:
            return None
        encoder = self._encoder(tokenizer)
        folders = [cache / "shards" / name for name in kept["shards"]]
        made = [(folder, shards.load(folder, encoder.digest)) for folder in folders]
        if not all(manifest for _, manifest in made):
            return None
        for line in kept["notes"]:
            announce(line)
        return tokenizer, self._opened(made, encoder, announce)

    def _encoder(self, tokenizer: AnyTokenizer) -> AnyTokenizer | ChatTokenizer:
        return ChatTokenizer(tokenizer) if self.data.source in WINDOWS else tokenizer

    def _opened(self, made: list, encoder: AnyTokenizer | ChatTokenizer, announce: Announce) -> list[Store]:
        def again(number: int, announce: Announce) -> Splits:
            return self.split(self.read(announce), Said(announce))[number]

        return [
            Store(folder, manifest, encoder, partial(again, number), announce)
            for number, (folder, manifest) in enumerate(made)
        ]


def training_splits(data, paths: list[str], found: list[Iterable[Document]], said: Said) -> list[Splits]:
    """Return the splits of each path, and of data.validation_path after them, whose documents are all held out."""
    parts = [_split(path, documents, data, said) for path, documents in zip(paths, found, strict=False)]
    parts += held_out_splits(data, [data.validation_path], found[len(paths) :], said)
    for path, part in zip(paths, parts, strict=False):
        _leave_out_heldout(path, part, parts, said)
    return parts


def held_out_splits(data, paths: list[str], found: list[Iterable[Document]], said: Said) -> list[Splits]:
    """Return the documents of each path, all of them held out."""
    return [{"heldout": _scan(path, documents, data, said)} for path, documents in zip(paths, found, strict=False)]


def _leave_out_heldout(path: str, part: Splits, parts: list[Splits], said: Said) -> None:
    """Remove from a part's training documents those that another part, or the validation set, holds out."""
    elsewhere = {span.digest for other in parts if other is not part for span in other.get("heldout", ())}
    kept = [span for span in part["train"] if span.digest not in elsewhere]
    if len(kept) == len(part["train"]):
        return
    if not kept:
        raise DataError(f"data path {path!r}: all documents are held out elsewhere; add others to train on")
    said.note(f"{path}: not trained on {len(part['train']) - len(kept):,} documents that are held out elsewhere")
    part["train"] = kept


def _split(path: str, documents: Iterable[Document], data, said: Said) -> Splits:
    """Return the documents of a source; some are held out unless data.validation_path supplies held-out documents."""
    spans = _scan(path, documents, data, said)
    if data.validation_path:
        return {"train": spans}
    if data.source in WINDOWS and len({span.digest for span in spans}) == 1:
        raise DataError(
            f"data path {path!r}: a single line cannot be split; name held-out data with --config.data.validation_path"
        )
    train, heldout = hold_out(spans, data.holdout_fraction)
    return {"train": train, "heldout": heldout}


def _scan(path: str, documents: Iterable[Document], data, said: Said) -> list[Span]:
    spans = scan(documents, data.bad_documents, said.announce, said.note)
    if not spans:
        raise DataError(f"data path {path!r} (data.source={data.source}): there is no text; name files with text")
    return spans


def tokenizer_of_training(
    data, vocab_size: int, vocab_size_typed: bool, parts: list[Splits], said: Said
) -> AnyTokenizer:  # fmt: skip
    """Return the one tokenizer of all parts; it does not depend on their weights."""
    spans = [span for part in parts for span in part.get("train", ())]
    tokenizer = make_tokenizer(data.tokenizer, vocab_size, spans, cache_folder(data.cache_dir), said.announce)
    if data.tokenizer == "sentencepiece" and tokenizer.vocab_size < vocab_size:
        few = f"the documents give only {tokenizer.vocab_size:,} pieces, not model.vocab_size={vocab_size}"
        if vocab_size_typed:
            raise DataError(f"{few}; use --config.model.vocab_size={tokenizer.vocab_size}, or more text")
        said.note(f"{few}; using {tokenizer.vocab_size:,}")
    return tokenizer
