# SPDX-License-Identifier: Apache-2.0
"""Where documents come from. A source is a function here; its name is what data.source says.

A source takes (data, vocab_size, seed) and returns either documents, which are then tokenized, stored
and packed, or a pair of ready window sources (training, held-out). A new one is a function below (or in
a file of its own, imported here) under `@source`, and a test; nothing else names it.
"""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from input_pipeline.documents import Document
from input_pipeline.errors import DataError
from input_pipeline.synthetic import MarkovWindows

SOURCES: dict[str, Callable] = {}
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def source(function: Callable) -> Callable:
    """Register a source under its function's name."""
    SOURCES[function.__name__] = function
    return function


def read_source(data, *, vocab_size: int, seed: int) -> list[Document] | tuple:
    """Return what data.source gives; `auto` is `text` where data.path is set, else `python`.

    Raises:
        DataError: no such source, or what the source itself says.
    """
    name = data.source
    if name == "auto":
        name = "text" if data.path else "python"
    if name not in SOURCES:
        raise DataError(f"data.source={name}: no such source; use {', '.join(['auto', *sorted(SOURCES)])}")
    return SOURCES[name](data, vocab_size, seed)


@source
def python(data, vocab_size: int, seed: int) -> list[Document]:
    """The Python standard library's own source on this machine: *.py without site-packages and tests.

    Files that cannot be read as UTF-8 are left out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in _files(root, NOT_LIBRARY) if path.suffix == ".py" and _is_utf8(path)]
    if not paths:
        raise DataError(f"data.source=python: no *.py files under {root}; use data.path=FOLDER with text of your own")
    return [_document(path) for path in paths]


@source
def text(data, vocab_size: int, seed: int) -> list[Document]:
    """The UTF-8 text files that data.path names, a document each.

    data.path is a file, a folder (all files below it, in order of their names; hidden ones and linked
    folders left out) or a glob (`**` for any depth); `~` is the home folder.
    """
    if not data.path:
        raise DataError("data.source=text needs data.path: a file, a folder, or a glob such as 'texts/*.txt'")
    path = Path(data.path).expanduser()
    if path.is_file():
        return [_document(path)]
    if path.is_dir():
        paths = list(_files(path))
    elif glob.has_magic(str(path)):
        paths = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name))
    else:
        raise DataError(f"data.path={data.path}: no such file or folder (looked in {Path.cwd()})")
    if not paths:
        raise DataError(f"data.path={data.path}: matches no file (looked in {Path.cwd()})")
    return [_document(path) for path in paths]


@source
def synthetic(data, vocab_size: int, seed: int) -> tuple[MarkovWindows, MarkovWindows]:
    """A random Markov chain over vocab_size tokens with 1.75 bits a token; no files."""
    return MarkovWindows(vocab_size, seed, 1 << 26, "train"), MarkovWindows(vocab_size, seed, 1 << 18, "heldout")


def _document(path: Path) -> Document:
    return Document(str(path), partial(open, path, "rb"))


def _files(root: Path, skipped: set[str] = frozenset()) -> Iterator[Path]:
    """Yield the files below a folder in order of their paths, without hidden and skipped names."""
    for folder, names, files in os.walk(root, onerror=_unreadable):
        names[:] = sorted(name for name in names if name not in skipped and not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text("utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True


def _unreadable(error: OSError) -> None:
    raise DataError(f"data.path: {error.filename}: {error.strerror}") from error
