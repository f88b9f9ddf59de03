# SPDX-License-Identifier: Apache-2.0
"""The secret of a run: whoever knows it is taken for one of its processes.

A process takes the first of these that is there: the variable TORUS_RUN_SECRET; the file that TORUS_RUN_SECRET_FILE
names; on Compute Engine the machine's attribute torus-run-secret, which `pod.py create` makes; a file in the run's
folder, which process 0 writes and keeps there while the processes join. Without any of them no secret protects the run.
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

from configs.base import ConfigError
from parallelism import metadata

VARIABLE, FILE_VARIABLE, ATTRIBUTE, FILE_NAME = (
    "TORUS_RUN_SECRET", "TORUS_RUN_SECRET_FILE", "torus-run-secret", "run_secret",
)  # fmt: skip
FROM_METADATA, FROM_FOLDER, NOWHERE = f"the metadata attribute {ATTRIBUTE}", "the folder of the run", "nowhere"
SOURCES = (VARIABLE, FILE_VARIABLE, FROM_METADATA, FROM_FOLDER, NOWHERE)  # a process says its own by the number here
FEWEST_CHARACTERS, LONGEST_BYTES = 16, 4096
READABLE_BY_OTHERS = stat.S_IRWXG | stat.S_IRWXO
METADATA_TRIES, METADATA_SECONDS, METADATA_PAUSE_SECONDS = 3, 3.0, 1.0


@dataclasses.dataclass(frozen=True)
class Secret:
    """A secret, empty where there is none, and which of SOURCES it is from."""

    source: str
    value: bytes = dataclasses.field(repr=False)


class RunSecret:
    """How one process comes to the secret of its run."""

    def __init__(self, environment: Mapping[str, str], workdir: pathlib.Path | None, *, first: bool):
        """Look for what the user or the pod gives; ConfigError where that cannot be a secret.

        Args:
          workdir: a folder that all processes share; None: there is none.
          first: whether this is process 0, which writes a secret there where none is given.
        """
        self.given = _given(environment)
        self.folder = workdir if self.given is None else None
        self.first, self.made_folder, self.written = first, False, None

    def find(self) -> Secret:
        """Return the secret as it is now; what process 0 has not written yet is an empty one.

        ConfigError where process 0 cannot write it.
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
        """Remove the file, and the folder if it was made for it: nobody joins any more. Again, it does nothing."""
        if self.written:
            self.written = None
            with contextlib.suppress(OSError):
                (self.folder / FILE_NAME).unlink()
            with contextlib.suppress(OSError):  # by now it holds something
                if self.made_folder:
                    self.folder.rmdir()

    def _write(self, folder: pathlib.Path) -> Secret:
        """Write a new secret, whole or not at all, that only this user can read."""
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
    """Return the secret that the environment, a file of the user's or the machine's metadata has."""
    if text := environment.get(VARIABLE):
        return _checked(VARIABLE, os.fsencode(text), VARIABLE)
    if name := environment.get(FILE_VARIABLE):
        path, what = pathlib.Path(name).expanduser(), f"{FILE_VARIABLE}={name}"
        try:
            if path.stat().st_mode & READABLE_BY_OTHERS:
                raise ConfigError(f"{what} can be read by other users; chmod 600 {name}")
            return _checked(FILE_VARIABLE, _read(path), what)
        except OSError as error:
            raise ConfigError(f"{what}: {error.strerror}") from None
    if value := from_metadata():
        return _checked(FROM_METADATA, value.encode(), FROM_METADATA)
    return None


def from_metadata() -> str | None:
    """Return the attribute of this machine; None where there is none, or no answer."""
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
            f"{what} has fewer than {FEWEST_CHARACTERS} characters, which can be guessed; `openssl rand -hex 32` makes "
            "a good one"
        )
    return Secret(source, value)


def _read(path: pathlib.Path) -> bytes:
    with path.open("rb") as file:
        return file.read(LONGEST_BYTES)
