# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases: process 0 sends every line of metrics.jsonl, whose figures are those of all hosts."""

import importlib.util
import os
import pathlib

from configs.errors import ConfigError
from files.atomic import write_atomically
from reporting.sink import Sink
from settings.keys import flat

PROJECT = "torus"
ID_FILE = "wandb_id.txt"  # in the run's folder; a run that continues is the same run there
CHOSEN_BY = {"project": "WANDB_PROJECT", "name": "WANDB_NAME", "group": "WANDB_RUN_GROUP", "tags": "WANDB_TAGS"}


def check(config) -> None:
    """Raise ConfigError if the package is needed and missing."""
    if config.logging.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError("logging.wandb needs the package wandb; make setup EXTRAS=wandb")


def make(config, workdir: pathlib.Path, process: int) -> Sink | None:
    """Return the sink of process 0 if `logging.wandb` asks for it."""
    return WeightsAndBiases(config, workdir) if config.logging.wandb and not process else None


class WeightsAndBiases(Sink):
    """A run of the client `wandb`, which sends in processes of its own and keeps what it cannot send in a folder."""

    def __init__(self, config, workdir: pathlib.Path):
        """Begin a run, or resume the one of an earlier process; the variables of CHOSEN_BY win over what is given."""
        import wandb

        settings = {
            "project": PROJECT, "name": workdir.name, "group": workdir.absolute().parent.name,
            "tags": [config.model.name, config.train.objective],
        }  # fmt: skip
        settings = {name: value for name, value in settings.items() if not os.environ.get(CHOSEN_BY[name])}
        path = workdir / ID_FILE
        self.run = wandb.init(
            **settings, id=path.read_text().strip() if path.exists() else None, resume="allow", dir=str(workdir),
            config=flat(config),
        )  # fmt: skip
        write_atomically(path, self.run.id.encode())
        self.run.define_metric("*", step_metric="step")

    def write(self, kind, figures, step):
        """Send the numbers of a line as KIND/NAME; an event is sent as a count of its kind so far."""
        numbers = {f"{kind}/{name}": value for name, value in figures.items() if isinstance(value, int | float)}
        if kind != "event":
            self.run.log(numbers | {"step": step})

    def close(self, error):
        """End the run; it is marked as failed if an error ends it."""
        self.run.finish(exit_code=0 if error is None else 1)
