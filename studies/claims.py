# SPDX-License-Identifier: Apache-2.0
"""Claims: rows of a table in the studies' database, by which each trial has at most one worker.

Optuna's own queue cannot serve: on SQLite two processes may pop one trial, and its heartbeats mark a trial as failed if
it only takes long to compile. Here a claim is a row with a primary key, so that the database accepts one of two. A
worker counts `beat` up, from a random number, so that no two holdings look the same. Another worker takes a claim over
if its holder was a process of this machine that has ended, or if the count has stood still for STALE_SECONDS on the
observer's own clock. The clocks of two machines are never compared.
"""

import contextlib
import os
import pathlib
import secrets
import socket
import threading
import time
from typing import NamedTuple

import sqlalchemy
from sqlalchemy import exc

from studies.storage import made

BEAT_SECONDS = 5.0
STALE_SECONDS = 120.0  # more than storage.WAIT_SECONDS, during which a living worker may not reach the database
TABLE = sqlalchemy.Table(
    "torus_claims", sqlalchemy.MetaData(),
    sqlalchemy.Column("name", sqlalchemy.String(300), primary_key=True),
    sqlalchemy.Column("worker", sqlalchemy.String(300), nullable=False),
    sqlalchemy.Column("beat", sqlalchemy.Integer, nullable=False),
)  # fmt: skip


class Holder(NamedTuple):
    """A row: who holds a claim, and its count."""

    worker: str
    beat: int


class Claims:
    """The claims in a database, as one worker sees them; `worker` names its process, unique over machines and time."""

    def __init__(self, engine: sqlalchemy.Engine):
        self.engine, self.worker = engine, this_process()
        self._seen: dict[str, tuple[Holder, float]] = {}  # claims of others: the row, and when it last changed
        made(lambda: TABLE.create(engine, checkfirst=True))

    def take(self, name: str) -> bool:
        """Return whether this worker holds a claim now; it takes a free one, and one whose holder is gone."""
        try:
            with self.engine.begin() as connection:
                connection.execute(TABLE.insert().values(name=name, worker=self.worker, beat=secrets.randbits(30)))
            return True
        except exc.IntegrityError:
            holder = self.holders().get(name)
        if holder is None or not self.is_gone(name, holder):
            return False
        same = (TABLE.c.name == name) & (TABLE.c.worker == holder.worker) & (TABLE.c.beat == holder.beat)
        return self._changes(TABLE.update().where(same).values(worker=self.worker, beat=secrets.randbits(30)))

    def keep(self, name: str) -> bool:
        """Count up; return whether the claim is still this worker's."""
        return self._changes(TABLE.update().where(self._own(name)).values(beat=TABLE.c.beat + 1))

    @contextlib.contextmanager
    def kept(self, name: str):
        """Count a claim up in a thread, so that no other worker takes it over during long work of this one.

        The block gets an event, which is set once another worker has taken it over.
        """
        done, lost = threading.Event(), threading.Event()

        def count() -> None:
            while not done.wait(BEAT_SECONDS):
                with contextlib.suppress(exc.SQLAlchemyError):  # the next count may reach the database again
                    if not self.keep(name):
                        lost.set()

        thread = threading.Thread(target=count, daemon=True)
        thread.start()
        try:
            yield lost
        finally:
            done.set()
            thread.join()

    def drop(self, name: str) -> None:
        """Give a claim back, if it is this worker's."""
        self._changes(TABLE.delete().where(self._own(name)))

    def holders(self) -> dict[str, Holder]:
        """Return the row of each claim by its name."""
        with self.engine.connect() as connection:
            return {row.name: Holder(row.worker, row.beat) for row in connection.execute(sqlalchemy.select(TABLE))}

    def is_gone(self, name: str, holder: Holder) -> bool:
        """Return whether the holder of a claim has ended, or has not counted for STALE_SECONDS of this clock."""
        if has_ended(holder.worker):
            return True
        seen, since = self._seen.get(name, (None, 0.0))
        if seen != holder:
            self._seen[name] = (holder, time.monotonic())
            return False
        return time.monotonic() - since > STALE_SECONDS

    def _own(self, name: str):
        return (TABLE.c.name == name) & (TABLE.c.worker == self.worker)

    def _changes(self, statement) -> bool:
        with self.engine.begin() as connection:
            return connection.execute(statement).rowcount == 1


def this_process() -> str:
    """Return the name of this process: its machine, its id and its start, separated by spaces."""
    return f"{_machine()} {os.getpid()} {_start(os.getpid())}"


def has_ended(worker: str) -> bool:
    """Return whether a process of this machine has ended; False for processes of others, which cannot be asked."""
    machine, pid, start = worker.rsplit(" ", 2)
    return machine == _machine() and start != "" and _start(int(pid)) != start


def _machine() -> str:
    """Return a name of the host, of its boot and of the process ids that this process sees."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return f"{socket.gethostname()} ? ?"


def _start(pid: int) -> str:
    """Return when a process began, in ticks since the boot; "" if it has ended or cannot be seen."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
