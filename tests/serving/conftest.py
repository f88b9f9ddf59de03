# SPDX-License-Identifier: Apache-2.0
"""Servers in processes of their own: one of a model that chats, and one that only completes, with a key."""

import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Iterator

import pytest

from tests.input_pipeline.chat.conftest import CHATML, made_tokenizer
from tests.support import write_sums
from tests.test_train import SMALL, command, finish

LENGTH = 96  # tokens of a row
SECRET = "sk-of-the-tests-9f2c"


@dataclasses.dataclass
class Served:
    """A server that runs: its process, address and run, and what it said before it was ready."""

    process: object
    url: str
    folder: pathlib.Path
    said: list[str]


@contextlib.contextmanager
def serving(folder: pathlib.Path, *flags: str) -> Iterator[Served]:
    """Serve the run in a folder at a free port, until the end of the block."""
    process = command("serve.py", f"--workdir={folder}", "--port=0", *flags, cache=folder.parent)
    said = []
    while not said or not said[-1].startswith("ready: "):
        said.append(process.stdout.readline().strip())
        assert said[-1], finish(process)
    try:
        yield Served(process, said[-1].removeprefix("ready: "), folder, said)
    finally:
        process.kill()
        finish(process)


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> pathlib.Path:
    """The folder of a run with grouped queries, whose tokenizer has a chat template."""
    place = tmp_path_factory.mktemp("served")
    write_sums(place / "texts", 20)
    values = SMALL | {
        "model.max_length": LENGTH, "model.vocab_size": 304, "model.num_heads": 4, "model.dtype": "float32",
        "data.path": f"{place}/texts/*.txt",
        "data.tokenizer": made_tokenizer(CHATML, place), "train.eval_every": 0, "train.save_every": 0,
        "evaluation.sample_tokens": 0,
    }  # fmt: skip
    flags = [f"--config.{key}={value}" for key, value in values.items()]
    status, _, err = finish(command("train.py", f"--workdir={place}/chatting", *flags, cache=place))
    assert status == 0, err
    return place / "chatting"


@pytest.fixture(scope="session")
def chatting(run) -> Iterator[Served]:
    """A server with four rows of a model that chats."""
    with serving(run, "--rows=4") as served:
        yield served


@pytest.fixture(scope="session")
def silent_run(run) -> pathlib.Path:
    """The folder of the same run, without the chat template."""
    folder = shutil.copytree(run, run.with_name("completing"))
    made_tokenizer(None, folder)
    return folder


@pytest.fixture(scope="session")
def completing(silent_run) -> Iterator[Served]:
    """A server with one row, and room for one more to wait, of a model that does not chat; it needs a key."""
    key = silent_run.with_name("key")
    key.write_text(f"{SECRET}\n")
    key.chmod(0o600)
    with serving(silent_run, "--rows=1", "--max_waiting=1", "--max_length=40", f"--api_key_file={key}") as served:
        yield served
