# SPDX-License-Identifier: Apache-2.0
"""trackio: process 0 keeps every line of metrics.jsonl in a local database, which `trackio show` draws."""

import importlib.util
import logging
import pathlib
import sqlite3

from configs.errors import ConfigError
from reporting.sink import Sink, numbers
from settings.keys import flat

LOG = logging.getLogger("torus")
PROJECT = "torus"
FAILURES = OSError, RuntimeError, sqlite3.Error  # of the client, which has no errors of its own


def check(config) -> None:
    """Raise ConfigError if the package is needed and missing."""
    if config.logging.trackio and importlib.util.find_spec("trackio") is None:
        raise ConfigError("logging.trackio needs the package trackio; .venv/bin/python -m pip install trackio")


def make(config, workdir: pathlib.Path, process: int) -> Sink | None:
    """Return the sink of process 0 if `logging.trackio` asks for it; None, with a line of the log, if it fails."""
    if not config.logging.trackio or process:
        return None
    try:
        return Trackio(config, workdir)
    except FAILURES as error:
        LOG.error(f"nothing is kept by trackio: {error}")
        return None


class Trackio(Sink):
    """A run of the client `trackio`, named after the run's folder; one that continues is the same run there."""

    def __init__(self, config, workdir: pathlib.Path):
        import trackio

        group = workdir.absolute().parent.name
        self.run = trackio.init(PROJECT, name=workdir.name, group=group, config=flat(config), resume="allow")

    def write(self, kind, figures, step):
        """Keep the numbers of a line as KIND/NAME."""
        if kind != "event":
            self._try(lambda: self.run.log(numbers(kind, figures), step=step))

    def close(self, error):
        """End the run."""
        self._try(self.run.finish)

    def _try(self, call) -> None:
        try:
            call()
        except FAILURES as error:
            LOG.error(f"trackio: {error}")
