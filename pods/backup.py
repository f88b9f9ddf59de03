# SPDX-License-Identifier: Apache-2.0
"""The subcommand `backup`: copies a run or a study, with its checkpoints, to a folder of this machine."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import NotRequired

from checkpointing import host_parts
from files.json_reader import Object
from pods import records
from pods.calls import call
from pods.errors import PodError, usage_error
from pods.life import local_folder
from pods.settings import Settings
from pods.transports import Transport, expect_success
from settings.stored_config import SUMMARY

BACKUP = "/tmp/backup_models"
SOURCE = "backup.json"  # in the folder of a backup, so that no other run is mixed with it


class Source(Object):
    """What a backup is a copy of: the run's folder, its pod, and when that pod was created; "" for a bucket."""

    folder: str
    pod: str
    created: NotRequired[str]


def backup(settings: Settings, transport: Transport, rest: list[str]) -> None:
    """Copy the run to a folder, by default /tmp/backup_models; parts of its checkpoints on several hosts are joined."""
    if len(rest) > 1:
        raise usage_error(f"backup takes one folder of this machine, by default {BACKUP}")
    target = pathlib.Path(rest[0]) if rest else _default(settings)
    folder = _run_folder(settings)
    in_bucket = "://" in folder
    pod = {} if in_bucket else transport.describe() or {}
    source = {"folder": folder, "pod": "" if in_bucket else settings.name, "created": pod.get("createTime", "")}
    earlier = _created_before(target, source)
    source |= {"created": source["created"] or earlier}
    with _marked(settings, target, source), _without_summary(settings, target):
        if in_bucket or (folder.startswith("/") and settings.transport == "local"):
            _copy_from_storage(settings, folder, target)
        elif not folder.startswith("/") and (num_workers := pod.get("workers") or transport.num_workers) > 1:
            _join(settings, transport, num_workers, folder, target)
        else:
            _copy_from_host(settings, transport, folder, target)
    if not settings.dry_run:
        files = [file for file in target.rglob("*") if file.is_file() and file.name != SOURCE]
        print(f"{folder} is in {target}: {len(files)} files, {sum(f.stat().st_size for f in files) / 1e6:.1f} MB")


@contextlib.contextmanager
def _marked(settings: Settings, target: pathlib.Path, source: dict[str, str]) -> Iterator[None]:
    """After the block, record what the folder is a backup of, even if the copy was interrupted."""
    before, is_whole = _names(target), False
    try:
        yield
        is_whole = True
    finally:
        if not settings.dry_run and (is_whole or _names(target) != before):
            records.write_json(target / SOURCE, source)


@contextlib.contextmanager
def _without_summary(settings: Settings, target: pathlib.Path) -> Iterator[None]:
    """Remove the summary of an earlier backup: copying removes nothing, and the run may have continued since.

    If the copy is interrupted or fails, for example because the pod was deleted, the summary stays.
    """
    path = target / SUMMARY
    if settings.dry_run or not path.is_file():
        yield
        return
    earlier, is_copied = path.read_bytes(), False
    path.unlink()
    try:
        yield
        is_copied = True
    finally:
        if not is_copied and not path.exists():
            path.write_bytes(earlier)


def _names(folder: pathlib.Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _default(settings: Settings) -> pathlib.Path:
    """Return BACKUP, made for this user alone; a usage error if another user has made it, who could put links there."""
    target = pathlib.Path(BACKUP)
    if not settings.dry_run:
        with contextlib.suppress(FileExistsError):
            target.mkdir(mode=0o700)
        if target.is_symlink() or target.stat().st_uid != os.getuid():
            raise usage_error(f"{target} is not a folder of this user; name another one")
    return target


def _run_folder(settings: Settings) -> str:
    """Return the typed folder, else the launched run's, else the one that a run with these settings has."""
    is_typed = settings.given("workdir") or settings.given("ckpt_out") or not records.launched(settings)
    if is_typed:
        return settings.run_folder()
    launch = records.read(settings)
    return launch["workdir"] or launch.get("study") or settings.run_folder()


def _created_before(target: pathlib.Path, source: dict[str, str]) -> str:
    """Return when the pod of the backup in `target` was created, "" if unknown; PodError for another run's backup."""
    path = target / SOURCE  # a backup of an earlier version has none
    if not path.exists():
        return ""
    kept = {"created": ""} | records.read_kept(path, Source)
    is_later = kept["created"] and source["created"] and kept["created"] != source["created"]
    if is_later or any(kept[name] != source[name] for name in ("folder", "pod")):
        when = f", created {kept['created']}" if kept["created"] else ""
        of_pod = f" of {kept['pod']}{when}" if kept["pod"] else ""
        raise PodError(f"{target} is the backup of {kept['folder']}{of_pod}; name another folder")
    return kept["created"]


def _copy_from_storage(settings: Settings, folder: str, target: pathlib.Path) -> None:
    """Copy a folder that this machine reaches itself: in a bucket, or in a local pod."""
    in_bucket = "://" in folder
    if not (in_bucket or settings.dry_run or pathlib.Path(folder).is_dir()):
        raise usage_error(f"{folder} is not a folder; `launch` a run first, or name its folder with --workdir")
    words = ["gcloud", "storage", "rsync", "-r", folder] if in_bucket else ["cp", "-r", f"{folder}/."]
    expect_success([call(settings, [*words, local_folder(settings, str(target))], show=True)], f"back {folder} up")


def _copy_from_host(settings: Settings, transport: Transport, folder: str, target: pathlib.Path) -> None:
    """Copy a folder that one host has, or that all hosts share."""
    everything = "/." if settings.transport == "local" else "/*"  # cp and scp put a folder into an existing one
    inside = everything if target.is_dir() else ""
    local_folder(settings, str(target if target.is_dir() else target.parent))
    worker = str(settings.coordinator_worker)
    transport.copy(f"{_on_host(settings, folder)}{inside}", str(target), worker=worker)


def _on_host(settings: Settings, folder: str) -> str:
    path = folder if folder.startswith(("/", "~/")) else f"{settings.repo_dir}/{folder}"
    return f"{settings.name}:{path}"


def _join(settings: Settings, transport: Transport, num_workers: int, folder: str, target: pathlib.Path) -> None:
    """Copy the folder of every host, and join their parts in `target`; PodError if no checkpoint is complete."""
    if (chosen := settings.coordinator_worker) >= num_workers:
        raise usage_error(f"COORDINATOR_WORKER={chosen}: the workers are 0 to {num_workers - 1}")
    order = sorted(range(num_workers), key=lambda number: number != chosen)
    local_folder(settings, str(target))
    with tempfile.TemporaryDirectory(prefix=".parts-", dir=None if settings.dry_run else target) as scratch:
        parts = pathlib.Path(f"{target}/.parts" if settings.dry_run else scratch)
        folders = [parts / f"worker-{number}" for number in order]
        for number, copy in zip(order, folders, strict=True):
            transport.copy(_on_host(settings, folder), str(copy), worker=str(number))
        if settings.dry_run:
            return
        joined, left_out = host_parts.join(folders, target)
    for line in left_out:
        print(line)
    if left_out and not joined:
        raise PodError(f"no checkpoint of {folder} is complete on the {num_workers} hosts of {settings.name}")
    if joined:
        print(f"joined the parts of {num_workers} hosts: checkpoints {', '.join(map(str, joined))}")
