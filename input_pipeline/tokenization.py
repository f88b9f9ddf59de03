# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back: bytes, numbers, SentencePiece trained on the corpus or given, or a tokenizer.json.

The trained tokenizer is a byte-pair encoding with byte fallback that does not change text: it does not normalise, adds
no leading space, and keeps white space in separate pieces. Decoding restores any text exactly. A tokenizer.json may
normalise; decoding then returns the normalised text. SentencePiece writes a space as U+2581, so a U+2581 in the text
itself is encoded as its three bytes. A given model that puts a space before a text puts one after each U+2581, too; one
without byte pieces does not know U+2581.
"""

import re
import types
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
import sentencepiece

from files.atomic import writing
from files.json_reader import Object, parse_json
from files.paths import expanded
from input_pipeline import sentencepiece_training
from input_pipeline.cache import digest, locked
from input_pipeline.errors import DataError
from input_pipeline.reading.documents import Span, check_unchanged
from input_pipeline.reading.json_lines import shown

MOST_BYTES = 128 << 20  # of a tokenizer's file; the largest published ones have about 60 MB
MOST_IDS = 1 << 24
SPACE_MARK = "\u2581"
CHOICES = "use byte, numbers, sentencepiece, or the path of a .model file or a tokenizer.json"


class ByteTokenizer:
    """A token is a byte; byte 0 is also the end of a document."""

    vocab_size = 256
    end_of_document = 0
    digest = "byte"
    files = types.MappingProxyType({})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def open_end(self, tokens: list[int]) -> tuple[list[int], np.ndarray]:
        """Return the tokens of a text to be continued, and bool [vocab_size], the allowed next tokens: all."""
        return tokens, np.ones(self.vocab_size, bool)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return an integer array for each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: list[int]) -> str:
        """Return the text; bytes that are not UTF-8 become U+FFFD, ids that are not bytes are skipped."""
        return bytes(token for token in tokens if token < self.vocab_size).decode(errors="replace")


class NumberTokenizer(ByteTokenizer):
    """A token is a number from 1 to 99, or else an ASCII character: for tasks of arithmetic.

    A larger number, or one with leading zeros, has several tokens.
    """

    first_number = 128  # the id of the number 0, which is not used
    vocab_size = first_number + 100
    digest = "numbers"
    _parts = re.compile(r"[1-9][0-9]?|[\0-\x7f]")

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; characters that are not ASCII have none."""
        return [
            self.first_number + int(part) if part[0] in "123456789" else ord(part) for part in self._parts.findall(text)
        ]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return an integer array for each text."""
        return [np.array(self.encode(text), np.uint8) for text in texts]

    def decode(self, tokens: list[int]) -> str:
        """Return the text; ids that are not tokens are skipped."""
        of_number = self.first_number
        return "".join(
            chr(token) if token < of_number else str(token - of_number) for token in tokens if token < self.vocab_size
        )


BUILT_IN = {"byte": ByteTokenizer, "numbers": NumberTokenizer}


class Pieces:
    """Base of tokenizers whose tokens are pieces of text; `texts` has the text of each token, None for a mark."""

    texts: list[str | None]

    def open_end(self, tokens: list[int]) -> tuple[list[int], np.ndarray]:
        """Return the tokens of a text to be continued without the last one, and the tokens that may replace it.

        The replacements, bool [vocab_size], are the pieces that begin with it. A last token that is a byte or a mark is
        kept.
        """
        last = self.texts[tokens[-1]] if tokens else None
        if last is None:
            return tokens, np.ones(len(self.texts), bool)
        return tokens[:-1], np.array([piece is not None and piece.startswith(last) for piece in self.texts])


class SentencePieceTokenizer(Pieces):
    """A SentencePiece model whose end-of-sentence piece ends documents; `files`, {name: content}, are its source.

    Raises:
        DataError: `model` is not a SentencePiece model, or has no end-of-sentence piece.
    """

    def __init__(self, model: bytes, name: str):
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
            self._pieces = self._model.id_to_piece(list(range(self._model.vocab_size())))
        except (RuntimeError, UnicodeDecodeError) as error:  # a piece, or the library's message about it, is not UTF-8
            raise DataError(f"data.tokenizer={name}: not a SentencePiece model; {CHOICES}") from error
        self.files = {"tokenizer.model": model}
        self.vocab_size = self._model.vocab_size()
        self.end_of_document = self._model.eos_id()
        self.digest = digest(model)
        self._mark = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        if self.end_of_document < 0:
            raise DataError(f"data.tokenizer={name}: has no end-of-sentence piece to end documents; train it with one")

    def published_start(self) -> list[int]:
        """Return the token before a text: <s>, or without one the end of a document."""
        return [self._model.bos_id() if self._model.bos_id() >= 0 else self.end_of_document]

    def encode(self, text: str) -> list[int]:
        head, *rest = self._model.encode(text.split(SPACE_MARK))
        return head + [token for part in rest for token in self._mark + part]

    @cached_property
    def texts(self) -> list[str | None]:
        ids = list(range(self.vocab_size))
        marks = zip(self._model.is_byte(ids), self._model.is_control(ids), self._model.is_unknown(ids), strict=True)
        return [None if any(mark) else piece for mark, piece in zip(marks, self._pieces, strict=True)]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return an int32 array for each text; the texts are encoded in parallel."""
        plain = iter(self._model.encode([text for text in texts if SPACE_MARK not in text], num_threads=-1))
        return [np.array(self.encode(text) if SPACE_MARK in text else next(plain), np.int32) for text in texts]

    def decode(self, tokens: list[int]) -> str:
        """Return the text; bytes that are not UTF-8 become U+FFFD, ids that are not pieces are skipped."""
        return self._model.decode([int(token) for token in tokens if token < self.vocab_size])


class NamedTemplate(Object):
    """One of several chat templates."""

    name: str
    template: str


class TokenizerFile(Object):
    """The keys that are read from a tokenizer.json."""

    model: dict[str, Any]
    truncation: NotRequired[Any]
    padding: NotRequired[Any]


class TokenizerConfig(Object):
    """The keys that are read from a tokenizer_config.json, in addition to its special tokens."""

    chat_template: NotRequired[str | list[NamedTemplate] | None]


class HuggingFaceTokenizer(Pieces):
    """A tokenizer.json, read by the `tokenizers` package; eos_token in its tokenizer_config.json ends documents.

    Special tokens are recognised inside texts, as in all readers of such files; none is added.

    Attributes:
        chat_template: from chat_template.jinja in the same folder, else from tokenizer_config.json; "" if there is
            none, None if there are several without a default.
        special_tokens: {name in chat templates (bos_token, eos_token, ...): text}.

    Raises:
        DataError: a file is missing or invalid, or no token ends documents. Its methods raise it if the library cannot
            encode a text, for example because the vocabulary has no token for unknown text.
    """

    def __init__(self, path: Path):
        import tokenizers  # imported here because few runs need it

        config_file, self._library = path.with_name("tokenizer_config.json"), Library(f"data.tokenizer={path}")
        try:
            self.files = {"tokenizer.json": _content(path), "tokenizer_config.json": _content(config_file)}
        except OSError as error:
            raise DataError(
                f"data.tokenizer={path}: {error.strerror} ({Path(error.filename).name}); a tokenizer.json needs a "
                "tokenizer_config.json in the same folder, whose eos_token ends documents"
            ) from None
        try:
            model = parse_json(self.files["tokenizer.json"], TokenizerFile, path.name, max_bytes=MOST_BYTES)
            config = parse_json(self.files[config_file.name], TokenizerConfig, config_file.name, max_bytes=MOST_BYTES)
            self.special_tokens = _special_tokens(config)
            self.chat_template = self._chat_template(path.with_name("chat_template.jinja"), config)
            with self._library:
                self._tokenizer = tokenizers.Tokenizer.from_buffer(self.files["tokenizer.json"])
        except DataError:
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"data.tokenizer={path}: not a tokenizer ({' '.join(str(error).split())[:200]})") from None
        eos = self.special_tokens.get("eos_token")
        self._tokenizer.post_processor = None  # it adds unwanted tokens, and some omit spaces from offsets
        self._tokenizer.no_truncation()  # truncation and padding are unwanted too
        self._tokenizer.no_padding()
        self.end_of_document = self._tokenizer.token_to_id(eos) if eos else None
        if self.end_of_document is None:
            raise DataError(
                f"data.tokenizer={path}: no token ends documents: eos_token in {config_file.name} is {shown(eos)}, "
                "which is not in the vocabulary; set it to a token of the vocabulary"
            )
        self._tokens = {number: token for token, number in self._tokenizer.get_vocab().items()}
        self.vocab_size = max(self._tokens) + 1
        if self.vocab_size > MOST_IDS:
            raise DataError(
                f"data.tokenizer={path}: has the token id {self.vocab_size - 1}; ids below {MOST_IDS:,} are supported"
            )
        self.digest = digest(b"\0".join(self.files.values()))
        if model.get("truncation") or model.get("padding"):
            self.digest += "-whole"  # under the plain digest, caches hold truncated or padded texts
        if model["model"].get("dropout"):
            self._tokenizer.model.dropout = None  # a text would have other tokens each time
            self.digest += "-certain"

    def published_start(self) -> list[int]:
        """Return the tokens that the file itself puts before a text, such as <s>; often there are none."""
        import tokenizers

        with self._library:
            raw = tokenizers.Tokenizer.from_buffer(self.files["tokenizer.json"])
            raw.no_padding()
            raw.no_truncation()
            ids, mark = raw.encode("a").ids, raw.encode("a", add_special_tokens=False).ids
        return ids[: ids.index(mark[0])] if mark else []

    def _chat_template(self, file: Path, config: dict) -> str | None:
        """Return the chat template; a separate file of it is added to the tokenizer's files."""
        if file.is_file():
            self.files[file.name] = _content(file)
            return self.files[file.name].decode()
        found = config.get("chat_template") or ""
        if isinstance(found, list):  # several named templates
            found = next((one["template"] for one in found if one["name"] == "default"), None)
        return found

    def encode(self, text: str) -> list[int]:
        with self._library:  # the call for one text would hold the GIL, for seconds if the text is long
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_spans(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the tokens of each text, int32 [tokens], and the character range of each token, [tokens, 2]."""
        found = self._encode_batch(texts)
        return [(np.array(one.ids, np.int32), np.array(one.offsets, np.int64).reshape(-1, 2)) for one in found]

    @cached_property
    def texts(self) -> list[str | None]:
        marks = {number for number, token in self._tokens.items() if re.fullmatch("<0x[0-9A-F]{2}>", token)}
        marks.update(self._tokenizer.get_added_tokens_decoder())
        return [None if number in marks else self._tokens.get(number) for number in range(self.vocab_size)]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return an int32 array for each text; the texts are encoded in parallel."""
        return [np.array(found.ids, np.int32) for found in self._encode_batch(texts)]

    def decode(self, tokens: list[int]) -> str:
        """Return the text with special tokens; ids that are not tokens are skipped."""
        known = [int(token) for token in tokens if int(token) in self._tokens]
        with self._library:
            return self._tokenizer.decode(known, skip_special_tokens=False)

    def _encode_batch(self, texts: list[str]) -> list:
        with self._library:
            return self._tokenizer.encode_batch(texts, add_special_tokens=False)


class Library:
    """Turns exceptions of the `tokenizers` package inside its block into one line.

    The package raises plain exceptions, and Rust panics of a class that no module exports: both are recognised by name.
    """

    KINDS = ("Exception", "PanicException")

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace) -> None:
        if kind and kind.__name__ in self.KINDS:
            raise DataError(f"{self._name}: cannot be used ({' '.join(str(error).split())[:200]})") from None


AnyTokenizer = ByteTokenizer | SentencePieceTokenizer | HuggingFaceTokenizer


def given_tokenizer(name: str, vocab_size: int) -> AnyTokenizer | None:
    """Return the tokenizer that data.tokenizer names, one of BUILT_IN or the path of its file; None: `sentencepiece`.

    Raises:
        DataError: the tokenizer does not exist or has more ids than vocab_size.
    """
    if name == "sentencepiece":
        return None
    tokenizer = open_tokenizer(name)
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"model.vocab_size={vocab_size} is less than the {tokenizer.vocab_size:,} ids of "
            f"data.tokenizer={name}; use --config.model.vocab_size={tokenizer.vocab_size} or more"
        )
    return tokenizer


def open_tokenizer(name: str) -> AnyTokenizer:
    """Return one of BUILT_IN, or the tokenizer in a .model file or a tokenizer.json; DataError if there is none."""
    if not name:
        raise DataError(
            "data.tokenizer is empty; name one (that of the weights, if they were imported without it): "
            f"--config.data.tokenizer=FILE, a tokenizer.json or a .model file, or {' or '.join(BUILT_IN)}"
        )
    if name in BUILT_IN:
        return BUILT_IN[name]()
    if name.endswith(".json"):
        return HuggingFaceTokenizer(expanded(name))
    try:
        return SentencePieceTokenizer(_content(expanded(name)), name)
    except OSError as error:
        raise DataError(f"data.tokenizer={name}: {error.strerror}; {CHOICES}") from error


def train_tokenizer(
    vocab_size: int, spans: list[Span], cache: Path, announce: Callable[[str], object]
) -> SentencePieceTokenizer:
    """Return the tokenizer trained on these documents, from the cache if it was trained before.

    The documents may give fewer pieces than vocab_size. Raises DataError if vocab_size has no room for byte fallback.
    """
    if vocab_size <= sentencepiece_training.NUM_FIXED:
        raise DataError(
            f"model.vocab_size={vocab_size} is too small for a SentencePiece tokenizer, which has 256 byte pieces "
            f"and 2 special pieces; use --config.model.vocab_size={sentencepiece_training.NUM_FIXED + 1} or more, "
            "or --config.data.tokenizer=byte"
        )
    facts = repr((sentencepiece.__version__, sentencepiece_training.OPTIONS, vocab_size)).encode()
    folder, name = cache / "tokenizers", digest(facts, *(span.key for span in spans))
    with locked(folder / f"{name}.lock", announce):
        for path in folder.glob(f"{name}-*.model"):
            if trained := _intact(path):
                return trained
            path.unlink()
        announce(f"training a SentencePiece tokenizer with {vocab_size:,} pieces")
        model = sentencepiece_training.train(spans, vocab_size)
        check_unchanged(spans, announce)  # the model is found again by their digests
        with writing(folder / f"{name}-{digest(model)}.model") as file:
            file.write(model)
    return SentencePieceTokenizer(model, "sentencepiece")


def trained_tokenizer(model_digest: str, cache: Path) -> SentencePieceTokenizer | None:
    """Return a tokenizer that was trained before, by its digest; None if the cache does not have it."""
    found = map(_intact, (cache / "tokenizers").glob(f"*-{model_digest}.model"))
    try:
        return next((trained for trained in found if trained), None)
    except OSError:  # another process removed it, because it is damaged, or it is another user's
        return None


def _intact(path: Path) -> SentencePieceTokenizer | None:
    """Return a trained tokenizer; None if its file does not match the digest in its name."""
    model = path.read_bytes()
    return SentencePieceTokenizer(model, path.name) if path.stem.endswith(f"-{digest(model)}") else None


def _content(path: Path) -> bytes:
    """Return the content of a tokenizer's file; DataError if it is larger than MOST_BYTES."""
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise DataError(f"data.tokenizer={path}: larger than {MOST_BYTES:,} bytes, which no tokenizer is; {CHOICES}")
    return content


def _special_tokens(config: dict) -> dict[str, str]:
    """Return the special tokens of a tokenizer_config.json, where each is a text or an object with its content."""
    named = {name: token for name, token in config.items() if name.endswith("_token") and token}
    texts = {name: token["content"] if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
