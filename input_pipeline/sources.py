# SPDX-License-Identifier: Apache-2.0
"""Where documents come from; the name of a source is what data.source says.

A source takes (data, path, *, vocab_size, seed, announce), the path a local one, and returns either documents, which
are then tokenized, stored and packed, or a pair of ready window sources (training, held-out). A new one is a function
below (or in a file of its own, imported here) under `@source`, and a test; nothing else names it.
"""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from input_pipeline.cache import cache_folder
from input_pipeline.chat.encoding import format_of_tokenizer
from input_pipeline.chat.messages import KINDS
from input_pipeline.chat.records import Rendered
from input_pipeline.errors import DataError
from input_pipeline.puzzles import build
from input_pipeline.reading import formats, hugging_face, remote
from input_pipeline.reading.documents import Document, TextFile
from input_pipeline.reading.records import Reader, RecordFile
from input_pipeline.synthetic import MarkovWindows
from input_pipeline.tokenization import open_tokenizer
from input_pipeline.windows import Windows

FILES: dict[str, type[RecordFile] | None] = {  # sources that read every file as this; None: as a document of text
    "text": None, "jsonl": formats.JsonLines, "csv": formats.Csv, "parquet": formats.Parquet,
    "tfrecord": formats.TFRecord,
}  # fmt: skip
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def read_source(
    data, *, vocab_size: int, seed: int, path: str = "", announce: Callable[[str], object] = print
) -> Iterable[Document] | tuple[Windows, Windows]:
    """Return what data.source gives for `path`, by default data.path; what a URL names is copied to local disk first.

    Raises:
        DataError: no such source, what the source itself says, that a URL cannot be copied, or that the model has no
            room for the tokens.
    """
    if data.source not in SOURCES:
        raise DataError(f"data.source={data.source}: no such source; use {', '.join(sorted(SOURCES))}")
    path = path or data.path
    if remote.is_url(path):
        path = remote.fetch(path, cache_folder(data.cache_dir), announce)
    found = SOURCES[data.source](data, path, vocab_size=vocab_size, seed=seed, announce=announce)
    needed = max(windows.vocab_size for windows in found) if isinstance(found, tuple) else 0
    if vocab_size < needed:
        raise DataError(
            f"model.vocab_size={vocab_size} is less than the {needed} tokens of the puzzles; use "
            f"--config.model.vocab_size={needed}"
        )
    return found


def _files(data, path: str, **_) -> Iterable[Document]:
    """Files of one format; data.field of each record is a document, or a cell of that column."""
    return _documents(data, find_files(path), lambda file: FILES[data.source])


def _conversations(data, path: str, **_) -> Iterable[Document]:
    """Files of a conversation or a preference per line, rendered by the template of data.tokenizer if it has one."""
    if data.tokenizer == "sentencepiece":
        raise DataError(
            f"data.source={data.source} needs a tokenizer that is there; use that of the run or model that is "
            "fine-tuned, --config.data.tokenizer=FOLDER/tokenizer.json or tokenizer.model, or byte"
        )
    form = format_of_tokenizer(open_tokenizer(data.tokenizer), data.tokenizer)
    return _documents(
        data, find_files(path), lambda file: lambda path, _, most_bytes: Rendered(path, most_bytes, data.source, form)
    )


SOURCES: dict[str, Callable] = {
    **dict.fromkeys(FILES, _files), **dict.fromkeys(KINDS, _conversations), "sudoku": build.sudokus,
    "maze": build.mazes, "arc": build.arc_tasks, "puzzles": build.published,
}  # fmt: skip


def source(function: Callable) -> Callable:
    """Register a source under its function's name."""
    SOURCES[function.__name__] = function
    return function


@source
def auto(data, path: str, **_) -> Iterable[Document]:
    """Each file by its suffix, text where it says nothing; without a path the Python standard library."""
    return _documents(data, find_files(path), format_of) if path else python(data, path)


@source
def huggingface(data, path: str, **_) -> Iterable[Document]:
    """A Hugging Face dataset; column data.field of each row is a document.

    The path is a folder (`save_to_disk`, or data files) or a name on the hub, with `:SPLIT` for another split
    than `train`.
    """
    name, split = (path, "") if os.path.exists(path) else path.partition(":")[::2]
    table = hugging_face.load(
        name, subset=data.subset, split=split or "train", field=data.field, most_bytes=data.max_document_mib << 20
    )
    return Reader().records([table])


@source
def python(data, path: str, **_) -> Iterable[Document]:
    """The Python standard library's own source on this machine: *.py without site-packages and tests.

    Files that cannot be read as UTF-8 are left out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in _below(root, NOT_LIBRARY) if path.suffix == ".py" and _is_utf8(path)]
    if not paths:
        raise DataError(
            f"data.source=python: no *.py files under {root}; use --config.data.path=FOLDER with text of your own"
        )
    return _documents(data, paths, lambda file: None)


@source
def synthetic(data, path: str, *, vocab_size: int, seed: int, **_) -> tuple[MarkovWindows, MarkovWindows]:
    """A random Markov chain over vocab_size tokens with 1.75 bits a token; no files."""
    return MarkovWindows(vocab_size, seed, 1 << 26, "train"), MarkovWindows(vocab_size, seed, 1 << 18, "heldout")


def format_of(file: Path) -> type[RecordFile] | None:
    """Return what reads a file with this suffix, compressed or not; None for text."""
    suffix, inner = file.suffix.lower(), Path(file.stem).suffix.lower()
    if suffix in formats.COMPRESSED and inner not in formats.BY_SUFFIX:
        raise DataError(
            f"{file}: compressed text is not read; decompress it, or make it {Path(file.stem).stem}.jsonl.gz"
        )
    suffix = inner if suffix in formats.COMPRESSED else suffix
    return formats.BY_SUFFIX.get(suffix.partition("-")[0])  # .tfrecord-00000-of-00010


def find_files(path: str) -> list[Path]:
    """Return the files that a path names.

    It is a file, a folder (all files below it, in order of their names; hidden ones and linked folders left
    out) or a glob (`**` for any depth); `~` is the home folder. In a glob the leading folders that exist under
    exactly these names are no pattern, so `data[1]/*.txt` is what the folder `data[1]` holds, if there is one.
    """
    if not path:
        raise DataError("data.path is empty; name a file, a folder, or a glob such as 'texts/*.txt'")
    place = Path(path).expanduser()
    try:
        if place.is_file():
            return [place]
        found = map(Path, glob.glob(_pattern(place), recursive=True))
        matches = (path for path in found if path.is_file() or not path.exists())
        files = list(_below(place)) if place.is_dir() else sorted(matches)
    except OSError as error:
        raise DataError(f"data path {path!r}: {error.filename}: {error.strerror}") from error
    if not place.is_dir() and not glob.has_magic(str(place)):
        raise DataError(
            f"data path {path!r}: no such file or folder (looked in {Path.cwd()}); "
            "a name on the Hugging Face hub needs --config.data.source=huggingface"
        )
    if not files:
        what = "holds no file, hidden ones aside" if place.is_dir() else "matches no file"
        raise DataError(
            f"data path {path!r}: {what} (looked in {Path.cwd()}); name a file, or a folder or glob of some"
        )
    return files


def _pattern(place: Path) -> str:
    """Return a path as a pattern for glob, its leading folders that exist under these very names taken literally."""
    folder, rest = Path(place.anchor), list(place.parts[len(Path(place.anchor).parts) :])
    while rest and (folder / rest[0]).is_dir():
        folder /= rest.pop(0)
    return os.path.join(glob.escape(str(folder)), *rest)


def _documents(data, files: list[Path], format_of: Callable[[Path], type[RecordFile] | None]) -> Iterator[Document]:
    """Yield the documents of the files in order; `format_of` is None of a file that is one."""
    reader = Reader()
    for file in files:
        if kind := format_of(file):
            yield from reader.records([kind(file, data.field, data.max_document_mib << 20)])
        else:
            yield TextFile(str(file))


def _below(root: Path, skipped: set[str] = frozenset()) -> Iterator[Path]:
    """Yield the files below a folder in order of their paths, without hidden and skipped names."""
    for folder, names, files in os.walk(root, onerror=_unreadable):
        names[:] = sorted(name for name in names if name not in skipped and not name.startswith("."))
        paths = (Path(folder, name) for name in sorted(files) if not name.startswith("."))
        # No pipes, no sockets; a link to what is not there is for who opens it to name.
        yield from (path for path in paths if path.is_file() or not path.exists())


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text("utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True


def _unreadable(error: OSError) -> None:
    raise DataError(f"data.path: {error.filename}: {error.strerror}") from error
