# SPDX-License-Identifier: Apache-2.0
"""Records of the created pod and of the launched program, kept on this machine, and the state of the local code."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Annotated, NotRequired

import pydantic

from configs.errors import shown
from files.atomic import write_atomically
from files.json_reader import JsonError, Object, Scalar, Schema, read_json
from pods.errors import PodError, usage_error
from pods.settings import FIELDS, ROOT, Settings

CREATION = [name for name, field in FIELDS.items() if field.metadata["group"] == "create"]
CREATION += ["accel", "version", "workers", "zone", "project"]  # all settings that a pod is created with


class Switches(Object):
    """The switches in the record of a launch, see `Resolved.record`."""

    given: NotRequired[dict[str, bool]]
    on: list[str]
    left_out: NotRequired[dict[str, str]]


class Launch(Object):
    """The record of a launch."""

    subcommand: str
    words: list[str]  # the program and its arguments
    environment: dict[str, str]  # variables that are added to the hosts' own
    log: str  # prefix of the log's name
    workdir: str | None  # None if it is not a run of train.py
    study: NotRequired[str | None]  # root of a study; absent or None if it is not one
    switches: Switches | None  # None if it has none
    recipe: str
    accelerator: str
    commit: str
    changed: list[str]  # files that differed from the commit
    time: Annotated[float, pydantic.Field(ge=0, lt=1e11)]  # Unix seconds


def launched(settings: Settings) -> bool:
    """Return whether this machine has launched anything on the existing pod."""
    return _launch_path(settings).exists()


def read(settings: Settings) -> Launch:
    """Return the last launch; PodError if its record is damaged, or (status 2) if there is none."""
    if not launched(settings):
        raise usage_error(f"nothing was launched from here ({_launch_path(settings)} is missing); `launch` first")
    return read_kept(_launch_path(settings), Launch)


def read_kept(path: pathlib.Path, schema: type[Schema]) -> Schema:
    """Return the content of a JSON record; a PodError names the file if it is damaged."""
    try:
        return read_json(path, schema)
    except JsonError as error:
        raise PodError(f"{path} is damaged: {str(error).removeprefix(f'{path}: ')}") from None
    except OSError as error:
        raise PodError(f"{path}: {error.strerror}") from None


def write(settings: Settings, record: dict) -> None:
    """Write the record of a launch."""
    write_json(_launch_path(settings), record)


def keep_creation(settings: Settings) -> None:
    """Record the flags of a creation, so that a preempted pod can be created again."""
    write_json(_creation_path(settings), {name: getattr(settings, name) for name in CREATION})


def creation_kept(settings: Settings) -> bool:
    """Return whether the flags of the creation are recorded."""
    return _creation_path(settings).exists()


def as_created(settings: Settings) -> Settings:
    """Return the settings with the recorded flags of the pod's creation; typed flags win."""
    if not creation_kept(settings):
        return settings
    path = _creation_path(settings)
    kept = read_kept(path, dict[str, Scalar])
    names = [name for name in CREATION if name in kept and settings.origins.get(name) != "flag"]
    for name in names:
        if type(kept[name]) is not type(FIELDS[name].default):
            raise PodError(f"{path} is damaged: {name} is {shown(kept[name])}")
    return dataclasses.replace(settings, **{name: kept[name] for name in names})


def created_elsewhere(settings: Settings) -> str:
    """Return where the recorded pod is, "" if that may be the zone and the project of the settings."""
    if settings.transport == "local":
        return ""
    kept = as_created(dataclasses.replace(settings, origins={}))
    places = [(kept.zone, settings.zone), (kept.project, settings.project)]
    is_elsewhere = any(was and now and was != now for was, now in places)
    return " of ".join(was for was, _ in places if was) if is_elsewhere else ""


@contextlib.contextmanager
def forgotten(settings: Settings) -> Iterator[None]:
    """Delete the records before the block deletes the pod, so that `supervise` stops; restore them if it fails.

    After an interruption the pod may or may not exist. The record of its creation is then restored, but not the record
    of the launch: a `supervise` that finds a launch without a pod creates the pod again.
    """
    files = (_launch_path(settings), _creation_path(settings))
    texts = {file: file.read_bytes() for file in files if file.exists() and not settings.dry_run}

    def restore(kind: type | None, error: BaseException | None, trace) -> None:
        for file, text in texts.items() if error else ():
            if file == _creation_path(settings) or not isinstance(error, KeyboardInterrupt):
                write_atomically(file, text)

    with contextlib.ExitStack() as after:
        after.push(restore)
        for file in texts:
            file.unlink()
        yield


def code_state() -> tuple[str, list[str]]:
    """Return the commit of the local code, and the files that differ from it; "" and [] outside a git checkout.

    Raises PodError if git knows the commit, but `git status` fails.
    """
    commit, changed = git("rev-parse", "HEAD").stdout.strip(), git("status", "--porcelain")
    if commit and changed.returncode:
        raise PodError(f"git status in {ROOT}: {' '.join(changed.stderr.split())}")
    return commit, [line[3:] for line in changed.stdout.splitlines()] if commit else []


def git(*words: str) -> subprocess.CompletedProcess:
    """Run git in the local checkout, or in the one that option -C names."""
    environment = {name: value for name, value in os.environ.items() if name not in _of_another_checkout()}
    how = {"text": True, "errors": "surrogateescape", "capture_output": True}  # names of files may be any bytes
    return subprocess.run(["git", *words], cwd=ROOT, env=environment, **how)


@functools.cache
def _of_another_checkout() -> frozenset[str]:
    """Return the variables that name a checkout; they win over the folder and -C, and hooks of git have some."""
    names = subprocess.run(["git", "rev-parse", "--local-env-vars"], text=True, capture_output=True).stdout.split()
    return frozenset(name for name in names if not name.startswith("GIT_CONFIG"))  # it may hold safe.directory


def _launch_path(settings: Settings) -> pathlib.Path:
    return settings.pod_folder / "launch.json"


def _creation_path(settings: Settings) -> pathlib.Path:
    return settings.pod_folder / "created.json"


def write_json(path: pathlib.Path, content: dict) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=1).encode())
