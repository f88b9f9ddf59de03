# SPDX-License-Identifier: Apache-2.0
"""Receivers of metrics besides metrics.jsonl, with their real clients where these are installed."""

import contextlib
import importlib.util
import pathlib
import sqlite3
import struct
import sys
import types

import pytest

from cluster.interruption import Interrupted
from configs import base
from configs.errors import ConfigError
from reporting import sink
from reporting.metrics import MetricsWriter
from reporting.sinks import alerts, track_io, weights_and_biases
from reporting.sinks.tensorboard import TensorBoard
from studies import suites


def config_with(**values):
    config = base.get_config()
    config.logging.update({"tensorboard": False, **values})
    return config


@pytest.fixture
def workdir(tmp_path) -> pathlib.Path:
    folder = tmp_path / "study" / "mine"
    folder.mkdir(parents=True)
    return folder


def write(config, workdir: pathlib.Path, steps: range, error: BaseException | None = None) -> None:
    """Write the lines of a process of a run."""
    with MetricsWriter(workdir, sinks=sink.sinks_of(config, workdir, 0)) as writer:
        for step in steps:
            writer.write("train", step=step, loss=1 / step, mfu=None)
            writer.write("event", step=step, event="saved", write_seconds=1.0)
        if error:
            raise error


def test_a_run_has_the_sinks_that_its_configuration_asks_for(workdir):
    assert [type(one) for one in sink.sinks_of(config_with(tensorboard=True), workdir, 0)] == [TensorBoard]
    assert sink.sinks_of(config_with(tensorboard=True), workdir, 1) == []
    assert sink.sinks_of(config_with(), workdir, 0) == []


def test_a_sink_that_is_none_is_named_by_its_module(workdir, monkeypatch):
    monkeypatch.setattr(track_io, "make", lambda *_: "wrong")
    with pytest.raises(TypeError, match=r"^make of reporting\.sinks\.track_io returned 'wrong'; it must return None"):
        sink.sinks_of(config_with(), workdir, 0)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("wandb", "logging.wandb needs the package wandb; make setup EXTRAS=wandb"),
        ("trackio", "logging.trackio needs the package trackio; .venv/bin/python -m pip install trackio"),
    ],
)
def test_a_missing_package_is_one_line_before_anything_begins(monkeypatch, key, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        sink.check(config_with(**{key: True}))
    assert str(error.value) == message
    sink.check(config_with())


@pytest.fixture
def offline(monkeypatch):
    """Weights & Biases without its servers."""
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # it reads its variables once in a process
    for name in weights_and_biases.CHOSEN_BY.values():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")


def test_weights_and_biases_gets_every_figure_and_a_run_that_continues_is_the_same_run(offline, workdir):
    for steps in (range(1, 3), range(3, 5)):
        write(config_with(wandb=True), workdir, steps)
    kept = sorted(workdir.rglob("*.wandb"))
    number = (workdir / weights_and_biases.ID_FILE).read_text()
    assert [path.name for path in kept] == [f"run-{number}.wandb"] * 2
    for content in (path.read_bytes() for path in kept):
        for part in (b"train/loss", b"mine", b"study", b"decoder_lm", b"language_modeling", b"optimizer.learning_rate"):
            assert part in content, part
        assert b"write_seconds" not in content and b"train/mfu" not in content


def test_weights_and_biases_does_not_record_a_secret_that_was_typed(offline, workdir, monkeypatch):
    secret = "http://127.0.0.1:9/hook-of-mine"
    typed = ["train.py", "--config.logging.wandb=true", f"--config.logging.alerts={secret}"]
    monkeypatch.setattr(sys, "argv", typed)
    config = config_with(wandb=True)
    with config.unlocked():
        config.logging.alerts = secret
    weights_and_biases.make(config, workdir, 0).close(None)
    [kept] = workdir.rglob("*.wandb")
    assert b"--config.logging.wandb=true" in kept.read_bytes() and b"hook-of-mine" not in kept.read_bytes()
    assert sys.argv == typed


@pytest.mark.parametrize(("error", "code"), [(None, 0), (ValueError("loss"), 1)])
def test_weights_and_biases_is_told_whether_the_run_has_failed(offline, workdir, error, code):
    weights_and_biases.make(config_with(wandb=True), workdir, 0).close(error)
    assert [record.exit.exit_code for record in records_of(workdir) if record.HasField("exit")] == [code]


def test_the_runs_of_a_group_of_a_study_are_compared_in_one_table(offline, tmp_path):
    """Each trial is a run of its group, named by its configuration; columns have the best figure and the last."""
    study, _ = suites.find("trm")
    for member in suites.members(study, ["exp08-ema"])[:2]:
        workdir = pathlib.Path(suites.folder(str(tmp_path), member))
        workdir.mkdir(parents=True)
        with MetricsWriter(workdir, sinks=sink.sinks_of(config_with(wandb=True), workdir, 0)) as writer:
            for step, accuracy in enumerate((0.25, 0.75, 0.5), start=1):
                writer.write("eval", step=step, eval_exact_accuracy=accuracy, eval_loss=1 - accuracy)
        records = list(records_of(workdir))
        run = next(record.run for record in records if record.HasField("run"))
        assert (run.run_group, run.display_name) == ("exp08-ema", member.name)
        metrics = {record.metric.name: record.metric for record in records if record.HasField("metric")}
        for name in ("eval/eval_exact_accuracy", "eval/eval_loss"):
            assert metrics[name].step_metric == "step" and metrics[name].summary.last
        assert metrics["eval/eval_exact_accuracy"].summary.max and metrics["eval/eval_loss"].summary.min


def records_of(workdir: pathlib.Path):
    """Yield what the client wrote in a run's folder, which `wandb sync` sends: records of a log in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    (path,) = workdir.rglob("*.wandb")
    written, at, content, block, header = path.read_bytes(), 7, b"", 1 << 15, 7
    while at + header <= len(written):
        if block - at % block < header:  # nothing begins so near to the end of a block
            at += block - at % block
            continue
        size, kind = struct.unpack_from("<HB", written, at + 4)
        content += written[at + header : at + header + size]
        at += header + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(content)
            content = b""


def test_the_variables_of_weights_and_biases_win(offline, workdir, monkeypatch):
    monkeypatch.setenv("WANDB_NAME", "another-name")
    monkeypatch.setenv("WANDB_TAGS", "first-tag,second-tag")
    write(config_with(wandb=True), workdir, range(1, 2))
    [content] = [path.read_bytes() for path in workdir.rglob("*.wandb")]
    assert b"another-name" in content and b"second-tag" in content


def test_an_interrupted_run_ends_its_run_too(offline, workdir):
    with pytest.raises(Interrupted):
        write(config_with(wandb=True), workdir, range(1, 2), Interrupted(1))
    assert list(workdir.rglob("*.wandb"))


def test_without_an_account_weights_and_biases_is_refused_in_one_line(offline, workdir, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("NETRC", str(workdir / "none"))
    monkeypatch.setenv("HOME", str(workdir))
    with pytest.raises(ConfigError, match=r"^logging\.wandb: .*; run wandb login, or set WANDB_MODE=offline$"):
        sink.sinks_of(config_with(wandb=True), workdir, 0)


def test_trackio_keeps_every_figure_of_a_run_that_continues(workdir, monkeypatch, tmp_path):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    for steps in (range(1, 3), range(3, 5)):
        write(config_with(trackio=True), workdir, steps)
    [path] = (tmp_path / "trackio").glob("*.db")
    with contextlib.closing(sqlite3.connect(path)) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(name, step) for name, step, _ in rows] == [("mine", step) for step in range(1, 5)]
    assert all(b"train/loss" in text and b"mfu" not in text for *_, text in rows)


def test_a_failure_of_trackio_is_a_line_of_the_log_and_ends_nothing(workdir, monkeypatch, caplog):
    def fail(*unused, **also_unused):
        raise failure

    client = types.SimpleNamespace(init=lambda *_, **__: types.SimpleNamespace(log=fail, finish=fail))
    monkeypatch.setitem(sys.modules, "trackio", client)
    failure = sqlite3.OperationalError("database is locked")
    write(config_with(trackio=True), workdir, [1])
    assert "trackio: database is locked" in caplog.text
    client.init, failure = fail, OSError("no space left on device")
    assert track_io.make(config_with(trackio=True), workdir, 0) is None
    assert "nothing is kept by trackio: no space left on device" in caplog.text


def test_if_a_sink_cannot_be_made_those_before_it_are_closed(workdir, monkeypatch):
    closed = []

    class Made(sink.Sink):
        def close(self, error):
            closed.append(str(error))

    def refuse(*unused):
        raise ConfigError("no account")

    monkeypatch.setattr(alerts, "make", lambda *_: Made())
    monkeypatch.setattr(track_io, "make", refuse)
    with pytest.raises(ConfigError, match="no account"):
        sink.sinks_of(config_with(), workdir, 0)
    assert closed == ["no account"]
