# SPDX-License-Identifier: Apache-2.0
"""What was created and launched, kept on this side, and the state of the code that it was launched from."""

import contextlib
import dataclasses
import json
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Annotated, NotRequired

import pydantic

from configs.base import shown
from files.json_reader import JsonError, Object, Scalar, Schema, read_json
from pods.settings import FIELDS, ROOT, Settings
from pods.transports import PodError, usage_error

NULL = {  # what stands for null in a launch
    "subcommand": "", "words": [], "environment": {}, "log": "", "workdir": None, "switches": None, "recipe": "",
    "accelerator": "", "commit": "", "changed": [], "time": 0.0,
}  # fmt: skip
KEYS = NULL.keys()
CREATION = [name for name, field in FIELDS.items() if field.metadata["group"] == "create"]
CREATION += ["accel", "version", "workers"]  # with the above, all that a pod is made by


class Switches(Object):
    """What a launch keeps of the switches, see `Resolved.record`."""

    given: NotRequired[dict[str, bool]]
    on: list[str]
    not_yet: list[str]


class Launch(Object):
    """What was launched.

    Keys: the subcommand; words, the program and its arguments; environment, variables beside the hosts' own; log, the
    prefix of its name; workdir, None where it is no run of train.py; switches, None where it has none; recipe;
    accelerator; commit, and changed, the files that differed from it; time (Unix seconds).
    """

    subcommand: str | None
    words: list[str] | None
    environment: dict[str, str] | None
    log: str | None
    workdir: str | None
    switches: Switches | None
    recipe: str | None
    accelerator: str | None
    commit: str | None
    changed: list[str] | None
    time: Annotated[float, pydantic.Field(ge=0, lt=1e11)] | None


def launched(settings: Settings) -> bool:
    """Whether anything was launched from here on the pod that is there."""
    return _launch_path(settings).exists()


def read(settings: Settings) -> Launch:
    """Return what was launched last; PodError where that is damaged, and (status 2) where nothing was."""
    if not launched(settings):
        raise usage_error(f"nothing was launched from here ({_launch_path(settings)} is missing); `launch` first")
    kept = read_kept(_launch_path(settings), Launch)
    return NULL | {key: value for key, value in kept.items() if value is not None}


def read_kept(path: pathlib.Path, schema: type[Schema]) -> Schema:
    """Return the content of a JSON file of ours; PodError, naming it, where it is damaged."""
    try:
        return read_json(path, schema)
    except JsonError as error:
        raise PodError(f"{path} is damaged: {str(error).removeprefix(f'{path}: ')}") from None
    except OSError as error:
        raise PodError(f"{path}: {error.strerror}") from None


def write(settings: Settings, record: dict) -> None:
    """Keep what was launched."""
    write_json(_launch_path(settings), record)


def keep_creation(settings: Settings) -> None:
    """Keep the flags of a creation, by which the pod is made again where it is taken away."""
    write_json(_creation_path(settings), {name: getattr(settings, name) for name in CREATION})


def creation_kept(settings: Settings) -> bool:
    """Whether they are there."""
    return _creation_path(settings).exists()


def as_created(settings: Settings) -> Settings:
    """Return the settings with the flags that the pod was created with, where they are kept; typed ones win."""
    if not creation_kept(settings):
        return settings
    path = _creation_path(settings)
    kept = read_kept(path, dict[str, Scalar])
    names = [name for name in CREATION if name in kept and settings.origins.get(name) != "flag"]
    for name in names:
        if type(kept[name]) is not type(FIELDS[name].default):
            raise PodError(f"{path} is damaged: {name} is {shown(kept[name])}")
    return dataclasses.replace(settings, **{name: kept[name] for name in names})


@contextlib.contextmanager
def forgotten(settings: Settings) -> Iterator[None]:
    """What is kept goes, before the pod does, so that `supervise` lets it go; it is back where that fails."""
    files = (_launch_path(settings), _creation_path(settings))
    texts = {file: file.read_bytes() for file in files if file.exists() and not settings.dry_run}
    for file in texts:
        file.unlink()
    try:
        yield
    except PodError:
        for file, text in texts.items():
            file.write_bytes(text)
        raise


def code_state() -> tuple[str, list[str]]:
    """Return the commit of the code here, and the files that differ from it; "" outside a git checkout.

    Raises:
      PodError: git knows the commit and cannot tell what differs from it.
    """
    commit, changed = git("rev-parse", "HEAD").stdout.strip(), git("status", "--porcelain")
    if commit and changed.returncode:
        raise PodError(f"git status in {ROOT}: {' '.join(changed.stderr.split())}")
    return commit, [line[3:] for line in changed.stdout.splitlines()] if commit else []


def git(*words: str) -> subprocess.CompletedProcess:
    """Ask git of the code here."""
    return subprocess.run(["git", *words], cwd=ROOT, text=True, capture_output=True)


def _launch_path(settings: Settings) -> pathlib.Path:
    return settings.pod_folder / "launch.json"


def _creation_path(settings: Settings) -> pathlib.Path:
    return settings.pod_folder / "created.json"


def write_json(path: pathlib.Path, content: dict) -> None:
    """Write a file that is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1))
    partial.replace(path)
