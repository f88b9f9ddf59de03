# SPDX-License-Identifier: Apache-2.0
"""Manifest of a checkpoint: a digest of every file, written last, and a check of the files against it.

Orbax does not detect flipped bits in its array files: it restores wrong numbers.
"""

import concurrent.futures
import hashlib
import json
import pathlib
import re
from collections.abc import Callable
from typing import Annotated

import pydantic

from files.json_reader import JsonError, Object, parse_json

NAME = "manifest.json"
MAX_BYTES = 256 << 20  # a manifest has about a hundred bytes per file
FORMAT = 1
THREADS = 4  # hashing releases the GIL
INSIDE = re.compile(r"(?!/)(?!.*(^|/)\.\.(/|$))[^\0]+", re.DOTALL)  # a relative path without ".."


class Manifest(Object):
    """The files of a checkpoint, each with its size and SHA-256, and the digest of the manifest itself."""

    format: int
    step: int
    files: dict[str, tuple[Annotated[int, pydantic.Field(ge=0)], str]]
    sha256: str


def files_below(folder: pathlib.Path) -> list[str]:
    """Return the relative names of all files below a folder, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def digests(folder, names: list[str]) -> dict[str, list]:
    """Return {name: [bytes, SHA-256]} of files below a folder. Raises OSError if one cannot be read."""
    with concurrent.futures.ThreadPoolExecutor(THREADS) as executor:
        return dict(zip(names, executor.map(lambda name: _digest(folder / name), names), strict=True))


def write(folder, step: int, files: dict[str, list]) -> None:
    """Write the manifest of a checkpoint, with a digest of itself."""
    content = {"format": FORMAT, "step": step, "files": files}
    with (folder / NAME).open("w") as file:
        json.dump(content | {"sha256": digest_of(content)}, file, indent=1)


def read(folder) -> dict:
    """Return the manifest of a checkpoint without its own digest; ValueError if damaged, OSError if not readable."""
    try:
        content = dict(parse_json((folder / NAME).read_bytes(), Manifest, "it", max_bytes=MAX_BYTES))
    except JsonError as error:
        raise ValueError(str(error)) from None
    if content.pop("sha256") != digest_of(content):
        raise ValueError("has other content than when it was written")
    if content["format"] != FORMAT or not all(map(INSIDE.fullmatch, content["files"])):
        raise ValueError(f"is not of format {FORMAT}, or names files outside the folder")
    return content


def problems(folder, *, part: int = 0, parts: int = 1, is_read: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Return a line for each damaged file of a checkpoint: missing, of another size, or with other bytes.

    Checks every `parts`-th file from index `part` on, so that several processes can share the work. Files for whose
    names `is_read` is false are not checked. Raises OSError if a file exists and cannot be read, which does not count
    as damage.
    """
    try:
        content = read(folder)
    except FileNotFoundError:
        return [f"{NAME} is missing"]
    except (ValueError, IsADirectoryError) as error:
        return [f"{NAME} cannot be read ({error})"]
    if str(content["step"]) != folder.name:
        return [f"{NAME} is that of checkpoint {content['step']}"]
    files = content["files"]
    names = sorted(filter(is_read, files))[part::parts]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as executor:
        return list(filter(None, executor.map(lambda name: _problem(folder / name, name, *files[name]), names)))


def missing(folder, names: list[str]) -> list[str]:
    """Return the names of files that do not exist, without reading any."""
    with concurrent.futures.ThreadPoolExecutor(THREADS) as executor:
        there = executor.map(lambda name: (folder / name).exists(), names)
        return [name for name, is_there in zip(names, there, strict=True) if not is_there]


def _problem(path, name: str, size: int, digest: str) -> str | None:
    try:
        found_size, found = _digest(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return f"{name} is missing"
    if found_size != size:
        return f"{name} has {found_size:,} bytes instead of {size:,}"
    return None if found == digest else f"{name} has other bytes than were saved"


def _digest(path: pathlib.Path) -> list:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return [file.tell(), digest]


def digest_of(content) -> str:
    """Return the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
