# SPDX-License-Identifier: Apache-2.0
"""What readers of documents share: a `data` section, and that what was accepted can be read again."""

from configs.base import get_config
from input_pipeline.reading.documents import check_unchanged, scan
from input_pipeline.sources import read_source

RECORD = {"text": 'one line\nand another, "quoted"; é 😀 \u2028', "id": 1, "meta": {"tags": ["a", None, 1.5]}}


def section(folder, **changes):
    """Return the section of the configuration for data in a folder, with a cache there."""
    data = get_config().data
    data.update({"cache_dir": str(folder / "cache"), "tokenizer": "byte", "holdout_fraction": 0.2} | changes)
    return data


def read_all(path, **changes) -> list[str]:
    """Return the documents of a path; assert that they can be read again, and without the bad ones."""
    data = section(path.parent, path=str(path), **changes)
    spans = scan(read_source(data, vocab_size=512, seed=0), data.bad_documents, str)
    texts = ["".join(span.text()) for span in spans]
    check_unchanged(spans, str)
    assert all(texts) and [len(text.encode()) for text in texts] == [span.size for span in spans]
    return texts


def read_either_way(path, **changes) -> None:
    """Read a path without bad documents, and then with them as errors; both must give the same documents."""
    some = read_all(path, bad_documents="skip", **changes)
    assert read_all(path, bad_documents="error", **changes) == some
