# SPDX-License-Identifier: Apache-2.0
"""A tokenizer.json with a chat template, and files of conversations."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tests.input_pipeline.conftest import corpus, section, texts  # noqa: F401

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]


def talk(*contents: str, system: str = "") -> list[dict]:
    """Return messages in turns, the user's first."""
    roles = ("user", "assistant") * len(contents)
    turns = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return [{"role": "system", "content": system}] * bool(system) + turns


def conversation(number: int) -> list[dict]:
    """Return one that is different for each number, of one to three answers."""
    turns = [part for turn in range(1 + number % 3) for part in (f"what is {number} + {turn}?", f"{number + turn}!")]
    return talk(*turns, system="Add." * (number % 2))


def write_lines(path, records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def made_tokenizer(template: str | None, folder, **config) -> str:
    """Write a byte-level BPE that reports the offsets of white space as Llama 3's does; return its path."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["what is the answer?\n    I think so    \nassistant user"] * 3, trainer)
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": {"content": "<s>"}, "chat_template": template} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder / "tokenizer.json")


@pytest.fixture
def write_tokenizer(tmp_path):
    """Write a tokenizer, by default in the test's folder; see `made_tokenizer`."""
    return lambda template, folder=tmp_path, **config: made_tokenizer(template, folder, **config)
