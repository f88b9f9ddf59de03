# SPDX-License-Identifier: Apache-2.0
"""A run's folder in a bucket: what is small is kept on local disk and copied there, checkpoints go there directly."""

import dataclasses
import hashlib
import os
import pathlib
import tempfile

from configs.base import ConfigError

GROWING = ("metrics.jsonl", "ledger.jsonl")  # of which the longer one holds
COPIED = (  # back too, on a host that has them not
    *GROWING, "config.json", "run.json", "tokenizer.model", "tokenizer.json",
    "tokenizer_config.json", "chat_template.jinja", "summary.txt", "submission.json",
)  # fmt: skip
VOTES = "votes"  # a file a step; a step that is evaluated once more writes its file anew


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A folder of a bucket, `url`, and its local copy."""

    url: str
    folder: pathlib.Path

    def fetch(self) -> None:
        """Bring what another host left of the run; ConfigError where the bucket cannot be read."""
        self.folder.mkdir(parents=True, exist_ok=True)
        store = path_of(self.url)
        try:
            if not path_of("/".join(self.url.split("/")[:3])).exists():
                raise ConfigError(f"--workdir={self.url}: there is no such bucket, or no leave to see it")
            votes = [f"{VOTES}/{path.name}" for path in (store / VOTES).glob("*.gz")]
            for name in (*COPIED, *votes):
                there, here = store / name, self.folder / name
                longer = name in GROWING and here.exists() and here.stat().st_size >= there.stat().length
                if there.exists() and not longer:
                    here.parent.mkdir(exist_ok=True)
                    _write_atomically(here, there.read_bytes())
        except OSError as error:
            raise ConfigError(f"--workdir={self.url}: {error}") from None

    def send(self, log: pathlib.Path, *, first: bool) -> None:
        """Copy a process's log to the bucket, and of the first process what is small and its own."""
        events = [path for path in (self.folder / "tensorboard").rglob("*") if path.is_file()]
        own = [*(self.folder / name for name in COPIED), *events, *self._new_votes()] if first else []
        for path in [log, *own]:
            there = path_of(self.url) / path.relative_to(self.folder)
            if path.exists():
                there.write_bytes(path.read_bytes())
            else:
                there.unlink(missing_ok=True)  # such as the summary of a run that goes on

    def _new_votes(self) -> list[pathlib.Path]:
        """Return those that the bucket has not, or of another length."""
        there = path_of(self.url) / VOTES
        return [
            path
            for path in (self.folder / VOTES).glob("*.gz")
            if not (there / path.name).exists() or (there / path.name).stat().length != path.stat().st_size
        ]


def open_bucket(workdir: str, cache: pathlib.Path) -> Bucket | None:
    """Return the bucket that a --workdir names, None for a local folder; its copy is in the cache."""
    if not workdir.startswith("gs://"):
        return None
    url = workdir.rstrip("/")
    return Bucket(url, cache / "workdirs" / copy_name(url))


def copy_name(url: str) -> str:
    """Return a name for the local copy of a workdir, or of a part of it, that no other workdir has."""
    url = url.rstrip("/")
    return f"{url.rsplit('/', 1)[1]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


def _write_atomically(path: pathlib.Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def path_of(name: str):
    """Return the path of an address in a bucket, or of a local folder."""
    from etils import epath  # only where it is asked for: it takes a while to import

    return epath.Path(name)
