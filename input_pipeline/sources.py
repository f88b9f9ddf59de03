# SPDX-License-Identifier: Apache-2.0
"""Sources of documents; data.source names one of them.

A source is a function of (data, path, *, vocab_size, seed, announce), with a local path. It returns documents, which
are then tokenized, stored and packed, or a pair of window sources (training, held-out). A new source needs a function
with `@source`, below or in a file that is imported here, and a test. Nothing else names it.
"""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from files.paths import expanded
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
from input_pipeline.tasks.countdown import CountdownRollouts, CountdownWindows
from input_pipeline.tasks.labeled import LabeledWindows, split
from input_pipeline.tasks.questions import QuestionRollouts, QuestionWindows
from input_pipeline.tasks.task_windows import Glyphs, LinearMaps, Sinusoids
from input_pipeline.tokenization import open_tokenizer
from input_pipeline.windows import Windows

FILES: dict[str, type[RecordFile] | None] = {  # sources that read every file in one format; None: a file is one text
    "text": None, "jsonl": formats.JsonLines, "csv": formats.Csv, "parquet": formats.Parquet,
    "tfrecord": formats.TFRecord,
}  # fmt: skip
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class FromFiles:
    """Documents that depend only on the section `data`, on the tokenizer, on files, and on the code of this package.

    Later starts do not read unchanged files again; the documents of any other iterable are read at each start.
    """

    files: list[Path]
    documents: Iterable[Document]

    def __iter__(self) -> Iterator[Document]:
        return iter(self.documents)


def read_source(
    data, *, vocab_size: int, seed: int, path: str = "", announce: Callable[[str], object] = print
) -> Iterable[Document] | tuple[Windows, Windows]:
    """Return the documents, or the window sources, of data.source for `path`, by default data.path.

    The files of a URL are copied to local disk first. Raises DataError if the source does not exist or rejects its
    data, a URL cannot be copied, or the model's vocabulary is smaller than that of the window sources.
    """
    check_name(data)
    path = path or data.path
    if remote.is_url(path):
        path = remote.fetch(path, cache_folder(data.cache_dir), announce)
    found = SOURCES[data.source](data, path, vocab_size=vocab_size, seed=seed, announce=announce)
    _check_found(data.source, found)
    needed = max(windows.vocab_size for windows in found) if isinstance(found, tuple) else 0
    if vocab_size < needed:
        raise DataError(
            f"model.vocab_size={vocab_size} is less than the {needed} tokens of data.source={data.source}; use "
            f"--config.model.vocab_size={needed}"
        )
    return found


def check_name(data) -> None:
    """Raise DataError if data.source does not exist."""
    if data.source not in SOURCES:
        raise DataError(
            f"data.source={data.source} does not exist; use one of {', '.join(sorted(SOURCES))}; if a recipe adds it, "
            "name that recipe by --config"
        )


def _check_found(name: str, found: object) -> None:
    """Raise TypeError if a source returned neither documents nor two window sources."""
    is_pair = isinstance(found, tuple) and len(found) == 2 and all(isinstance(one, Windows) for one in found)
    if not is_pair and (isinstance(found, tuple | str) or not isinstance(found, Iterable)):
        raise TypeError(
            f"data.source={name} returned {type(found).__name__}; it must return an iterable of documents, or a pair "
            "of Windows (training, held-out)"
        )


def _files(data, path: str, **_) -> Iterable[Document]:
    """Return the documents in files of one format: data.field of each record, or each cell of that column."""
    return _documents(data, find_files(path), lambda file: FILES[data.source])


def _conversations(data, path: str, **_) -> Iterable[Document]:
    """Return the conversations or preferences of files, one per line, rendered by the template of data.tokenizer."""
    _check_exists(data)
    form = format_of_tokenizer(open_tokenizer(data.tokenizer), data.tokenizer)

    def rendered(path, _, most_bytes):
        return Rendered(path, most_bytes, data.source, form)

    return _documents(data, find_files(path), lambda file: rendered)


def _check_exists(data) -> None:
    """Raise DataError if the tokenizer is one that the documents would train."""
    if data.tokenizer == "sentencepiece":
        raise DataError(
            f"data.source={data.source} needs an existing tokenizer; use that of the run or model to fine-tune, "
            "--config.data.tokenizer=FOLDER/tokenizer.json or tokenizer.model, or byte"
        )


SOURCES: dict[str, Callable] = {
    **dict.fromkeys(FILES, _files), **dict.fromkeys(KINDS, _conversations), "sudoku": build.sudokus,
    "maze": build.mazes, "arc": build.arc_tasks, "puzzles": build.published,
}  # fmt: skip


def source(function: Callable) -> Callable:
    """Register a source under its function's name; DataError if Torus has a source of that name."""
    known = SOURCES.get(function.__name__, function)
    if _is_built_in(known) and not _is_built_in(function):
        raise DataError(f"@source: {function.__name__} is the name of a source of Torus; rename the function")
    SOURCES[function.__name__] = function
    return function


def _is_built_in(function: Callable) -> bool:
    return function.__module__.startswith(f"{__package__}.")


@source
def auto(data, path: str, **_) -> Iterable[Document]:
    """Return the documents of files, read by suffix, or as text; without a path, the Python standard library."""
    return _documents(data, find_files(path), format_of) if path else python(data, path)


@source
def huggingface(data, path: str, **_) -> Iterable[Document]:
    """Return the documents of a Hugging Face dataset: the cells of column data.field.

    The path is a folder (`save_to_disk`, or data files) or a name on the hub, with `:SPLIT` for another split
    than `train`.
    """
    name, split = (path, "") if os.path.exists(path) else path.partition(":")[::2]
    table = hugging_face.load(
        name, subset=data.subset, split=split or "train", field=data.field, most_bytes=data.max_document_mib << 20
    )
    return FromFiles(table.files, Reader().records(table))


@source
def python(data, path: str, **_) -> Iterable[Document]:
    """Return the *.py files of this machine's standard library that are UTF-8, without site-packages and tests."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in _below(root, NOT_LIBRARY) if path.suffix == ".py" and _is_utf8(path)]
    if not paths:
        raise DataError(
            f"data.source=python: no *.py files under {root}; use --config.data.source=auto --config.data.path=FOLDER"
        )
    return _documents(data, paths, lambda file: None)


@source
def synthetic(data, path: str, *, vocab_size: int, seed: int, **_) -> tuple[MarkovWindows, MarkovWindows]:
    """Return windows of a random Markov chain over vocab_size tokens, with 1.75 bits per token; it reads no files."""
    return MarkovWindows(vocab_size, seed, 1 << 26, "train"), MarkovWindows(vocab_size, seed, 1 << 18, "heldout")


@source
def labeled(data, path: str, **_) -> tuple[LabeledWindows, LabeledWindows]:
    """Return rows of integers with a label, from one file of comma-separated values."""
    (file, *others) = find_files(path)
    if others:
        raise DataError(f"data path {path!r} names {1 + len(others)} files; data.source=labeled reads one")
    return split(file, data.holdout_fraction)


@source
def countdown(data, path: str, *, seed: int, kind=CountdownWindows, **_) -> tuple[Windows, Windows]:
    """Return problems of arithmetic countdown, made at random, whose text has a token for each number."""
    if data.tokenizer != "numbers":
        raise DataError(
            f"data.source=countdown has a token for each number, not data.tokenizer={data.tokenizer}; use "
            "--config.data.tokenizer=numbers"
        )
    return tuple(kind(seed, stream) for stream in ("train", "heldout"))


@source
def countdown_rollouts(data, path: str, **how) -> tuple[Windows, Windows]:
    """Return the problems of `countdown` for reinforcement learning."""
    return countdown(data, path, kind=CountdownRollouts, **how)


@source
def reasoning_gym(data, path: str, *, seed: int, kind=QuestionWindows, **_) -> tuple[Windows, Windows]:
    """Return questions and answers of a generator of reasoning-gym, which data.path names."""
    _check_exists(data)
    return tuple(kind(path, data.tokenizer, seed, stream) for stream in ("train", "heldout"))


@source
def reasoning_gym_rollouts(data, path: str, **how) -> tuple[Windows, Windows]:
    """Return the questions of `reasoning_gym` for reinforcement learning."""
    return reasoning_gym(data, path, kind=QuestionRollouts, **how)


@source
def sinusoids(data, path: str, *, seed: int, **_) -> tuple[Sinusoids, Sinusoids]:
    """Return tasks of meta-learning: sinusoids to fit."""
    return Sinusoids(seed, "train"), Sinusoids(seed, "heldout")


@source
def linear_maps(data, path: str, *, seed: int, **_) -> tuple[LinearMaps, LinearMaps]:
    """Return tasks of meta-learning: linear functions of data.task_dim numbers to fit."""
    return LinearMaps(seed, "train", data.task_dim), LinearMaps(seed, "heldout", data.task_dim)


@source
def glyphs(data, path: str, *, seed: int, **_) -> tuple[Glyphs, Glyphs]:
    """Return tasks of meta-learning: images of data.task_ways classes; held-out tasks have other classes."""
    return Glyphs(seed, "train", data.task_ways), Glyphs(seed, "heldout", data.task_ways)


def format_of(file: Path) -> type[RecordFile] | None:
    """Return the reader for the suffix of a file, compressed or not; None for text."""
    suffix = formats.suffix_of(file)
    if file.suffix.lower() in formats.COMPRESSED and suffix not in formats.BY_SUFFIX:
        raise DataError(
            f"{file}: compressed text is not supported; decompress it, or convert it to {Path(file.stem).stem}.jsonl.gz"
        )
    return formats.BY_SUFFIX.get(suffix)


def find_files(path: str) -> list[Path]:
    """Return the files that a path names; `~` is the home folder.

    The path is a file, a folder (all files below it, sorted by name, without hidden files and linked folders) or a glob
    (`**` for any depth). In a glob, leading folders that exist under exactly these names are literal: `data[1]/*.txt`
    names files of the folder `data[1]`, if it exists.
    """
    if not path:
        raise DataError("data.path is empty; name a file, a folder, or a glob such as 'texts/*.txt'")
    place = expanded(path)
    try:
        if place.is_file():
            return [place]
        folder, rest = _literal(place)
        if "**" in rest:  # glob leaves out folders that it cannot read
            for start in glob.glob(os.path.join(glob.escape(str(folder)), *rest[: rest.index("**")])):
                _check_readable(start)
        pattern = os.path.join(glob.escape(str(folder)), *rest)
        found = set(map(Path, glob.glob(pattern, recursive=True)))  # a path may match several `**` in several ways
        matches = (path for path in found if path.is_file() or not path.exists())
        files = list(_below(place)) if place.is_dir() else sorted(matches)
    except OSError as error:
        raise DataError(f"data path {path!r}: {error.filename}: {error.strerror}") from error
    if place.exists() and not place.is_dir():
        raise DataError(
            f"data path {path!r} is a pipe or a device, which cannot be read several times; save its content to a file"
        )
    if not place.is_dir() and not glob.has_magic(str(place)):
        raise DataError(
            f"data path {path!r}: no such file or folder (current folder: {Path.cwd()}); "
            "a name on the Hugging Face hub needs --config.data.source=huggingface"
        )
    if not files:
        what = "matches no files"
        if place.is_dir():
            what = "contains no files, except hidden ones and those of linked folders"
        raise DataError(
            f"data path {path!r} {what} (current folder: {Path.cwd()}); name a file, or a folder or glob with files"
        )
    return files


def _literal(place: Path) -> tuple[Path, list[str]]:
    """Return the leading folders of a path that exist under exactly these names, and the parts after them."""
    folder, rest = Path(place.anchor), list(place.parts[len(Path(place.anchor).parts) :])
    while rest and (folder / rest[0]).is_dir():
        folder /= rest.pop(0)
    return folder, rest


def _documents(data, files: list[Path], format_of: Callable[[Path], type[RecordFile] | None]) -> FromFiles:
    """Return the documents of files in order. `format_of` returns a file's reader; None: the file is one document."""
    return FromFiles(files, _read_in_order(data, files, format_of))


def _read_in_order(data, files: list[Path], format_of: Callable) -> Iterator[Document]:
    reader = Reader()
    for file in files:
        if kind := format_of(file):
            yield from reader.records(kind(file, data.field, data.max_document_mib << 20))
        else:
            yield TextFile(str(file))


def _below(root: Path, skipped: set[str] = frozenset()) -> Iterator[Path]:
    """Yield the files below a folder, sorted by path, without hidden and skipped names."""
    for folder, names, files in os.walk(root, onerror=_unreadable):
        names[:] = sorted(name for name in names if name not in skipped and not name.startswith("."))
        paths = (Path(folder, name) for name in sorted(files) if not name.startswith("."))
        # Pipes and sockets are skipped. A dangling link is kept: the error when it is opened names it.
        yield from (path for path in paths if path.is_file() or not path.exists())


def _check_readable(root: str) -> None:
    """Raise DataError if a folder below cannot be listed, unless it is hidden."""
    for _, names, _ in os.walk(root, onerror=_unreadable):
        names[:] = [name for name in names if not name.startswith(".")]


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text("utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True


def _unreadable(error: OSError) -> None:
    raise DataError(f"data.path: {error.filename}: {error.strerror}") from error
