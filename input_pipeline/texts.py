# SPDX-License-Identifier: Apache-2.0
"""Turns documents into shards: they are read, split, and tokenized, or their shards of an earlier start are reused."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ml_collections import ConfigDict

from input_pipeline import preparations, shards
from input_pipeline.cache import cache_folder, digest_of_json
from input_pipeline.chat.encoding import ChatTokenizer
from input_pipeline.chat.windows import ConversationWindows, PreferenceWindows
from input_pipeline.errors import DataError
from input_pipeline.reading.documents import Document, Span, hold_out, scan
from input_pipeline.shards import Announce, Splits, Store
from input_pipeline.sources import FromFiles
from input_pipeline.tokenization import AnyTokenizer, train_tokenizer, trained_tokenizer

WINDOWS = {"chat": ConversationWindows, "preferences": PreferenceWindows}  # by source; others have TokenWindows
Found = list[Iterable[Document]]  # of each path


@dataclass
class Notes:
    """Announces lines, and keeps those about the documents, which later starts announce again."""

    announce: Announce
    lines: list[str] = field(default_factory=list)

    def note(self, line: str) -> None:
        self.lines.append(line)
        self.announce(line)


@dataclass(frozen=True)
class Texts:
    """The documents of the parts of a corpus, and how they are split and tokenized."""

    data: ConfigDict  # the section of the configuration
    paths: list[str]  # of the parts
    read: Callable[[Announce], Found]  # returns the documents of each path, and of data.validation_path
    split: Callable[[ConfigDict, list[str], Found, Notes], list[Splits]]  # `training_splits` or `held_out_splits`
    tokenizer: AnyTokenizer | None  # of all parts; None: one with `vocab_size` pieces is trained on them
    vocab_size: int = 0
    vocab_size_typed: bool = False  # whether fewer pieces are an error

    def stores(self, found: Found, announce: Announce) -> tuple[AnyTokenizer, list[Store]]:
        """Return the tokenizer and the shards of each part; unchanged files are not read again.

        `found` is the result of `read`.
        """
        cache = cache_folder(self.data.cache_dir)
        path = self._preparation(found, cache)
        if path and (earlier := self._earlier(cache, path, announce)):
            return earlier
        notes = Notes(announce)
        parts = self.split(self.data, self.paths, found, notes)
        tokenizer = self.tokenizer or self._trained(parts, cache, announce)
        encoder = self._encoder(tokenizer)
        made = [shards.load_or_build(cache, part, encoder, announce) for part in parts]
        if path and path == self._preparation(found, cache):
            names = [(folder.name, digest_of_json(manifest)) for folder, manifest in made]
            preparations.keep(path, {"tokenizer": tokenizer.digest, "shards": names, "notes": notes.lines})
        return tokenizer, self._opened(made, encoder, announce)

    def training_documents(self, stores: list[Store]) -> tuple[list[Document], ...]:
        """Return the training documents of each part, in stored order; all are read again.

        Raises DataError if they are no longer those of the shards.
        """
        parts = self._read_again(str)
        for part, store in zip(parts, stores, strict=True):
            store.check(part)
        return tuple([span.document for span in part["train"]] for part in parts if "train" in part)

    def _read_again(self, announce: Announce) -> list[Splits]:
        return self.split(self.data, self.paths, self.read(announce), Notes(announce))

    def _preparation(self, found: Found, cache: Path) -> Path | None:
        """Return where the result for the present files is kept; None if it does not depend on files alone."""
        if not all(isinstance(documents, FromFiles) and documents.files for documents in found):
            return None
        files = [file for documents in found for file in documents.files]
        facts = [self.split.__name__, self.paths, 0 if self.tokenizer else self.vocab_size]
        return preparations.path_of(cache, self.data, files, facts)

    def _earlier(self, cache: Path, path: Path, announce: Announce) -> tuple[AnyTokenizer, list[Store]] | None:
        """Return what an earlier start made of the same files; None if there is none, or a part of it is damaged."""
        kept = preparations.read(path)
        tokenizer = kept and (self.tokenizer or trained_tokenizer(kept["tokenizer"], cache))
        if not tokenizer or tokenizer.digest != kept["tokenizer"]:  # the template of conversations is part of it
            return None
        made = [(cache / "shards" / name, shards.load(cache / "shards" / name, of)) for name, of in kept["shards"]]
        if not all(manifest for _, manifest in made):
            return None
        for line in kept["notes"]:
            announce(line)
        self._check_pieces(tokenizer, announce)
        return tokenizer, self._opened(made, self._encoder(tokenizer), announce)

    def _trained(self, parts: list[Splits], cache: Path, announce: Announce) -> AnyTokenizer:
        spans = [span for part in parts for span in part.get("train", ())]
        tokenizer = train_tokenizer(self.vocab_size, spans, cache, announce)
        self._check_pieces(tokenizer, announce)
        return tokenizer

    def _check_pieces(self, tokenizer: AnyTokenizer, announce: Announce) -> None:
        """Announce that the documents gave fewer pieces than wanted; DataError if the user typed the number."""
        if self.tokenizer or tokenizer.vocab_size == self.vocab_size:
            return
        few = f"the documents give only {tokenizer.vocab_size:,} pieces, not model.vocab_size={self.vocab_size}"
        if self.vocab_size_typed:
            raise DataError(f"{few}; use --config.model.vocab_size={tokenizer.vocab_size}, or more text")
        announce(f"{few}; using {tokenizer.vocab_size:,}")

    def _encoder(self, tokenizer: AnyTokenizer) -> AnyTokenizer | ChatTokenizer:
        return ChatTokenizer(tokenizer) if self.data.source in WINDOWS else tokenizer

    def _opened(self, made: list, encoder: AnyTokenizer | ChatTokenizer, announce: Announce) -> list[Store]:
        def again(number: int, announce: Announce) -> Splits:
            return self._read_again(announce)[number]

        return [
            Store(folder, manifest, encoder, partial(again, number), announce)
            for number, (folder, manifest) in enumerate(made)
        ]


def training_splits(data: ConfigDict, paths: list[str], found: Found, notes: Notes) -> list[Splits]:
    """Return the splits of each path; data.validation_path is last, with all its documents held out."""
    own, validation = found[: len(paths)], found[len(paths) :]
    parts = [_split(path, documents, data, notes) for path, documents in zip(paths, own, strict=True)]
    if validation:
        parts += held_out_splits(data, [data.validation_path], validation, notes)
    for path, part in zip(paths, parts, strict=False):
        _leave_out_heldout(path, part, parts, notes)
    return parts


def held_out_splits(data: ConfigDict, paths: list[str], found: Found, notes: Notes) -> list[Splits]:
    """Return the documents of each path, all of them held out."""
    return [{"heldout": _scan(path, documents, data, notes)} for path, documents in zip(paths, found, strict=True)]


def _leave_out_heldout(path: str, part: Splits, parts: list[Splits], notes: Notes) -> None:
    """Remove from a part's training documents those that another part, or the validation set, holds out."""
    elsewhere = {span.digest for other in parts if other is not part for span in other.get("heldout", ())}
    kept = [span for span in part["train"] if span.digest not in elsewhere]
    if len(kept) == len(part["train"]):
        return
    if not kept:
        raise DataError(f"data path {path!r}: all documents are held out elsewhere; add others to train on")
    notes.note(f"{path}: not trained on {len(part['train']) - len(kept):,} documents that are held out elsewhere")
    part["train"] = kept


def _split(path: str, documents: Iterable[Document], data, notes: Notes) -> Splits:
    """Return the documents of a source; some are held out unless data.validation_path supplies held-out documents."""
    spans = _scan(path, documents, data, notes)
    if data.validation_path:
        return {"train": spans}
    if data.source in WINDOWS and len({span.digest for span in spans}) == 1:
        raise DataError(
            f"data path {path!r}: a single line cannot be split; name held-out data with --config.data.validation_path"
        )
    train, heldout = hold_out(spans, data.holdout_fraction)
    return {"train": train, "heldout": heldout}


def _scan(path: str, documents: Iterable[Document], data, notes: Notes) -> list[Span]:
    spans = scan(documents, data.bad_documents, notes.announce, notes.note)
    if not spans:
        raise DataError(f"data path {path!r} (data.source={data.source}): there is no text; name files with text")
    return spans
