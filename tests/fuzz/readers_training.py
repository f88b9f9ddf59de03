# SPDX-License-Identifier: Apache-2.0
"""Readers of what a run keeps in its folder, to fuzz."""

import functools
import json
import math
import os
import pathlib
import shutil
import tempfile
import time

import jax
import numpy as np

from checkpointing import manifest
from checkpointing.checkpoints import Checkpoints
from checkpointing.retention import Retention
from checkpointing.workdir import check_resumable
from configs import base
from core import inspection
from examples import plot_run
from pods import watch
from reporting.clock import Clock
from reporting.goodput import PARTS, Goodput
from reporting.metrics import parse_lines
from settings import stored_config, validation
from settings.keys import flat
from tests.fuzz.harness import reader

CONFIG = flat(base.get_config())
ABSTRACT = {
    "params": {"weight": jax.ShapeDtypeStruct((4, 6), np.float32), "bias": jax.ShapeDtypeStruct((3,), np.int32)}
}
STATE = {"params": {"weight": np.arange(24, dtype=np.float32).reshape(4, 6), "bias": np.arange(3, dtype=np.int32)}}


class Refusal(Exception):
    """A file was passed over, without an error."""

    exit_status = 1


def _account() -> dict:
    return {"began": 1.7e9, "time": 1.7e9 + 60, "parts": dict.fromkeys(PARTS, 5.0)}


@functools.cache
def _saved() -> pathlib.Path:
    """Return a workdir with a checkpoint of step 1, made once in a process."""
    workdir = pathlib.Path(tempfile.mkdtemp(prefix="fuzz-"))
    record = {
        "step": 1, "examples": 32, "config": CONFIG, "corpus": "abc", "mixture": [[0, ["1/2"]]], "losses": {"1": 2.5},
        "skips": [[8, 2]], "topology": None, "total_tokens": 99, "increases": 0, "base": None, "goodput": _account(),
        "teacher": {"folder": "/runs/teacher", "step": 3, "digest": "0" * 64},
    }  # fmt: skip
    with Checkpoints(workdir, Retention(newest=1)) as checkpoints:
        checkpoints.save_and_wait(1, jax.tree.map(jax.numpy.asarray, STATE), record)
    return workdir


def _copy(folder: pathlib.Path) -> pathlib.Path:
    """Return a copy of the workdir, of links to what no case changes."""
    return pathlib.Path(shutil.copytree(_saved(), folder / "run", copy_function=os.link))


def _put(path: pathlib.Path, content: bytes) -> None:
    path.unlink()  # a link
    path.write_bytes(content)


def _files() -> list[str]:
    checkpoint = _saved() / "checkpoints" / "1"
    return sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())


def _of_checkpoint() -> list[bytes]:
    """Return the content of each file, after a byte that is its number."""
    return [
        bytes([number]) + (_saved() / "checkpoints" / "1" / name).read_bytes() for number, name in enumerate(_files())
    ]


@reader("checkpoint", _of_checkpoint, divisor=10)
def read_checkpoint(content: bytes, folder: pathlib.Path) -> None:
    """What is restored with a file changed is what was saved, to the bit."""
    files, workdir = _files(), _copy(folder)
    number = content[0] % len(files) if content else 0
    _put(workdir / "checkpoints" / "1" / files[number], content[1:])
    with Checkpoints(workdir) as checkpoints:
        checkpoints.report = lambda text, **figures: None
        assert checkpoints.newest() == 1 and checkpoints.record(1)["step"] == 1
        restored = checkpoints.restore(1, ABSTRACT)
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), restored, STATE)
    assert all(jax.tree.leaves(same))


@reader("record.json", lambda: [(_saved() / "checkpoints" / "1" / "record.json").read_bytes()], divisor=2)
def read_record(content: bytes, folder: pathlib.Path) -> None:
    """A record that the manifest vouches for; what is accepted is one that a run goes on from."""
    workdir = _copy(folder)
    checkpoint = workdir / "checkpoints" / "1"
    _put(checkpoint / "record.json", content)
    (checkpoint / manifest.NAME).unlink()
    manifest.write(checkpoint, 1, manifest.digests(checkpoint, ["record.json"]))
    with Checkpoints(workdir) as checkpoints:
        record = check_resumable(checkpoints, CONFIG, "abc", workdir)
        clock = Clock(time.monotonic())
        goodput = Goodput(clock, workdir / "none", record["goodput"])
    _check_account(goodput)
    assert isinstance(record["step"] + record["examples"] + record["total_tokens"] + record.get("increases", 0), int)


def _check_account(goodput: Goodput) -> None:
    parts = goodput.parts()
    assert parts.keys() == PARTS.keys() and all(math.isfinite(seconds) for seconds in parts.values())
    assert 0 <= goodput.fraction() <= 1 and goodput.line() and json.dumps(goodput.record(), allow_nan=False)


def _of_configuration() -> list[bytes]:
    tiny = CONFIG | {"model.num_layers": 2, "data.path": "texts", "data.tokenizer": "byte"}
    return [json.dumps(values, indent=1).encode() for values in (CONFIG, tiny, {"model.name": "trm", **tiny})]


@reader("config.json of a run", _of_configuration)
def read_configuration(content: bytes, folder: pathlib.Path) -> None:
    """What is accepted has every key, of the type of its default, and can be built."""
    (folder / "config.json").write_bytes(content)
    for load in (
        lambda: stored_config.load_to_read(folder, {}),
        lambda: stored_config.load_to_continue(folder, 3, None, "", {}, {}),
    ):
        config = load().config
        found = flat(config)
        assert {key: type(value) for key, value in found.items()} == {key: type(value) for key, value in CONFIG.items()}
    validation.validate(config, 1)


@reader(
    "run.json of a run", lambda: [json.dumps({"recipe": "tiny", "recipe_config": CONFIG, "command": ["a"]}).encode()]
)
def read_origin(content: bytes, folder: pathlib.Path) -> None:
    """The record of how a run was started, with an unchanged configuration."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "run.json").write_bytes(content)
    assert stored_config.load_to_continue(folder, 3, ("tiny", base.get_config()), "", {}, {}).notes is not None


@reader("sign of life", lambda: [json.dumps({"step": 3, "phase": "training", "seconds": _account()}).encode()])
def read_sign(content: bytes, folder: pathlib.Path) -> None:
    """A damaged file counts for nothing; of no file a time comes that is negative, or no number."""
    (folder / "0.json").write_bytes(content)
    goodput = Goodput(Clock(time.monotonic()), folder / "0.json", None)
    _check_account(goodput)
    if not goodput.parts()["idle"]:
        raise Refusal("it counts for nothing")


def _metrics() -> list[bytes]:
    lines = [{"kind": "event", "event": "start", "step": 0, "time": 1.7e9}]
    figures = {
        "loss": 2.5,
        "tokens_per_second": 1e4,
        "mfu": None,
        "goodput": 0.9,
        "step_seconds": 0.1,
        "total_tokens": 9,
    }
    lines += [{"kind": "train", "step": step, "time": 1.7e9 + step} | figures for step in (1, 2, 3)]
    lines += [{"kind": "eval", "step": 3, "time": 1.7e9 + 4, "eval_loss": 2.25, "eval_tokens": 80}]
    return ["".join(json.dumps(line) + "\n" for line in lines).encode()]


@reader("metrics.jsonl", _metrics)
def read_metrics(content: bytes, folder: pathlib.Path) -> None:
    """As pod.py, train.py --explain_step and examples/plot_run.py read it."""
    (folder / "metrics.jsonl").write_bytes(content)
    lines = parse_lines(content, "metrics.jsonl")
    figures = watch.summarise(lines, 10, 4, 3.2, 1.7e9 - 60)
    assert figures["hours"] >= 0 and json.dumps(figures, allow_nan=False)
    assert all(watch._figure(name, value) for name, value in figures.items())
    assert inspection.last_logged_step(folder) >= 0
    for kind, name in (("train", "tokens_per_second"), ("eval", "eval_loss")):
        found = plot_run.lines_of(folder, kind)
        assert len(plot_run.values(found, name)) == len(found)
