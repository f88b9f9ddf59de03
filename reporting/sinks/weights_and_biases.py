# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases: process 0 sends every line of metrics.jsonl, whose figures are those of all hosts."""

import contextlib
import importlib.util
import logging
import os
import pathlib
import sys
import threading

from configs.errors import ConfigError
from files.atomic import write_atomically
from reporting.sink import Sink, is_interruption, numbers
from settings.keys import HIDDEN, flat

LOG = logging.getLogger("torus")
PROJECT = "torus"
ID_FILE = "wandb_id.txt"  # in the run's folder: a run that continues is the same run there
CHOSEN_BY = {"project": "WANDB_PROJECT", "name": "WANDB_NAME", "group": "WANDB_RUN_GROUP", "tags": "WANDB_TAGS"}
# The columns that a table of runs compares, where a run has the figure: the best of it and the last.
COMPARED = {"train/loss": "min", "eval/eval_loss": "min", "eval/eval_exact_accuracy": "max"}
END_SECONDS, SHORT_END_SECONDS = 60.0, 2.0  # to send what is left when a run has ended, or was interrupted


def check(config) -> None:
    """Raise ConfigError if the package is needed and missing."""
    if config.logging.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError("logging.wandb needs the package wandb; make setup EXTRAS=wandb")


def make(config, workdir: pathlib.Path, process: int) -> Sink | None:
    """Return the sink of process 0 if `logging.wandb` asks for it; None, with a line of the log, if it is out of reach.

    Raises ConfigError if nobody is logged in.
    """
    if not config.logging.wandb or process:
        return None
    import wandb

    try:
        return WeightsAndBiases(config, workdir)
    except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"logging.wandb: {reason}; run wandb login, or set WANDB_MODE=offline") from None
    except wandb.errors.Error as error:
        LOG.error(f"nothing is sent to Weights & Biases: {' '.join(str(error).split())}")
        return None


class WeightsAndBiases(Sink):
    """A run of the client `wandb`, which sends in a process of its own; what it cannot send, `wandb sync` can."""

    def __init__(self, config, workdir: pathlib.Path):
        """Begin a run, or resume that of an earlier process; a variable of CHOSEN_BY wins over what is given here."""
        import wandb

        given = {
            "project": PROJECT, "name": workdir.name, "group": workdir.absolute().parent.name,
            "tags": [config.model.name, config.train.objective],
        }  # fmt: skip
        given = {name: value for name, value in given.items() if not os.environ.get(CHOSEN_BY[name])}
        path = workdir / ID_FILE
        known = path.read_text().strip() if path.exists() else None
        self.failures, self.teardown = wandb.errors.Error, wandb.teardown
        typed, secret = sys.argv, config.logging.alerts
        if secret:
            sys.argv = [word.replace(secret, HIDDEN) for word in typed]  # the client records them
        try:
            self.run = wandb.init(
                **given, id=known, resume="allow", dir=str(workdir), config=flat(config),
                settings=wandb.Settings(console="off"),  # the output is the run's own
            )  # fmt: skip
        finally:
            sys.argv = typed
        self.run.define_metric("*", step_metric="step")
        for name, best in COMPARED.items():
            self.run.define_metric(name, step_metric="step", summary=f"{best},last")
        with contextlib.suppress(OSError):  # a full disk; the run then begins another one when it continues
            write_atomically(path, self.run.id.encode())

    def write(self, kind, figures, step):
        """Send the numbers of a line as KIND/NAME."""
        if kind != "event":
            self._try(lambda: self.run.log(numbers(kind, figures) | {"step": step}))

    def close(self, error):
        """End the run, failed if an error ends it; an interrupted run does not wait until all is sent."""
        seconds = SHORT_END_SECONDS if is_interruption(error) else END_SECONDS
        finish = threading.Thread(target=self._finish, args=[0 if error is None else 1], daemon=True)
        finish.start()
        finish.join(seconds)
        if finish.is_alive():
            LOG.error(f"not all was sent to Weights & Biases within {seconds:g} s; wandb sync sends the rest")

    def _finish(self, exit_code: int) -> None:
        """End the run, and the client's process, which writes to its file until then."""
        self._try(lambda: self.run.finish(exit_code=exit_code))
        self._try(self.teardown)

    def _try(self, call) -> None:
        try:
            call()
        except (self.failures, OSError, RuntimeError) as error:  # also where the client's own process has died
            LOG.error(f"Weights & Biases: {' '.join(str(error).split())}")
