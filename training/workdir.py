# SPDX-License-Identifier: Apache-2.0
"""What a run's folder promises: one configuration from start to end, and whatever is needed to use the result."""

import contextlib
import fcntl
import json
import pathlib
import secrets

from configs import stored_config
from configs.base import shown
from configs.stored_config import MAY_CHANGE, OF_THE_HOST
from parallelism import processes
from training.checkpoints import CheckpointError, Checkpoints
from training.lease import LONGEST_NAME, read_name, this_run, trains
from training.record import RESUMED

MOST_NAMED = 8  # keys that differ


@contextlib.contextmanager
def exclusive(workdir: pathlib.Path, *, is_copy: bool = False):
    """Make the folder and hold it for this run until the end of the block; process 0 does so for all.

    Where it `is_copy`, of a bucket, each host has one of its own. Raises CheckpointError where it cannot be made or
    written, another run is in it (which one is told), or not all processes see the same folder.
    """
    try:
        processes.log_file(workdir).parent.mkdir(parents=True, exist_ok=True)
        lock = (workdir / "lock").open("a+") if processes.index() == 0 else contextlib.nullcontext()
    except OSError as error:
        raise CheckpointError(f"--workdir={workdir}: {error.strerror}; name a folder that can be written") from None
    with lock:
        if processes.index() == 0:
            _hold(lock, workdir)
        if not is_copy:
            _check_same_folder(workdir)
        yield


def _hold(lock, workdir: pathlib.Path) -> None:
    """Lock the open file, which the end of this process undoes whatever ends it, and leave our name in it.

    The name is for others to read; it binds nobody, and the file stays, since two could lock a file and its successor.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with (workdir / "lock").open("rb") as file:
            holder = read_name(file.read(LONGEST_NAME + 1))  # None: just being written, or no name of ours
        raise CheckpointError(f"{trains(holder, workdir)}. Use another --workdir, or stop that process.") from None
    lock.truncate(0)
    json.dump(this_run(), lock)
    lock.flush()


def _check_same_folder(workdir: pathlib.Path) -> None:
    """Raise CheckpointError where a process does not find what process 0 has just put there."""
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
            f"{processes.name(0)}; name one that all hosts share"
        )


def check_resumable(checkpoints: Checkpoints, config: dict, corpus_digest: str, workdir: pathlib.Path) -> dict | None:
    """Return the newest checkpoint's record, None in a fresh workdir; `config` is flat, by dotted key.

    Raises CheckpointError if resuming is off, or the run would not be the same run; names each key, old and new.
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
        raise CheckpointError(
            f"{workdir} has weights of its own to begin with; leave out train.init_from, or use a new --workdir"
        )
    fixed = record.get("weights_only", config)  # imported weights fix the keys that belong to them and no others
    changed = differences(record["config"], {key: config[key] for key in fixed}, _may_change(config))
    if record["corpus"] not in (None, corpus_digest):  # None: imported weights were trained on nothing here
        data = {key: value for key, value in config.items() if key.startswith("data.")}
        changed += differences(record["config"], data, OF_THE_HOST) or ["other documents"]
    if changed:
        what = "has imported weights" if "weights_only" in record else f"was trained to step {step}"
        more = f"; and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
        keys = "; ".join(changed[:MOST_NAMED])
        raise CheckpointError(f"{workdir} {what} with {keys}{more}. Restore it, or use a new --workdir.")
    return record


def differences(stored: dict, now: dict, may_change: tuple[str, ...]) -> list[str]:
    """Return "key=old, now new" for each flat configuration key that differs, prefixes in `may_change` aside."""
    return [
        f"{key}={shown(stored.get(key))}, now {shown(value)}"
        for key, value in now.items()
        if stored.get(key) != value and not key.startswith(may_change)
    ]


def _may_change(config: dict) -> tuple[str, ...]:
    """Return the keys that may change in this run.

    The batch of a recursive model may not, since its rows hold puzzles from step to step. The folder of the weights
    that adapters belong to may, since a checkpoint knows these weights by their digest.
    """
    held = ("train.global_batch",) if config["train.objective"] == "recursive" else ()
    moved = ("train.init_from",) if config["lora.rank"] else ()
    return (*moved, *(prefix for prefix in MAY_CHANGE if prefix not in held))


def open_workdir(workdir: pathlib.Path, config: dict, corpus, origin: dict | None = None) -> None:
    """Keep what the result is useless without: the resolved configuration and the tokenizer.

    The summary of a shorter run goes, so that it is never taken for the longer one's. `origin` goes into run.json.
    """
    (workdir / "summary.txt").unlink(missing_ok=True)
    files = {stored_config.CONFIG: config} | ({stored_config.ORIGIN: origin} if origin else {})
    for name, content in files.items():
        write_atomically(workdir / name, json.dumps(content, indent=1).encode())
    for name, content in (corpus.tokenizer.files if corpus and corpus.tokenizer else {}).items():
        write_atomically(workdir / name, content)


def show_summary(workdir: pathlib.Path) -> bool:
    """Print again what the end of the run printed; false where it never got there."""
    path = workdir / "summary.txt"
    summary = processes.shared("summary", lambda: path.read_text() if path.exists() else None)
    if summary is not None and processes.index() == 0:
        print(summary)
    return summary is not None


def write_summary(workdir: pathlib.Path, lines: list[str]) -> None:
    """Keep the lines that the end of the run prints."""
    write_atomically(workdir / "summary.txt", "\n".join(lines).encode())


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Write a file that is whole or absent."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)
