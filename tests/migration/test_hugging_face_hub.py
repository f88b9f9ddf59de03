# SPDX-License-Identifier: Apache-2.0
"""A model is imported by its name on the hub, here a server of this machine that speaks as the hub does."""

import contextlib
import hashlib
import http.server
import json
import threading

import pytest

from migration import hugging_face
from tests.migration import hugging_face_cases as cases
from tests.migration.record_hugging_face import FOLDER
from tests.test_train import command, finish

COMMIT = "0" * 40
MODEL = FOLDER / "qwen3"
REFUSED = {"secret/model": ("RepoNotFound", 404), "gated/model": ("GatedRepo", 403)}


class Hub(http.server.BaseHTTPRequestHandler):
    """Has `org/name`, a copy of MODEL with one file more, which no import reads; notes the files asked for.

    For `behind/login` it answers as the proxy of a network that one has to log in to.
    """

    def do_GET(self):
        if "/behind/login" in self.path:
            return self.answer(b"<!DOCTYPE html><title>Log in</title>", headers={"Content-Type": "text/html"})
        name = "/".join(self.path.removeprefix("/api/models").split("?")[0].split("/")[1:3])
        if name in REFUSED:
            code, status = REFUSED[name]
            return self.answer(b"{}", status, {"X-Error-Code": code})
        if "/resolve/" in self.path:
            return self.file(self.path.rsplit("/", 1)[1])
        files = {**{path.name: path for path in MODEL.iterdir()}, "pytorch_model.bin": MODEL / "config.json"}
        if "/tree/" in self.path:
            listed = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": COMMIT}
                for name, path in files.items()
            ]
            return self.answer(json.dumps(listed).encode())
        about = {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        return self.answer(json.dumps(about).encode())

    do_HEAD = do_GET

    def file(self, name: str) -> None:
        self.server.asked.add(name)
        content = (MODEL / name).read_bytes()
        self.answer(content, headers={"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def answer(self, content: bytes, status: int = 200, headers: dict | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = set()
    threading.Thread(target=server.serve_forever).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def convert(tmp_path, monkeypatch):
    """Import a model, by its name, from the hub at a port."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))

    def run(port: int, name: str) -> tuple[int, str, str]:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        arguments = ("import", f"--hf={name}", f"--workdir={tmp_path}/run")
        return finish(command("convert.py", *arguments, cache=tmp_path))

    return run


@pytest.mark.slow
def test_a_model_is_fetched_by_its_name_and_again_from_the_cache(tmp_path, convert):
    with served() as server:
        status, out, err = convert(server.server_port, "org/name")
        assert status == 0 and "parameters of org/name are the checkpoint of step 0" in out, err
        assert "model.safetensors" in server.asked and "pytorch_model.bin" not in server.asked
    assert (tmp_path / "run" / hugging_face.KEPT / hugging_face.NAME).read_text() == "org/name"
    (tmp_path / "run").rename(tmp_path / "first")
    status, out, err = convert(server.server_port, "org/name")  # the hub is gone now
    assert status == 0, err
    cases.export(hugging_face.Published(MODEL, tmp_path / "run").config, tmp_path / "run", tmp_path / "out")
    assert cases.tensors(tmp_path / "out") == cases.tensors(MODEL)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("secret/model", "--hf=secret/model: there is no such folder; the hub has no such model, or it is private"),
        ("gated/model", "the hub's model is gated"),
        ("behind/login", "the answer is not the hub's; does a proxy ask for a login?"),
    ],
)
def test_what_the_hub_does_not_give_out_is_one_line(tmp_path, convert, name, message):
    with served() as server:
        status, _, err = convert(server.server_port, name)
    assert status == 2 and message in err and len(err.strip().splitlines()) == 1, err
    assert not (tmp_path / "run").exists()


def test_a_hub_that_does_not_answer_is_one_line(convert):
    with served() as server:
        port = server.server_port
    status, _, err = convert(port, "org/name")
    assert status == 2 and "the hub does not answer" in err and len(err.strip().splitlines()) == 1, err
