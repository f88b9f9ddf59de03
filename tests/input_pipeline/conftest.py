# SPDX-License-Identifier: Apache-2.0
"""A small corpus on disk, and the `data` section that reads it into a cache of its own."""

import pytest
from ml_collections import ConfigDict

from input_pipeline.corpus import prepare

WORDS = ("def", "return", "self", "value", "index", "for", "while", "import", "class", "None", "True", "if", "yield")


def make_text(number: int, lines: int = 40) -> str:
    """Return a program-like text, different for each number."""
    rows = [
        f"{'    ' * ((number + k) % 3)}{WORDS[(number * 7 + k) % 13]} name_{(number * k) % 17} = {number * k}\n"
        for k in range(lines)
    ]
    return "".join(rows)


@pytest.fixture
def texts(tmp_path):
    """A folder of 39 documents, two of them the same."""
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for number in range(38):
        place = folder / "deep" if number % 5 == 0 else folder
        (place / f"{number:02d}.txt").write_text(make_text(number))
    (folder / "copy.txt").write_text(make_text(3))
    return folder


@pytest.fixture
def section(tmp_path, texts):
    """Make a `data` section, by default with byte tokens of the small corpus."""

    def make(**changes):
        defaults = {"source": "text", "path": str(texts), "tokenizer": "byte", "cache_dir": str(tmp_path / "cache")}
        defaults |= {
            "mixture": "",
            "stream": "",
            "field": "text",
            "subset": "",
            "bad_documents": "error",
            "max_document_mib": 256,
        }
        return ConfigDict({**defaults, "validation_path": "", "holdout_fraction": 0.2, **changes})

    return make


@pytest.fixture
def corpus(section):
    """Prepare the small corpus; keyword arguments change its `data` section."""

    def make(vocab_size=256, vocab_size_typed=False, announce=lambda line: None, with_documents=False, **changes):
        return prepare(
            section(**changes), vocab_size=vocab_size, vocab_size_typed=vocab_size_typed, announce=announce,
            with_documents=with_documents,
        )  # fmt: skip

    return make
