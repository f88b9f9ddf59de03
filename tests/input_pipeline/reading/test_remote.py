# SPDX-License-Identifier: Apache-2.0
"""Copies from gs://, against gcp-storage-emulator: a server of this machine that answers Google's storage API.

It knows no accounts and answers whichever generation is asked for, so a refusal is one that we have it send. What is
uploaded to it must not end with a carriage return, which it takes for the end of a line and drops.
"""

import functools
import hashlib
import http.server
import json
import logging
import os
import re
import signal
import subprocess
import threading
from collections import namedtuple
from pathlib import Path

import fsspec
import pytest
from gcp_storage_emulator import server as emulator

from input_pipeline.errors import DataError
from input_pipeline.reading import remote
from input_pipeline.sources import read_source
from tests import warm

SIZES = {"a.bin": 2500, "b.bin": 1000, "deep/c.bin": 3200, "empty.bin": 0}
FETCH = """
import sys
from pathlib import Path
from input_pipeline.reading import remote
remote.PIECE_BYTES, remote.STREAMS = 1000, 1
remote.fetch(sys.argv[1], Path(sys.argv[2]))
"""


class Store:
    """The server. `downloads` has the (object, first byte) of each answered download, in the order of their coming."""

    def __init__(self):
        self.server = self.files = None
        self.downloads = []
        self.fail_at = None  # the number of downloads after which `refuse` is called instead
        self.refuse = None

    def answer(self, router, method, usual):
        """Answer a request as usual, or refuse a download."""
        request = router._request_handler
        if "alt=media" not in request.path:
            return usual(router, method)
        if len(self.downloads) == self.fail_at:
            return self.refuse(request)
        name = request.path.partition("?")[0].rpartition("/")[2].replace("%2F", "/")
        self.downloads.append((name, int(re.match(r"bytes=(\d+)", request.headers["Range"])[1])))
        return usual(router, method)

    def put(self, contents: dict[str, bytes]) -> None:
        """Make objects of the bucket `data`."""
        for name, content in contents.items():
            self.files.pipe_file(f"data/{name}", content)


@pytest.fixture(scope="module")
def running():
    """A running server, at which gs:// points."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    store, usual = Store(), emulator.Router.handle
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulator.Router, "handle", lambda router, method: store.answer(router, method, usual))
        patch.setattr(emulator.server.HTTPServer, "handle_error", lambda *unused: None)  # clients that hang up
        patch.setattr(emulator.server.HTTPServer, "request_queue_size", 64)  # 5: a sixth connection waits a second
        store.server = server = emulator.create_server("127.0.0.1", 0, in_memory=True)
        server.start()
        patch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:{1}".format(*server._api._httpd.server_address))
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks Google's own servers
        patch.setenv("NO_GCE_CHECK", "true")  # asks the machine for an account
        store.files = fsspec.filesystem("gs", skip_instance_cache=True)
        type(store.files).clear_instance_cache()
        yield store
        server.stop()
        type(store.files).clear_instance_cache()


@pytest.fixture
def store(running, monkeypatch):
    """The server with an empty bucket `data`, asked for a thousand bytes at a time."""
    store = running
    store.server.wipe()
    store.files.mkdir("data")
    store.downloads.clear()
    store.fail_at = None
    monkeypatch.setattr(remote, "PIECE_BYTES", 1000)
    return store


@pytest.fixture
def binaries(store):
    """Files of SIZES in gs://data/set; no two pieces are the same."""
    contents = {name: hashlib.shake_256(name.encode()).digest(size) for name, size in SIZES.items()}
    store.put({f"set/{name}": content for name, content in contents.items()})
    return contents


@pytest.fixture
def fetch(tmp_path):
    """Copy a URL into a cache of this test, and return {name: content} of what is there."""

    def run(url="gs://data/set", announce=lambda line: None):
        folder = Path(remote.fetch(url, tmp_path / "cache", announce))
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    return run


def refuse(status: int, message: str):
    """Return what answers a request as Google does when it refuses."""

    def answer(request):
        body = json.dumps({"error": {"code": status, "message": message}}).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return answer


def pieces(sizes=SIZES) -> list[tuple[str, int]]:
    """Return the downloads that it takes to copy everything once."""
    return sorted((f"set/{name}", start) for name, size in sizes.items() for start in range(0, size, 1000))


def start_fetching(tmp_path) -> subprocess.Popen:
    """Copy gs://data/set in a process of its own."""
    return warm.start(["-c", FETCH, "gs://data/set", str(tmp_path / "cache")], dict(os.environ))


@pytest.mark.parametrize("below", ["", "/", "/01.txt", "/**/*.txt", "/deep/?5.txt", "/what[[]1].txt", "/what[1].txt"])
@pytest.mark.parametrize("scheme", ["gs", "file"])
def test_a_url_is_the_same_documents_as_local_files(store, section, texts, corpus, tmp_path, scheme, below):
    for name in (".hidden", "what[1].txt"):
        (texts / name).write_text(f"text of {name}")
    (texts / ".folder").mkdir()
    (texts / ".folder" / "inside.txt").write_text("hidden")
    if scheme == "gs":
        files = [path for path in texts.rglob("*") if path.is_file()]
        store.put({str(path.relative_to(tmp_path)): path.read_bytes() for path in files})
    url = f"gs://data/texts{below}" if scheme == "gs" else f"file://{texts}{below}"

    def contents(path):
        documents = read_source(section(path=path), vocab_size=256, seed=0, announce=lambda line: None)
        return [(Path(document.name).name, Path(document.name).read_bytes()) for document in documents]

    assert contents(url) == contents(f"{texts}{below}") != []
    if below == "":
        here, there = (corpus(path=path, cache_dir=str(tmp_path / path[:2])) for path in (str(texts), url))
        assert here.digest == there.digest


def test_parts_of_a_mixture_and_the_validation_set_may_be_urls(store, corpus, texts):
    store.put(
        {f"{kind}/{path.name}": path.read_bytes() for kind in ("train", "valid") for path in texts.glob("1?.txt")}
    )
    store.put({f"train/{path.name}": path.read_bytes() for path in texts.glob("2?.txt")})
    mixture = f"0.5 gs://data/train; 0.5 {texts / 'deep'}"
    made = corpus(path="", mixture=mixture, validation_path="gs://data/valid/*.txt")
    assert made.heldout.num_documents == 8
    assert [part.num_documents for part in made.train.parts] == [8, 8]


def test_everything_comes_once(store, binaries, fetch):
    assert fetch() == binaries
    assert sorted(store.downloads) == pieces()
    store.downloads.clear()
    assert fetch() == fetch("gs://data/set/") == binaries
    assert store.downloads == []


def test_what_changed_in_the_store_is_copied_again(store, binaries, fetch):
    fetch()
    store.downloads.clear()
    store.put({"set/b.bin": b"b" * 1000, "set/new.bin": b"new"})  # b.bin in the same size
    store.files.rm("data/set/a.bin")
    assert fetch() == {name: binaries[name] for name in ("deep/c.bin", "empty.bin")} | {
        "b.bin": b"b" * 1000,
        "new.bin": b"new",
    }
    assert store.downloads == [("set/b.bin", 0), ("set/new.bin", 0)]


def test_a_file_may_become_a_folder_and_a_folder_a_file(store, fetch):
    for contents in ({"a": b"1", "b/c/d": b"2"}, {"a/b": b"3", "b": b"4"}):
        store.put({f"set/{name}": content for name, content in contents.items()})
        assert fetch() == contents
        for name in contents:
            store.files.rm(f"data/set/{name}")


def test_a_copy_of_another_size_is_noticed(store, binaries, fetch, tmp_path):
    fetch()
    store.downloads.clear()
    copy = next((tmp_path / "cache").rglob("b.bin"))
    copy.write_bytes(b"cut off")
    lines = []
    assert fetch(announce=lines.append) == binaries
    assert store.downloads == [("set/b.bin", 0)]
    assert lines[0] == f"{copy}: has 7 bytes where the store has 1,000; it is copied again"


def test_a_copy_that_failed_goes_on(store, binaries, fetch, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "STREAMS", 1)
    store.fail_at, store.refuse = 5, refuse(403, "torus@example.com does not have storage.objects.get access.")
    with pytest.raises(DataError, match=r"^gs://data/set: data/set/deep/c\.bin: .*torus@example\.com does") as caught:
        fetch()
    assert "\n" not in str(caught.value) and str(caught.value).endswith("or let this account read it")
    assert not list((tmp_path / "cache").rglob("files/deep/c.bin"))
    store.fail_at = None
    assert fetch() == binaries
    assert sorted(store.downloads) == pieces()
    assert not [path for path in (tmp_path / "cache").rglob("parts/*") if path.is_file()]


def test_a_copy_that_was_killed_goes_on(store, binaries, fetch, tmp_path):
    process = start_fetching(tmp_path)
    store.fail_at, store.refuse = 5, lambda request: process.kill()
    assert process.wait() == -signal.SIGKILL
    assert sorted(path.name for path in (tmp_path / "cache").rglob("files/**/*.bin")) == ["a.bin", "b.bin"]
    store.fail_at = None
    assert fetch() == binaries
    assert sorted(store.downloads) == pieces()


def test_a_part_of_another_content_is_not_gone_on_with(store, binaries, fetch, monkeypatch):
    monkeypatch.setattr(remote, "STREAMS", 1)
    store.fail_at, store.refuse = 2, refuse(403, "no")
    with pytest.raises(DataError):
        fetch()
    store.fail_at = None
    store.put({"set/a.bin": b"a" * 2500})
    assert fetch() == binaries | {"a.bin": b"a" * 2500}


def test_processes_wait_for_one_another(store, binaries, fetch, tmp_path):
    processes = [start_fetching(tmp_path) for _ in range(2)]
    for process in processes:
        assert process.wait() == 0
    assert sorted(store.downloads) == pieces()
    assert fetch() == binaries


def test_an_answer_of_another_size_is_noticed(store, binaries, fetch):
    def short(request):
        request.send_response(200)
        request.send_header("Content-Length", "3")
        request.end_headers()
        request.wfile.write(b"abc")

    store.fail_at, store.refuse = 0, short
    with pytest.raises(DataError, match=r"^gs://data/set: data/set/a\.bin: the store returned 3 bytes for bytes 0 to"):
        fetch()


def test_a_disk_that_is_too_small_is_said_before(store, binaries, fetch, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(remote.shutil, "disk_usage", lambda path: usage(9000, 3000, 6000))
    with pytest.raises(DataError, match=r"^gs://data/set: the copy takes 6,700 bytes, and /.* has 6,000 free; "):
        fetch()
    assert store.downloads == []


def test_copies_without_a_listing_are_not_believed(store, binaries, fetch, tmp_path):
    fetch()
    for name in ("b.bin", "listing.json"):
        path = next((tmp_path / "cache").rglob(name))
        path.write_bytes(b"x" * 1000) if name == "b.bin" else path.unlink()
    assert fetch() == binaries


@pytest.mark.parametrize("listing", ['["a"]', '{"a.bin": [1', '{"a.bin": [-1, ""]}', "[" * 100_000, '{"%s": [1, ""]}'])
def test_copies_beside_a_damaged_listing_are_not_believed_and_nothing_outside_is_deleted(
    store, binaries, fetch, tmp_path, listing
):
    fetch()
    path = next((tmp_path / "cache").rglob("listing.json"))
    (path.parent / "files" / "stale.bin").write_bytes(b"which the store has no longer")
    (tmp_path / "mine.txt").write_text("mine")
    path.write_text(listing.replace("%s", f"../../../../../../../../..{tmp_path}/mine.txt"))
    assert fetch() == binaries
    assert (tmp_path / "mine.txt").exists()


def test_a_folder_placeholder_is_no_file(store, binaries, fetch):
    store.put({"set/made/": b""})
    assert fetch() == binaries


def test_a_name_that_leaves_its_folder_is_refused(store, binaries, fetch):
    objects = store.server._storage.objects["data"]
    objects["set/../../out.txt"] = objects["set/a.bin"] | {"name": "set/../../out.txt"}
    with pytest.raises(DataError, match=r"a name with '\.\.', or too long"):
        fetch()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://nobody/set", "data path 'gs://nobody/set': no such bucket, or this account has no access to it"),
        ("gs://nobody/*.txt", "data path 'gs://nobody/*.txt': no such bucket"),
        ("gs://data/nothing", "data path 'gs://data/nothing': no file has this name, or is below it"),
        ("gs://data/*.txt", "data path 'gs://data/*.txt': no file has this name"),
        ("file:///nowhere/at/all", "data path 'file:///nowhere/at/all': no file has this name"),
        ("gopher://data/set", "gopher://data/set: Protocol not known: gopher"),
        ("s3://data/set", "s3://data/set: Install s3fs to access S3, or use gs:// or a local path"),
    ],
)
def test_what_cannot_be_found_is_one_line(store, binaries, fetch, url, message):
    with pytest.raises(DataError, match="^" + re.escape(message)) as caught:
        fetch(url)
    assert "\n" not in str(caught.value)


def test_a_file_of_a_web_server_is_copied(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "books.jsonl").write_text('{"text": "a"}\n')
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "site")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/books.jsonl"
            copy = remote.fetch(url, tmp_path / "cache", announce=lambda line: None)
        finally:
            server.shutdown()
    assert Path(copy).read_text() == '{"text": "a"}\n'
