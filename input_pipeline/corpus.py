# SPDX-License-Identifier: Apache-2.0
"""A corpus made ready: documents found, split, tokenized once, stored, and opened as window sources."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from input_pipeline.cache import cache_folder
from input_pipeline.documents import Document, hold_out, scan
from input_pipeline.errors import DataError
from input_pipeline.shards import FORMAT, TokenWindows, load_or_build, open_windows
from input_pipeline.sources import read_source
from input_pipeline.synthetic import MarkovWindows
from input_pipeline.tokenization import ByteTokenizer, SentencePieceTokenizer, make_tokenizer


@dataclass(frozen=True)
class Corpus:
    """What a run reads.

    Attributes:
        tokenizer: .vocab_size, .end_of_document (id), .encode(str) -> list[int], .decode(list[int]) -> str,
            .digest; None where tokens stand for no text.
        train, heldout: window sources: .num_documents, .num_tokens (ends of documents among them),
            .num_bytes (of UTF-8), .num_examples(T) and .read(indices, T), which gives int32
            [len(indices), T] `tokens`, `targets`, `segments` (0: padding) and `positions`.
        digest: the same wherever the same documents, tokenizer and split are read.
        gzip_bits_per_byte: `gzip -9` on the held-out documents one at a time; None where there is no text.
    """

    tokenizer: ByteTokenizer | SentencePieceTokenizer | None
    train: TokenWindows | MarkovWindows
    heldout: TokenWindows | MarkovWindows
    digest: str
    gzip_bits_per_byte: float | None


def prepare(
    data, *, vocab_size: int, vocab_size_typed: bool, seed: int = 0, announce: Callable[[str], object] = print
) -> Corpus:
    """Return the corpus that the `data` section describes, from the cache where it was made before.

    Args:
        data: source, path, tokenizer, cache_dir, holdout_fraction.
        vocab_size: ids that the model has room for.
        vocab_size_typed: the user asked for this very size; else a small corpus may have fewer pieces.
        seed: of a synthetic source.
        announce: takes a line now and then while something is built.

    Raises:
        DataError: whatever a user can put right, in one line.
    """
    found = read_source(data, vocab_size=vocab_size, seed=seed)
    if isinstance(found, tuple):
        return Corpus(None, *found, digest=_digest([data.source, vocab_size, seed]), gzip_bits_per_byte=None)
    return _from_documents(found, data, vocab_size, vocab_size_typed, announce)


def _from_documents(
    documents: list[Document], data, vocab_size: int, vocab_size_typed: bool, announce: Callable[[str], object]
) -> Corpus:
    spans = scan(documents)
    if not spans:
        raise DataError(f"data.source={data.source}, data.path={data.path!r}: all {len(documents)} documents are empty")
    cache = cache_folder(data.cache_dir)
    train, heldout = hold_out(spans, data.holdout_fraction)
    tokenizer = make_tokenizer(data.tokenizer, vocab_size, train, cache, announce)
    if data.tokenizer == "sentencepiece" and tokenizer.vocab_size < vocab_size:
        few = f"the documents have {tokenizer.vocab_size:,} pieces in them, not model.vocab_size={vocab_size}"
        if vocab_size_typed:
            raise DataError(f"{few}; use model.vocab_size={tokenizer.vocab_size}, or more text")
        announce(f"{few}; going on with {tokenizer.vocab_size:,}")
    facts = {
        "format": FORMAT,
        "source": _digest([span.digest.hex() for span in spans]),
        "tokenizer": tokenizer.digest,
        "end_of_document": tokenizer.end_of_document,
        "holdout_fraction": data.holdout_fraction,
    }
    folder = cache / "shards" / _digest(facts)
    manifest = load_or_build(folder, {"train": train, "heldout": heldout}, tokenizer, facts, announce)
    gzip_bits_per_byte = manifest.pop("gzip_bits_per_byte")  # depends on the machine's zlib
    return Corpus(
        tokenizer,
        open_windows(folder, manifest, "train"),
        open_windows(folder, manifest, "heldout"),
        digest=_digest(manifest),
        gzip_bits_per_byte=gzip_bits_per_byte,
    )


def _digest(value) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
