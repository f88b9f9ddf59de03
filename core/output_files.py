# SPDX-License-Identifier: Apache-2.0
"""The files that the flags of a command name for its results: checked before the work, and written after it."""

import os
import pathlib

from checkpointing.bucket import path_of
from configs.errors import ConfigError
from core.command_line import FLAGS, Command
from files.atomic import write_atomically
from files.paths import expanded


def check(flag: str, default: pathlib.Path | None = None) -> None:
    """Raise ConfigError if the file of a flag cannot be written; call this before its content is computed."""
    path = _file_of(flag, default)
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"--{flag}={path}: the folder {path.parent} does not exist; create it, or name another")
    if path.is_dir():
        raise ConfigError(f"--{flag}={path} is a folder; name a file in it")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--{flag}={path}: the folder {path.parent} cannot be written; name a file in another")


def check_all(*flags: str) -> None:
    """Raise ConfigError if the file of a flag cannot be written, or is that of another flag."""
    named = {}
    for flag in flags:
        check(flag)
        if (path := _file_of(flag, None)) and (other := named.setdefault(path.resolve(), flag)) != flag:
            raise ConfigError(f"--{other} and --{flag} name the same file, {path}; give each its own")


def write(flag: str, text: str, default: pathlib.Path | None = None) -> pathlib.Path:
    """Write the file of a flag atomically, and return it; ConfigError if it cannot be written."""
    path = _file_of(flag, default)
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise ConfigError(f"--{flag}={path}: {error.strerror}; name a file that can be written") from None
    return path


def check_of_run(flag: str, command: Command, name: str) -> None:
    """Raise ConfigError if `write_of_run` could not write its file."""
    check(flag, None if command.bucket else command.workdir / name)


def write_of_run(flag: str, text: str, command: Command, name: str) -> str:
    """Write the file of a flag, or without a value the file `name` of the run, in its bucket too; return its place."""
    path = write(flag, text, command.workdir / name)
    if FLAGS[flag].value:
        return str(path)
    if command.bucket:
        (path_of(command.bucket.url) / name).write_bytes(text.encode())
    return f"{command.address}/{name}"


def _file_of(flag: str, default: pathlib.Path | None) -> pathlib.Path | None:
    return expanded(FLAGS[flag].value) if FLAGS[flag].value else default
