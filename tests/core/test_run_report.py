# SPDX-License-Identifier: Apache-2.0
"""The report at the end of a run never ends it otherwise."""

import contextlib
import resource
import time
import types

import pytest

from cluster.interruption import Interrupted
from configs import base
from core.between_steps import run_report
from files.atomic import write_atomically
from reporting.clock import Clock

LINE = b'{"kind": "event", "event": "start", "step": 0, "time": 1780000000.0}\n'


@pytest.fixture
def job(tmp_path):
    """A run in this process; `events` are what it wrote."""
    (tmp_path / "mine").mkdir()
    write_atomically(tmp_path / "mine" / "metrics.jsonl", LINE)
    events = []
    log = types.SimpleNamespace(event=lambda text, event: events.append((event, text)))
    return types.SimpleNamespace(
        workdir=tmp_path / "mine", config=base.get_config(), log=log, events=events, clock=Clock(time.monotonic())
    )  # fmt: skip


def end(job, error: BaseException | None = None) -> None:
    """End a run as train.py does."""
    with contextlib.suppress(BaseException if error else ()), contextlib.ExitStack() as ends:
        ends.callback(lambda: run_report.RunReport().on_end(job, has_failed=error is not None))
        if error:
            raise error


@pytest.mark.parametrize("error", [None, FloatingPointError("not finite")])
def test_a_run_that_has_finished_or_failed_has_a_report_which_is_no_training(job, error):
    job.clock.enter("step", 3)
    end(job, error)
    spent = job.clock.read()
    assert job.clock.phase == "step" and spent["evaluation"] > spent["step"]
    assert "<h1>Run mine</h1>" in (job.workdir / "report.html").read_text() and job.events == []


@pytest.mark.parametrize("error", [Interrupted(3), KeyboardInterrupt()])
def test_an_interrupted_run_does_not_wait_for_one(job, error):
    end(job, error)
    assert not (job.workdir / "report.html").exists() and job.events == []


def test_nothing_is_written_where_that_is_not_asked_for(job):
    job.config.logging.report = False
    end(job)
    assert not (job.workdir / "report.html").exists()


def test_a_report_that_cannot_be_written_is_one_event(job, monkeypatch):
    (job.workdir / "metrics.jsonl").write_bytes(LINE + b'{"kind": "train"}\n')
    end(job)
    (job.workdir / "metrics.jsonl").unlink()
    end(job)
    monkeypatch.setattr(run_report, "MOST_SECONDS", 0.001)
    end(job)
    assert [event for event, _ in job.events] == ["report_failed"] * 3
    texts = [text.removeprefix("report.html was not written: ") for _, text in job.events]
    assert texts[0].endswith("metrics.jsonl, line 2: step is missing")
    assert "has no metrics.jsonl" in texts[1] and texts[2] == "it took more than 0.001 s"
    assert all("\n" not in text for text in texts)


def test_a_report_of_millions_of_lines_has_the_time_to_read_them(job):
    assert run_report.most_seconds(job.workdir) == 60
    with (job.workdir / "metrics.jsonl").open("r+b") as file:
        file.truncate(2_000_000 * 200)
    assert run_report.most_seconds(job.workdir) == 240
    (job.workdir / "metrics.jsonl").unlink()
    assert run_report.most_seconds(job.workdir) == 60


def test_without_room_on_the_disk_there_is_one_event_and_no_part_of_a_page(job):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    try:
        end(job)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert [text.rpartition(": ")[2] for _, text in job.events] == ["File too large; name a file that can be written"]
    assert [path.name for path in job.workdir.iterdir()] == ["metrics.jsonl"]
