# SPDX-License-Identifier: Apache-2.0
"""The report of a run at its end, as a callback."""

import pathlib
import subprocess
import sys

from cluster import processes
from core.callbacks import Callback
from reporting.sink import is_interruption
from settings.loading import ROOT

PAGE = "report.html"  # in the run's folder
MOST_SECONDS = 60  # for a report, and for each BYTES of metrics.jsonl, which took 15 s on 2 cores
BYTES = 100e6


class RunReport(Callback):
    """Write report.html when the run has finished or failed, by process 0, if `logging.report` asks for it.

    A separate process runs report.py, so its memory and its failures do not affect the run. An interrupted run writes
    no page: it continues later, and must leave its machine soon.
    """

    def on_end(self, job, *, has_failed):
        """Write the page; a failure to write it is an event."""
        if processes.index() or not job.config.logging.report:
            return
        if is_interruption(sys.exc_info()[1]):  # what is ending the run
            return
        with job.clock.within("evaluation"):  # else it would count as training, and as a step that hangs
            problem = write_page(job.workdir)
        if problem:
            job.log.event(f"{PAGE} was not written: {problem}", "report_failed")


def write_page(workdir: pathlib.Path) -> str:
    """Write the report of a run into its folder; return what went wrong, "" if nothing did."""
    command = [sys.executable, str(ROOT / "report.py"), str(workdir.absolute()), f"--html={workdir / PAGE}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=most_seconds(workdir))
    except subprocess.TimeoutExpired as error:
        return f"it took more than {error.timeout:g} s"
    except OSError as error:
        return str(error)
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return last.removeprefix("error: ") if done.returncode else ""


def most_seconds(workdir: pathlib.Path) -> float:
    """Return how long the report of a run may take: longer for a long record, which is read whole."""
    metrics = workdir / "metrics.jsonl"
    size = metrics.stat().st_size if metrics.exists() else 0
    return MOST_SECONDS * max(1.0, size / BYTES)
