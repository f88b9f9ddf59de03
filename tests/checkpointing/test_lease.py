# SPDX-License-Identifier: Apache-2.0
"""A folder in a bucket is held by one run at a time."""

import datetime
import json
import subprocess
import sys
import threading
import time
import types

import pytest

from checkpointing import lease
from checkpointing.lease import LEASE_SECONDS, Lease, clock, held
from cluster.hub import RunError
from configs.errors import ConfigError
from tests.bucket_server import served_bucket
from tests.support import ROOT

URL, PATH = "gs://runs/mine", "runs/mine/lock.json"
# Another process that holds the lease until it is told to end, on a machine whose clock is wrong by some seconds.
HOLDER = f"""
import sys, time
right = time.time
time.time = lambda: right() + float(sys.argv[1])
from checkpointing.lease import held
with held({URL!r}):
    print("held", flush=True)
    input()
"""
YEAR = 365 * 86400.0


@pytest.fixture(scope="module")
def served():
    with served_bucket() as both:
        yield both


@pytest.fixture(scope="module")
def bucket(served):
    return served[0]


@pytest.fixture
def written(served):
    """A function that leaves a lease, of another machine, that was stored some seconds ago; gives when it falls.

    Nothing is left of it afterwards.
    """
    files, objects = served

    def write(age: float, content: bytes | None = None) -> float:
        run = {"host": "elsewhere", "pid": 7, "since": clock(0)}
        files.pipe(PATH, json.dumps(run).encode() if content is None else content)
        stored = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age)
        objects["mine/lock.json"]["timeCreated"] = stored.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return stored.timestamp() + LEASE_SECONDS

    yield write
    files.invalidate_cache()
    if files.exists(PATH):
        files.rm(PATH)


@pytest.fixture
def holder(written, request):
    """Another process that holds the lease; the parameter is by how much its clock is wrong."""
    command = [sys.executable, "-c", HOLDER, str(vars(request).get("param", 0))]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def stored(bucket) -> int:
    """The number of the content, which grows with each write."""
    bucket.invalidate_cache()
    return int(bucket.info(PATH)["generation"])


def there(bucket) -> dict | None:
    bucket.invalidate_cache()
    return json.loads(bucket.cat(PATH)) if bucket.exists(PATH) else None


def test_a_second_run_is_told_who_is_there_and_gets_the_folder_when_that_one_ends(bucket, holder):
    with pytest.raises(RunError, match=rf"^process {holder.pid} on .* in {URL} since 2.* taken over at 2"):
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


@pytest.mark.parametrize("holder", [-LEASE_SECONDS - 60, YEAR], indirect=True)
def test_a_clock_that_is_wrong_neither_loses_a_lease_nor_keeps_one(bucket, holder, served):
    """Nobody takes the lease over while its holder lives; after the holder's end it expires like any other."""
    run = there(bucket)
    with pytest.raises(RunError, match="has been training in gs:"):
        Lease(URL).claim()
    holder.kill()
    holder.wait()
    bucket.pipe(PATH, json.dumps(run | {"host": "elsewhere"}).encode())  # whether it lives is unknown here
    with pytest.raises(RunError, match="has been training in gs:"):
        Lease(URL).claim()
    served[1]["mine/lock.json"]["timeCreated"] = "2026-01-01T00:00:00.000000Z"
    with held(URL):
        pass


@pytest.mark.parametrize("wrong", [-YEAR, YEAR])
def test_the_clock_of_who_wants_a_lease_does_not_count(written, monkeypatch, wrong):
    monkeypatch.setattr(lease, "time", types.SimpleNamespace(time=lambda: time.time() + wrong))
    written(age=20)
    with pytest.raises(RunError, match="has been training in gs:"):
        Lease(URL).claim()
    written(age=LEASE_SECONDS + 1)
    with held(URL):
        pass


@pytest.mark.parametrize(
    "content", [b"", b"[" * 100_000, b'{"host": "x"}', b'{"host": 1, "pid": "2", "since": 3}', b"x" * 10**6]
)
def test_a_lease_that_nobody_can_read_binds_as_long_as_any(written, content):
    written(age=20, content=content)
    with pytest.raises(RunError, match="another process has been training in gs:"):
        Lease(URL).claim()
    written(age=LEASE_SECONDS + 1, content=content)
    with held(URL):
        pass


def test_the_lease_of_another_machine_is_taken_over_when_it_was_not_renewed(written):
    falls = written(age=20)
    with pytest.raises(RunError) as caught:
        Lease(URL).claim()
    assert "process 7 on elsewhere has been training in gs:" in str(caught.value)
    assert f"taken over at {clock(falls)} unless" in str(caught.value)
    written(age=LEASE_SECONDS + 1)
    with held(URL):
        pass


def test_of_two_that_take_over_at_once_one_does(written, monkeypatch):
    written(age=LEASE_SECONDS + 1)
    first, second = Lease(URL), Lease(URL)
    usual = second._read
    monkeypatch.setattr(second, "_read", lambda: (usual(), first.claim())[0])  # between reading and writing
    with pytest.raises(RunError, match="another run started there at the same moment"):
        second.claim()
    first.release()


def test_who_holds_it_renews_it(bucket, written, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.05)
    with held(URL):
        first, generation, until = there(bucket), stored(bucket), time.monotonic() + LEASE_SECONDS / 3
        while stored(bucket) == generation:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert there(bucket) == first


def test_who_has_lost_it_is_told_in_the_thread_that_renews(bucket, written, monkeypatch):
    errors, told = [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda arguments: (errors.append(arguments.exc_value), told.set()))
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.05)
    with held(URL):
        written(age=0)
        assert told.wait(60)
    assert isinstance(errors[0], RunError) and "process 7 on elsewhere" in str(errors[0])
    assert there(bucket)["host"] == "elsewhere"  # the loser's end leaves the winner's lease


def test_a_lease_that_somebody_deleted_is_not_said_to_be_another_runs(bucket, written):
    mine = Lease(URL)
    mine.claim()
    bucket.rm(PATH)
    with pytest.raises(RunError, match=r"somebody has deleted lock.json, this run's lease; start the run again"):
        mine.renew()
    mine.release()


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
    before, connection = stored(bucket), mine.blob.client._connection
    mine.patience = {"timeout": 0.1, "retry": None}
    with monkeypatch.context() as patch:
        patch.setattr(connection, "API_BASE_URL", "http://127.0.0.1:9")
        mine.renew()
    assert stored(bucket) == before
    mine.renew()
    assert stored(bucket) > before
    mine.release()


def test_a_bucket_that_is_not_there_is_one_line(bucket):
    with pytest.raises(ConfigError, match=r"^--workdir=gs://nothing/mine: the bucket does not exist, or you have no"):
        Lease("gs://nothing/mine").claim()


def test_a_folder_of_this_machine_needs_no_lease():
    with held(None):
        pass
