# SPDX-License-Identifier: Apache-2.0
"""The secret of a run: a peer that knows it is accepted as one of the run's processes.

A process uses the first source that exists:
- the environment variable TORUS_RUN_SECRET;
- the file that TORUS_RUN_SECRET_FILE names;
- on Compute Engine, the machine's metadata attribute torus-run-secret, which `pod.py create` sets;
- a file in the run's folder, which process 0 writes and removes when all processes have joined.
Without any of them, no secret protects the run.
"""

import contextlib
import dataclasses
import os
import pathlib
import secrets
import stat
import tempfile
import time
from collections.abc import Mapping

from cluster import metadata
from configs.errors import ConfigError
from files.paths import expanded

VARIABLE, FILE_VARIABLE, ATTRIBUTE, FILE_NAME = (
    "TORUS_RUN_SECRET", "TORUS_RUN_SECRET_FILE", "torus-run-secret", "run_secret",
)  # fmt: skip
FROM_METADATA, FROM_FOLDER, NOWHERE = f"the metadata attribute {ATTRIBUTE}", "the folder of the run", "nowhere"
SOURCES = (VARIABLE, FILE_VARIABLE, FROM_METADATA, FROM_FOLDER, NOWHERE)  # a process sends its source's index
FEWEST_CHARACTERS, LONGEST_BYTES = 16, 4096
READABLE_BY_OTHERS = stat.S_IRWXG | stat.S_IRWXO
METADATA_TRIES, METADATA_SECONDS, METADATA_PAUSE_SECONDS = 3, 3.0, 1.0


@dataclasses.dataclass(frozen=True)
class Secret:
    """A secret and its source, one of SOURCES; the value is empty if there is no secret."""

    source: str
    value: bytes = dataclasses.field(repr=False)


class RunSecret:
    """Finds the secret of a run for one process; process 0 also writes and removes the file."""

    def __init__(self, environment: Mapping[str, str], workdir: pathlib.Path | None, *, first: bool):
        """Look for a secret from the user or the pod; ConfigError if the value cannot be used as a secret.

        `workdir` is a folder that all processes share, or None. `first` says whether this is process 0, which writes a
        secret into that folder if none is given.
        """
        self.given = _given(environment)
        self.folder = workdir if self.given is None else None
        self.first, self.made_folder, self.written = first, False, None

    def find(self) -> Secret:
        """Return the current secret; it is empty until process 0 has written the file.

        Raises ConfigError if process 0 cannot write the file.
        """
        if self.given or not self.folder:
            return self.given or Secret(NOWHERE, b"")
        if self.first:
            self.written = self.written or self._write(self.folder)
            return self.written
        with contextlib.suppress(OSError):
            return Secret(FROM_FOLDER, _read(self.folder / FILE_NAME))
        return Secret(FROM_FOLDER, b"")

    def withdraw(self) -> None:
        """Remove the file, and the folder if it was made for it, since no process joins any more; idempotent."""
        if self.written:
            self.written = None
            with contextlib.suppress(OSError):
                (self.folder / FILE_NAME).unlink()
            with contextlib.suppress(OSError):  # the folder is no longer empty
                if self.made_folder:
                    self.folder.rmdir()

    def _write(self, folder: pathlib.Path) -> Secret:
        """Write a new secret atomically, to a file that only this user can read."""
        value = secrets.token_hex(32).encode()
        try:
            self.made_folder = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:  # mode 0600
                file.write(value)
            os.replace(file.name, folder / FILE_NAME)
        except OSError as error:
            raise ConfigError(
                f"--workdir={folder}: {error.strerror}; name a folder that can be written, or set {VARIABLE} to the "
                "same secret in all processes"
            ) from None
        return Secret(FROM_FOLDER, value)


def _given(environment: Mapping[str, str]) -> Secret | None:
    """Return the secret from the environment, the user's file or the machine's metadata; None if there is none."""
    if text := environment.get(VARIABLE):
        return _checked(VARIABLE, os.fsencode(text), VARIABLE)
    if name := environment.get(FILE_VARIABLE):
        path, what = expanded(name), f"{FILE_VARIABLE}={name}"
        try:
            if path.stat().st_mode & READABLE_BY_OTHERS:
                raise ConfigError(f"{what} can be read by other users; run chmod 600 {name}")
            return _checked(FILE_VARIABLE, _read(path), what)
        except OSError as error:
            raise ConfigError(f"{what}: {error.strerror}; name a file that can be read") from None
    if value := from_metadata():
        return _checked(FROM_METADATA, value.encode(), FROM_METADATA)
    return None


def from_metadata() -> str | None:
    """Return this machine's secret attribute; None if it is not set or the metadata server does not answer."""
    host = metadata.find_host()
    for attempt in range(METADATA_TRIES if host else 0):
        time.sleep(METADATA_PAUSE_SECONDS if attempt else 0)
        try:
            return metadata.ask(host, f"attributes/{ATTRIBUTE}", METADATA_SECONDS)[0]
        except metadata.Absent:
            return None
        except metadata.FAILURES:
            continue
    return None


def _checked(source: str, value: bytes, what: str) -> Secret:
    value = value.strip()
    if len(value) < FEWEST_CHARACTERS:
        raise ConfigError(
            f"{what} has fewer than {FEWEST_CHARACTERS} characters, so it can be guessed; make one with "
            "`openssl rand -hex 32`"
        )
    return Secret(source, value)


def _read(path: pathlib.Path) -> bytes:
    with path.open("rb") as file:
        return file.read(LONGEST_BYTES)
