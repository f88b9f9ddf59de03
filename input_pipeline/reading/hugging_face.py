# SPDX-License-Identifier: Apache-2.0
"""Reads Hugging Face datasets, from a folder or the hub; the `datasets` library is an extra.

For gated data that library reads HF_TOKEN from the environment. This file never handles the token.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from files.paths import expanded
from files.terminal import is_live
from input_pipeline.errors import DataError
from input_pipeline.reading.formats import ROWS, Column, check_column
from input_pipeline.reading.records import reason

FIRST = re.compile(r"(?P<split>\w+)\[:(?P<count>\d+)\]")  # the first rows of a split, as that library writes it


class Table(Column):
    """A column of a loaded dataset; the library reads it from `files`, never from memory."""

    def __init__(self, name: str, field: str, most_bytes: int, rows):
        super().__init__(name, field, most_bytes)
        self._rows, self.files = rows, [Path(file["filename"]) for file in rows.cache_files]

    def columns(self) -> Iterator[pa.Array]:
        for start in range(0, len(self._rows), ROWS):
            yield self._rows[start : start + ROWS].column(self.field).combine_chunks()


def load(name: str, *, subset: str, split: str, field: str, most_bytes: int) -> Table:
    """Return a column of a dataset in a folder (`save_to_disk`, or data files), or by its name on the hub.

    A dataset that was saved alone is the split "train", and also the split that it was taken from. Of a part such as
    train[:1000] on the hub, only files with these rows are downloaded. Cells have at most `most_bytes`. Raises
    DataError if the extra is not installed, or the dataset, subset, split or column does not exist.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "data.source=huggingface needs the package datasets: run `make setup EXTRAS=huggingface`"
        ) from error
    if not name:
        raise DataError(
            "data.source=huggingface needs --config.data.path: a folder, or a name on the hub such as 'org/name'"
        )
    if not is_live(sys.stderr):
        datasets.disable_progress_bars()
    folder = expanded(name)
    where = f"data path {name!r}, split {split!r}" + (f", subset {subset!r}" if subset else "")
    try:
        if any((folder / name).exists() for name in ("dataset_dict.json", "state.json")):
            table = _saved(folder, split)
        elif not folder.exists() and (first := FIRST.fullmatch(split)):
            which = dict(name=name, subset=subset, split=first["split"], count=int(first["count"]), field=field)
            table = datasets.Dataset.from_generator(_streamed, gen_kwargs=which, keep_in_memory=False)
        else:
            place = str(folder) if folder.exists() else name
            table = datasets.load_dataset(place, subset or None, split=split, keep_in_memory=False)
    except (OSError, ValueError, LookupError, RuntimeError, StopIteration, datasets.exceptions.DatasetsError) as error:
        of_stream = isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__
        raise DataError(f"{where}: {reason(of_stream or error)}") from error
    check_column(where, field, table.column_names)
    return Table(name, field, most_bytes, table.select_columns([field]).with_format("arrow"))


def _saved(folder: Path, split: str):
    """Return the rows of a split, or of a part of it, that `save_to_disk` wrote; ValueError if it is not there."""
    import datasets

    if (folder / split).is_dir():
        return datasets.load_from_disk(folder / split, keep_in_memory=False)
    if (folder / "state.json").exists():
        alone = datasets.load_from_disk(folder, keep_in_memory=False)
        splits = {"train": alone} | ({str(alone.split): alone} if alone.split else {})
    else:
        asked = re.findall(r"\w+(?:\.\w+)*", split)
        found = [name for name in asked if (folder / name).is_dir()]
        splits = {name: datasets.load_from_disk(folder / name, keep_in_memory=False) for name in found}
    sizes = {name: len(rows) for name, rows in splits.items()}
    parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    return datasets.concatenate_datasets([splits[part.splitname].select(range(part.from_, part.to)) for part in parts])


def _streamed(name: str, subset: str, split: str, count: int, field: str) -> Iterator[dict]:
    """Yield the first rows of a dataset on the hub; `load_dataset` would download all of it, and then take a part."""
    import datasets

    rows = datasets.load_dataset(name, subset or None, split=split, streaming=True)
    for row in (rows.decode(False) if rows.features else rows).take(count):  # images and sounds stay as they are
        yield {field: row[field]} if field in row else row
