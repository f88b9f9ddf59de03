# SPDX-License-Identifier: Apache-2.0
"""A folder in a bucket is held by one run at a time."""

import json
import subprocess
import sys
import threading
import time

import pytest

from configs.base import ConfigError
from parallelism.hub import RunError
from tests.bucket_server import empty_bucket
from tests.support import ROOT
from training import lease
from training.lease import LEASE_SECONDS, Lease, clock, held

URL, PATH = "gs://runs/mine", "runs/mine/lock.json"
HOLDER = f"from training.lease import held\nwith held({URL!r}):\n    print('held', flush=True)\n    input()"


@pytest.fixture(scope="module")
def bucket():
    with empty_bucket() as files:
        yield files


@pytest.fixture
def written(bucket):
    """A function that leaves another machine's lease, renewed some seconds ago; nothing is left of it afterwards."""

    def write(age: float) -> dict:
        run = {"host": "elsewhere", "pid": 7, "since": clock(0), "renewed": time.time() - age}
        bucket.pipe(PATH, json.dumps(run).encode())
        return run

    yield write
    bucket.invalidate_cache()
    if bucket.exists(PATH):
        bucket.rm(PATH)


@pytest.fixture
def holder(written):
    """Another process that holds the lease."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def there(bucket) -> dict | None:
    bucket.invalidate_cache()
    return json.loads(bucket.cat(PATH)) if bucket.exists(PATH) else None


def test_a_second_run_is_told_who_is_there_and_gets_the_folder_when_that_one_ends(bucket, holder):
    with pytest.raises(RunError, match=rf"^--workdir={URL}: process {holder.pid} on .*, since 2.* taken over at 2"):
        Lease(URL).claim()
    holder.communicate("\n", timeout=60)
    assert there(bucket) is None
    with held(URL):
        assert there(bucket)["pid"] != holder.pid
    assert there(bucket) is None


def test_a_process_that_died_on_this_machine_is_not_waited_for(bucket, holder):
    holder.kill()
    holder.wait()
    assert there(bucket)["pid"] == holder.pid
    with held(URL):
        pass


def test_the_lease_of_another_machine_is_taken_over_when_it_was_not_renewed(written):
    run = written(age=20)
    with pytest.raises(RunError) as caught:
        Lease(URL).claim()
    assert "process 7 on elsewhere, since 1970-01-01 00:00:00+00:00, trains there" in str(caught.value)
    assert f"taken over at {clock(run['renewed'] + LEASE_SECONDS)}" in str(caught.value)
    written(age=LEASE_SECONDS + 1)
    with held(URL):
        pass


def test_of_two_that_take_over_at_once_one_does(written, monkeypatch):
    written(age=LEASE_SECONDS + 1)
    first, second = Lease(URL), Lease(URL)
    usual = second._read
    monkeypatch.setattr(second, "_read", lambda: (usual(), first.claim())[0])  # between reading and writing
    with pytest.raises(RunError, match="another run has begun there at this moment"):
        second.claim()
    first.release()


def test_who_holds_it_renews_it(bucket, written, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.05)
    with held(URL):
        first, until = there(bucket), time.monotonic() + LEASE_SECONDS / 3
        while there(bucket)["renewed"] == first["renewed"]:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert there(bucket)["since"] == first["since"]


def test_who_has_lost_it_is_told_in_the_thread_that_renews(written, monkeypatch):
    errors, told = [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda arguments: (errors.append(arguments.exc_value), told.set()))
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.05)
    with held(URL):
        written(age=0)
        assert told.wait(60)
    assert isinstance(errors[0], RunError) and "process 7 on elsewhere" in str(errors[0])


def test_a_renewal_whose_answer_was_lost_is_no_loss(written):
    mine = Lease(URL)
    mine.claim()
    same = Lease(URL)
    same.run, same.generation = mine.run, mine.generation
    same.renew()  # arrives, but `mine` does not hear of it
    mine.renew()
    mine.release()


def test_a_bucket_that_does_not_answer_is_asked_again(bucket, written, monkeypatch):
    mine = Lease(URL)
    mine.claim()
    before, connection = there(bucket), mine.blob.client._connection
    mine.patience = {"timeout": 0.1, "retry": None}
    with monkeypatch.context() as patch:
        patch.setattr(connection, "API_BASE_URL", "http://127.0.0.1:9")
        mine.renew()
    assert there(bucket) == before
    mine.renew()
    assert there(bucket)["renewed"] > before["renewed"]
    mine.release()


def test_a_bucket_that_is_not_there_is_one_line(bucket):
    with pytest.raises(ConfigError, match=r"^--workdir=gs://nothing/mine: there is no such bucket, or no leave"):
        Lease("gs://nothing/mine").claim()


def test_a_folder_of_this_machine_needs_no_lease():
    with held(None):
        pass
