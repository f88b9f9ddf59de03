# SPDX-License-Identifier: Apache-2.0
import errno
import gzip
import os
import re
import sysconfig
from pathlib import Path

import pytest

from configs.base import get_config
from files.paths import PathError
from input_pipeline import sources
from input_pipeline.errors import DataError
from input_pipeline.reading import formats
from input_pipeline.reading.documents import scan
from input_pipeline.sources import SOURCES, read_source, source
from input_pipeline.tasks import labeled


@pytest.fixture
def names(section):
    """Return the names of the documents that a `data` section gives."""

    def read(**changes):
        return [document.name for document in read_source(section(**changes), vocab_size=256, seed=0)]

    return read


def test_python_is_the_standard_library_without_tests_and_packages(names):
    root = Path(sysconfig.get_path("stdlib"))
    found = [Path(name).relative_to(root) for name in names(source="python")]
    assert {Path("os.py"), Path("json/decoder.py"), Path("asyncio/tasks.py")} <= set(found)
    assert all(path.suffix == ".py" for path in found)
    assert not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & {
        p for path in found for p in path.parts
    }
    assert found == [Path(name).relative_to(root) for name in names(source="auto", path="")]


def test_text_is_a_file_a_folder_or_a_glob(names, texts):
    (texts / ".hidden").write_text("no")
    (texts / ".folder").mkdir()
    (texts / ".folder" / "inside.txt").write_text("no")
    (texts / "table.csv").write_text("a,b")
    everything = names()
    assert len(everything) == 40 and not any("no" in Path(name).read_text().split() for name in everything)
    assert names(path=str(texts / "**" / "*.txt")) == sorted(set(everything) - {str(texts / "table.csv")})
    assert names(path=str(texts / "table.csv")) == [str(texts / "table.csv")]
    assert names(path=str(texts / "1?.txt")) == [
        str(texts / f"{number}.txt") for number in (11, 12, 13, 14, 16, 17, 18, 19)
    ]


@pytest.mark.parametrize("path", ["", "deep/*"])
def test_a_link_to_what_is_not_there_is_no_file_less(corpus, texts, path):
    """A part of the data on a disk that is not mounted, say."""
    (texts / "deep" / "part.txt").symlink_to("/nowhere/part.txt")
    with pytest.raises(DataError, match=r"deep/part.txt: No such file or directory"):
        corpus(path=str(texts / path))


def test_a_tilde_is_the_home_folder(names, texts, monkeypatch):
    monkeypatch.setenv("HOME", str(texts.parent))
    assert names(path="~/texts") == names()
    assert names(path="~/texts/0?.txt") == names(path=str(texts / "0?.txt"))


def test_a_name_with_magic_characters_is_a_name_first(names, tmp_path):
    path = tmp_path / "what[1].txt"
    path.write_text("text")
    assert names(path=str(path)) == [str(path)]


def test_a_glob_says_which_folder_it_cannot_read_and_minds_no_other(names, tmp_path, monkeypatch):
    for folder in ("mine/sub", "other"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.txt").write_text("text")
    refused, scandir = "sub", os.scandir

    def with_refusal(path):
        if os.path.basename(path) in (refused, "other"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", with_refusal)
    with pytest.raises(DataError, match="mine/sub: Permission denied"):
        names(path=f"{tmp_path}/mi*/**/*.txt")
    refused = ""
    assert names(path=f"{tmp_path}/mi*/**/*.txt") == [f"{tmp_path}/mine/sub/a.txt"]


def test_a_file_that_matches_a_glob_in_two_ways_is_read_once(names, tmp_path):
    (tmp_path / "a/src/b/src").mkdir(parents=True)
    (tmp_path / "a/src/b/src/c.txt").write_text("text")
    assert names(path=f"{tmp_path}/**/src/**/*.txt") == [f"{tmp_path}/a/src/b/src/c.txt"]


def test_a_folder_with_magic_characters_in_its_name_is_a_name_first_in_a_glob_too(names, tmp_path, monkeypatch):
    """Where there is no such folder, the brackets are a pattern."""
    for folder in ("data[1]", "data1", "data[1]/more [x]"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("text")
    assert names(path=f"{tmp_path}/data[1]/*.txt") == [f"{tmp_path}/data[1]/a.txt"]
    assert names(path=f"{tmp_path}/data[1]/more [x]/?.txt") == [f"{tmp_path}/data[1]/more [x]/a.txt"]
    assert names(path=f"{tmp_path}/data[1]/**/a.txt") == [
        f"{tmp_path}/data[1]/{name}" for name in ("a.txt", "more [x]/a.txt")
    ]
    assert names(path=f"{tmp_path}/data[12]/*.txt") == [f"{tmp_path}/data1/a.txt"]
    monkeypatch.chdir(tmp_path)
    assert names(path="data[1]/*.txt") == ["data[1]/a.txt"]


@pytest.mark.parametrize("found", [None, "text", (1, 2), ()], ids=str)
def test_what_a_new_source_may_not_return_is_named(found, monkeypatch):
    monkeypatch.setitem(SOURCES, "mine", lambda *_, **__: found)
    data = get_config().data
    data.source = "mine"
    with pytest.raises(TypeError, match=r"^data.source=mine returned .*; it must return an iterable of documents"):
        read_source(data, vocab_size=8, seed=0)


def test_what_is_no_document_is_named():
    with pytest.raises(TypeError, match=r"^a data source yielded 'a text', which is not a Document"):
        scan(["a text"])


def test_a_new_source_is_a_function(names, texts, monkeypatch):
    monkeypatch.setattr("input_pipeline.sources.SOURCES", dict(SOURCES))

    def ours(data, path, **rest):
        return list(SOURCES["auto"](data, path, **rest))[:2]

    source(ours)
    assert len(names(source="ours")) == 2


def test_the_name_of_a_source_of_torus_is_taken():
    """Its messages and its data would be those of another one."""

    def text(data, path, **_):
        return []

    with pytest.raises(DataError, match=r"^@source: text is the name of a source of Torus; rename the function$"):
        source(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"source": "parquette"},
            "data.source=parquette does not exist; use one of arc, auto, chat, countdown, countdown_rollouts, csv, ",
        ),
        ({"path": ""}, "data.path is empty; name a file"),
        ({"path": "", "source": "huggingface"}, "data.source=huggingface needs "),
        ({"path": "missing/here.txt"}, "data path 'missing/here.txt': no such file or folder (current folder: /"),
        ({"path": "none/*.txt"}, "data path 'none/*.txt' matches no files (current folder: /"),
        ({"path": "/dev/null"}, "data path '/dev/null' is a pipe or a device, which cannot be read several times"),
        ({"path": "~nobody-here/texts"}, "~nobody-here/texts: this system has no user with that home folder; name"),
    ],
)
def test_what_cannot_be_found_is_an_error(names, changes, message):
    more = "; if a recipe adds it, name that recipe by --config$" if "does not exist" in message else ""
    with pytest.raises((DataError, PathError), match=f"^{re.escape(message)}.*{more}") as caught:
        names(**changes)
    assert caught.value.exit_status == 2 and "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".tfrecord", ".tfrecord-00000-of-00010", ".tfrecord-00000-of-00010.gz"])
def test_parts_of_tfrecords_are_known_compressed_or_not(suffix):
    assert sources.format_of(Path(f"books{suffix}")) is formats.TFRecord


@pytest.mark.parametrize(
    "content",
    # No time in the file: the name of a test must be the same in each worker.
    [gzip.compress(b"1,2,0\n" * 100, mtime=0)[:-9], b"1,2\n1,2,3\n"],
)
def test_a_labeled_file_that_is_cut_or_of_no_use_is_an_error(tmp_path, content):
    path = tmp_path / ("rows.csv.gz" if content.startswith(b"\x1f") else "rows.csv")
    path.write_bytes(content)
    with pytest.raises(DataError, match="each line must have integers"):
        labeled.split(path, 0.2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_cannot_be_read_is_an_error(names, texts):
    (texts / "deep").chmod(0)
    with pytest.raises(DataError, match="deep: Permission denied"):
        names()
    (texts / "deep").chmod(0o700)
