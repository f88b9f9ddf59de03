# SPDX-License-Identifier: Apache-2.0
"""Readers of tokenizers and of chat templates to fuzz."""

import functools
import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from input_pipeline.chat.encoding import format_of_tokenizer
from input_pipeline.errors import BadDocument
from input_pipeline.sentencepiece_training import train
from input_pipeline.tokenization import AnyTokenizer, open_tokenizer
from tests.fuzz.harness import reader
from tests.input_pipeline.chat.conftest import CHATML
from tests.input_pipeline.memory import spans_of

END = "</s>"
CONFIG = {"eos_token": END, "bos_token": {"content": "<s>", "special": True}, "chat_template": CHATML}
TEXT = "what is the answer? \u2581 value_3 = 7 é 😀\n   I think so \x00"
TALK = [{"role": role, "content": f"{role} says"} for role in ("system", "user", "assistant", "user", "assistant")]
TAGGED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}"
    "{% endgeneration %}{% else %}{{ m['role'] ~ ': ' + m.content }}{% endif %}{% endfor %}"
)
MACRO = (
    "{% macro turn(m, n=1) -%}{{ '<' * n + m.role }}{{ m.content.replace('a', 'b') }}{%- endmacro %}"
    "{% for a in range(3) %}{{ a }}{% endfor %}{% set space = namespace(n=0) %}{% for m in messages %}"
    "{% set space.n = space.n + 1 %}{{ turn(m, space.n) }}{% endfor %}"
)


def _with(model, **parts) -> bytes:
    made = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(made, name, part)
    made.add_special_tokens([END])
    return made.to_str().encode()


@functools.cache
def _tokenizers() -> list[bytes]:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=270, special_tokens=[END], show_progress=False)
    made.train_from_iterator([TEXT] * 3, trainer)
    pieces = {"[UNK]": 0, "a": 1, "##b": 2, "what": 3}
    spaces = pre_tokenizers.Split(tokenizers.Regex(r"\p{L}+|\s+"), "isolated")
    words, unigram = (
        models.WordPiece(pieces, unk_token="[UNK]"),
        models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0),
    )
    shorter = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")])
    return [
        made.to_str().encode(),
        _with(words, normalizer=normalizers.BertNormalizer(), pre_tokenizer=spaces),
        _with(unigram, normalizer=shorter, decoder=decoders.Metaspace()),
        _with(models.WordLevel(pieces, unk_token="[UNK]"), pre_tokenizer=spaces),
    ]  # fmt: skip


def use(tokenizer: AnyTokenizer) -> None:
    """Do with a tokenizer what a run does; ids are those that its vocabulary has."""
    for tokens in (tokenizer.encode(TEXT), *map(list, tokenizer.encode_batch([TEXT, "", "abc"]))):
        assert all(0 <= token < tokenizer.vocab_size for token in tokens)
        assert isinstance(tokenizer.decode(tokens), str)
    tokens, allowed = tokenizer.open_end(tokenizer.encode("def "))
    assert len(allowed) == tokenizer.vocab_size and 0 <= tokenizer.end_of_document < tokenizer.vocab_size
    tokenizer.decode(list(range(min(1000, tokenizer.vocab_size))))


@reader("tokenizer.json", _tokenizers)
def read_tokenizer(content: bytes, folder) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    use(open_tokenizer(str(folder / "tokenizer.json")))


def _configs() -> list[bytes]:
    named = [{"name": "default", "template": CHATML}, {"name": "tools", "template": ""}]
    return [json.dumps(CONFIG).encode(), json.dumps(CONFIG | {"chat_template": named}).encode()]


@reader("tokenizer_config.json", _configs)
def read_config(content: bytes, folder) -> None:
    (folder / "tokenizer.json").write_bytes(_tokenizers()[0])
    (folder / "tokenizer_config.json").write_bytes(content)
    render(open_tokenizer(str(folder / "tokenizer.json")))


@reader("chat template", lambda: [CHATML.encode(), TAGGED.encode(), MACRO.encode()])
def read_template(content: bytes, folder) -> None:
    (folder / "tokenizer.json").write_bytes(_tokenizers()[0])
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    (folder / "chat_template.jinja").write_bytes(content)
    render(open_tokenizer(str(folder / "tokenizer.json")))


def render(tokenizer: AnyTokenizer) -> None:
    """Render a conversation as a run and as generate.py do."""
    form = format_of_tokenizer(tokenizer, "it")
    try:
        pieces = form.pieces(TALK), form.prompt(TALK[:2])
        assert isinstance(form.after_answer(), str)
    except ValueError as error:  # which is of one line of a file
        raise BadDocument("it", "rejected by the chat template", f" ({error})") from None
    assert all(text is None or isinstance(text, str) for found in pieces for text, _ in found)


@functools.cache
def _sentencepieces() -> list[bytes]:
    return [train(spans_of("".join(f"value_{n} = {n}\n" for n in range(300))), 290)]


@reader("sentencepiece model", _sentencepieces)
def read_sentencepiece(content: bytes, folder) -> None:
    (folder / "a.model").write_bytes(content)
    use(open_tokenizer(str(folder / "a.model")))
