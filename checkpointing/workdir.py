# SPDX-License-Identifier: Apache-2.0
"""The workdir of a run: its lock, one configuration from start to end, and the files that are needed to use the result.

The record of the newest checkpoint decides whether a run can be resumed there.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import re
import secrets
import time
from collections.abc import Callable

from checkpointing.checkpoints import CheckpointError, Checkpoints
from checkpointing.lease import LONGEST_NAME, read_name, this_run, trains
from checkpointing.record import RESUMED
from cluster import processes
from configs.base import KEYS, keys_of
from configs.errors import shown
from configs.key import MACHINE, RESUME
from files.atomic import write_atomically
from files.paths import expanded
from reporting.display import listed
from settings import stored_config, together

MOST_NAMED = 8  # changed keys that an error names
LOCK_PAUSES = (0.0, 0.02, 0.05, 0.1, 0.2)  # seconds before each attempt to lock


@contextlib.contextmanager
def exclusive(workdir: pathlib.Path, *, is_copy: bool = False, per_host: bool = False):
    """Create the folder and lock it for this run during the block; process 0 locks it for all.

    With `is_copy`, each host has a folder of its own: the local copy of a bucket, or that of a run without shared
    storage. With `per_host`, each process has one, and locks it. Raises CheckpointError if the folder cannot be created
    or written, if another run holds it (the message names that run), or if the processes share it and should not, or
    the reverse.
    """
    is_holder = processes.index() == 0 or per_host
    try:
        processes.log_file(workdir).parent.mkdir(parents=True, exist_ok=True)
        if per_host:
            _check_own_folder(workdir)
        lock = (workdir / "lock").open("a+") if is_holder else contextlib.nullcontext()
    except OSError as error:
        raise CheckpointError(f"--workdir={workdir}: {error.strerror}; name a folder that can be written") from None
    with lock:
        if is_holder:
            _hold(lock, workdir)
        if not (is_copy or per_host):
            _check_same_folder(workdir)
        yield


def local_folder(workdir: str | os.PathLike) -> pathlib.Path:
    """Return the folder of a run that a caller of `train` names; CheckpointError for the URL of a bucket."""
    if re.match(r"[A-Za-z][\w+.-]*://|(gs|s3|az|https?):/", str(workdir)):  # a Path has lost a slash
        raise CheckpointError(
            f"workdir={workdir} is not a local folder; for a run in a bucket give `bucket`, the result of "
            "checkpointing.bucket.open_bucket, and its folder as `workdir`"
        )
    return expanded(workdir)


def check_writable(config, workdir: pathlib.Path) -> None:
    """Raise CheckpointError if a folder of the run surely cannot be written, before documents are read."""
    staging = expanded(config.checkpoint.staging or workdir)
    for key, folder in (("--workdir", workdir), ("checkpoint.staging", staging)):
        places = (folder.absolute(), *folder.absolute().parents)
        there = next(place for place in places if os.path.exists(place))  # also if its folder cannot be searched
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            what = "cannot be written" if there.is_dir() else "is a file"
            raise CheckpointError(f"{key}={folder}: {there} {what}; name a folder that can be written")


def _hold(lock, workdir: pathlib.Path) -> None:
    """Lock the open file and write this run's name into it; the kernel releases the lock when this process ends.

    The name is only information for other runs. The file is never deleted: otherwise one run could lock the old file,
    and another its successor.
    """
    if not _locked(lock):
        with (workdir / "lock").open("rb") as file:
            holder = read_name(file.read(LONGEST_NAME + 1))  # None: being written, or not valid
        raise CheckpointError(f"{trains(holder, workdir)}. Use another --workdir, or stop that process.")
    lock.truncate(0)
    json.dump(this_run(), lock)
    lock.flush()


def _locked(lock) -> bool:
    """Lock the open file; return whether this succeeded. A process that calls `is_held` holds the lock for a moment."""
    for pause in LOCK_PAUSES:
        time.sleep(pause)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False


def _check_same_folder(workdir: pathlib.Path) -> None:
    """Raise CheckpointError if a process does not find the file that process 0 has just created."""
    if processes.count() == 1:
        return

    def put() -> str:
        mark = workdir / f"mark-{secrets.token_hex(4)}"
        mark.touch()
        return mark.name

    mark = workdir / processes.shared("mark", put)
    found = processes.gather("found the mark", mark.exists())
    if processes.index() == 0:
        mark.unlink()
    if not all(found):
        raise CheckpointError(
            f"--workdir={workdir} is another folder on {processes.name(found.index(False))} than on "
            f"{processes.name(0)}; name one that all hosts share, or add --config.checkpoint.per_host=true, by which "
            "each host keeps its part of the checkpoints"
        )


def _check_own_folder(workdir: pathlib.Path) -> None:
    """Raise CheckpointError if a process finds the file that another one has created."""
    token = processes.shared("mark", lambda: secrets.token_hex(4))
    mark = workdir / f"mark-{token}-{processes.index()}"
    mark.touch()
    processes.gather("marked", True)
    others = [name for name in workdir.glob(f"mark-{token}-*") if name != mark]
    shared = any(processes.gather("found another's mark", bool(others)))
    mark.unlink()
    if shared:
        raise CheckpointError(
            f"checkpoint.per_host=true, but several processes share --workdir={workdir}; leave it out, or give each "
            "process a folder of its own"
        )


def keeps_files(config) -> bool:
    """Return whether this process writes the files of its workdir: process 0, or every one with its own folder."""
    return processes.index() == 0 or config.checkpoint.per_host


def check_resumable(
    checkpoints: Checkpoints, config: dict, corpus_digest: str, workdir: pathlib.Path,
    may_change: Callable[[int], frozenset[str]] = lambda step: keys_of(RESUME),
) -> dict | None:  # fmt: skip
    """Return the newest checkpoint's record, or None in a fresh workdir; `config` is flat, with dotted keys.

    Raises CheckpointError if checkpoint.resume is false, or if keys have changed that are not in `may_change` of its
    step; the message names each key with its old and new value.
    """
    step = checkpoints.newest()
    if step is None:
        return None
    if not config["checkpoint.resume"]:
        raise CheckpointError(
            f"{workdir} has a checkpoint at step {step} and checkpoint.resume=false; use a new --workdir"
        )
    record = checkpoints.record(step)
    if lacking := [key for key in RESUMED if key not in record]:
        raise CheckpointError(
            f"{workdir} cannot be continued: record.json of checkpoint {step} lacks {lacking[0]}; bring it back from a "
            "copy, or use a new --workdir"
        )
    if "weights_only" in record and config["train.init_from"]:
        raise CheckpointError(f"{workdir} already has weights; leave out train.init_from, or use a new --workdir")
    fixed = record.get("weights_only", config)  # imported weights fix only the keys that belong to them
    changed = differences(record["config"], {key: config[key] for key in fixed if key in config}, may_change(step))
    if record["corpus"] not in (None, corpus_digest):  # None: imported weights have no corpus here
        data = {key: value for key, value in config.items() if key.startswith("data.")}
        changed += differences(record["config"], data, keys_of(MACHINE)) or ["other documents"]
    if changed:
        what = "has imported weights" if "weights_only" in record else f"was trained to step {step}"
        keys = listed(changed, MOST_NAMED, "; ")
        raise CheckpointError(f"{workdir} {what} with {keys}. Use the same again, or a new --workdir.")
    return record


def differences(stored: dict, now: dict, may_change: frozenset[str]) -> list[str]:
    """Return "key=old, now new" for each flat configuration key that differs, except keys in `may_change`.

    A key that is newer than the stored configuration had its default, which changes nothing.
    """
    old = together.without_unread({key: declared.default for key, declared in KEYS.items()} | stored)
    return [
        f"{key}={shown(old.get(key)) or repr('')}, now {shown(value) or repr('')}"
        for key, value in now.items()
        if old.get(key) != value and key not in may_change
    ]


def open_workdir(workdir: pathlib.Path, config: dict, corpus, origin: dict | None = None) -> None:
    """Write the files that a use of the result needs: the resolved configuration and the tokenizer.

    Also write `origin` to run.json. The summary of an earlier, shorter run is removed, and so are files of another
    tokenizer, which an earlier attempt left: nobody shall take them for those of this run.
    """
    (workdir / stored_config.SUMMARY).unlink(missing_ok=True)
    files = {stored_config.CONFIG: config} | ({stored_config.ORIGIN: origin} if origin else {})
    for name, content in files.items():
        write_atomically(workdir / name, json.dumps(content, indent=1).encode())
    if corpus and corpus.tokenizer:
        for name in stored_config.OF_TOKENIZER - corpus.tokenizer.files.keys():
            (workdir / name).unlink(missing_ok=True)
        for name, content in corpus.tokenizer.files.items():
            write_atomically(workdir / name, content)


def show_summary(workdir: pathlib.Path) -> bool:
    """Print the summary of a finished run again; return false if the run has not finished."""
    path = workdir / stored_config.SUMMARY
    summary = processes.shared("summary", lambda: path.read_text() if path.exists() else None)
    if summary is not None and processes.index() == 0:
        print(summary)
    return summary is not None


def write_summary(workdir: pathlib.Path, lines: list[str]) -> None:
    write_atomically(workdir / stored_config.SUMMARY, "\n".join(lines).encode())
