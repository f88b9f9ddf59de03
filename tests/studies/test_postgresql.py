# SPDX-License-Identifier: Apache-2.0
"""Claims and trials in a real PostgreSQL server, which the test starts."""

import os
import pathlib
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading

import pytest

from studies import suites
from tests.studies.conftest import needs_optuna
from tests.support import free_port

pytestmark = needs_optuna


def program(name: str) -> str:
    """Return the path of a program of PostgreSQL; skip the test if it is not installed."""
    found = [*map(str, pathlib.Path("/usr/lib/postgresql").glob(f"*/bin/{name}")), shutil.which(name)]
    return next(filter(None, found), None) or pytest.skip("PostgreSQL is not installed; Debian: postgresql")


@pytest.fixture
def url() -> str:
    """The address of a database on a new server, which refuses to run as root; so root becomes the user nobody."""
    initdb, port, as_user = program("initdb"), free_port(), {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # tmp_path is closed to nobody
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
            as_user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "cwd": "/"}
        data = f"{folder}/data"
        subprocess.run(
            [initdb, "-D", data, "-U", "torus", "-A", "trust", "--no-sync"], check=True, stdout=subprocess.DEVNULL,
            **as_user,
        )  # fmt: skip
        server = [program("postgres"), "-D", data, "-p", str(port), "-k", data, "-h", "127.0.0.1", "-F"]
        log = pathlib.Path(folder, "log")
        with log.open("w") as output, subprocess.Popen(server, stdout=output, stderr=output, **as_user) as process:
            try:
                while "ready to accept connections" not in log.read_text():
                    assert process.poll() is None, log.read_text()
                yield f"postgresql://torus@127.0.0.1:{port}/postgres"
            finally:
                process.send_signal(signal.SIGINT)  # a fast shutdown, which does not wait for clients


def test_workers_of_one_server_claim_each_trial_once(url, tmp_path):
    from studies.storage import open_storage
    from studies.trials import Queue, order_of

    study, names = suites.find("trm-mini")
    owners = suites.owners(suites.members(study, names))
    queues = [Queue(open_storage(url, create=True), "trm-mini", "maximize", create=True) for _ in range(4)]
    assert queues[0].enqueue([order_of(m, str(tmp_path), "") for m in owners.values()]) == 15
    held = []

    def work(number: int) -> None:
        queue = queues[number]
        queue.claims.worker = f"machine{number} 1 1"
        while trial := queue.claim_next(set(owners)):
            held.append(trial.number)
            queue.finish(trial, trial.number / 10, {"reason": "finished"}, {10: 0.5})
        queue.storage.remove_session()

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(held) == list(range(15)), "each trial was held once"
    assert {t.state.name for t in queues[0].latest().values()} == {"COMPLETE"} and not queues[0].claims.holders()
    for queue in queues:
        queue.storage.remove_session()
        queue.storage.engine.dispose()
