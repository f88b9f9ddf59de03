# SPDX-License-Identifier: Apache-2.0
"""A run whose folder is in a bucket, against gcp-storage-emulator: a server with the API of Google's storage."""

import fcntl
import functools
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from http import HTTPStatus

import fsspec
import pytest
from gcp_storage_emulator import server
from gcp_storage_emulator.handlers import buckets
from gcsfs.retry import HttpError
from google.auth.exceptions import DefaultCredentialsError, TransportError

import train
from checkpointing.bucket import Bucket, open_bucket, syncing
from checkpointing.shared_folder import SharedFolder
from cluster.hub import RunError
from cluster.interruption import Interrupted
from configs.errors import ConfigError
from core.callbacks import Callback
from tests.bucket_server import empty_bucket
from tests.support import ROOT
from tests.test_train import RISING, arguments, command, finish, in_process, own_batches


@pytest.fixture(scope="module")
def bucket():
    with empty_bucket() as files:
        yield files


@pytest.mark.slow
def test_a_run_in_a_bucket_goes_on_on_another_host_and_is_sampled_from(bucket, tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    for index in range(20):
        (tmp_path / "texts" / f"{index}.txt").write_text(f"{index} and {index + 1} and so on; " * 60)
    changes = RISING | {
        "train__eval_every": 0, "train__save_every": 0, "checkpoint__keep": 1, "checkpoint__keep_best": 0,
        "evaluation__sample_tokens": 0, "optimizer__name": "sgd",  # one moment a weight to save, not two
        "optimizer__schedule": "constant",  # else the number of steps is in the compiled program
    }  # fmt: skip
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("JAX_DEBUG_LOG_MODULES", "jax._src.lru_cache")
    for host, steps in (("one", 2), ("another", 3)):
        given = arguments(tmp_path, "unused", train__steps=steps, **changes)[1:]
        process = command("train.py", "--workdir=gs://runs/mine", *given, cache=tmp_path / host, ordinary=True)
        status, out, err = finish(process)
        is_reused = "Cache hit for key: 'jit_train_step" in err
        assert is_reused == (host == "another"), "the compiled step comes from the bucket"
        assert status == 0 and "checkpoint: gs://runs/mine/checkpoints/" in out, err
        bucket.pipe("runs/mine/votes/2.gz", b"what step 2 was for")
    assert [path.read_bytes() for path in (tmp_path / "another").rglob("votes/2.gz")] == [b"what step 2 was for"]
    lines = [json.loads(line) for line in bucket.cat("runs/mine/metrics.jsonl").splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3]
    stored = {name.rpartition("/")[2] for name in bucket.ls("runs/mine")}
    assert {"config.json", "summary.txt", "checkpoints", "logs", "tensorboard", "report.html"} <= stored
    assert [name.rpartition("/")[2] for name in bucket.ls("runs/mine/checkpoints")] == ["3"]
    prompt = ["--workdir=gs://runs/mine", "--prompt=1 and ", "--max_tokens=4"]
    status, out, err = finish(command("generate.py", *prompt, cache=tmp_path / "third"))
    assert status == 0 and out.startswith("1 and "), err
    copy = tmp_path / "third" / "torus" / "workdirs"
    assert list(copy.rglob("config.json")) and not list(copy.rglob("*-cache")), "a reader runs no programs of a bucket"
    assert not os.path.exists("gs:")
    page = tmp_path / "page.html"
    status, _, err = finish(command("report.py", "gs://runs/mine", f"--html={page}", cache=tmp_path / "fourth"))
    assert status == 0 and "<h1>Run mine</h1>" in page.read_text(), err


def test_a_bucket_is_read_without_tensorflow_also_where_no_command_chose_its_libraries(bucket):
    """As in a worker of a study, and in a Python program."""
    bucket.pipe("runs/plain/a", b"content")
    program = (
        "import sys; from checkpointing.bucket import path_of; path_of('/').exists(); "
        "print(path_of('gs://runs/plain/a').read_text(), 'tensorflow' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "EPATH_USE_TF"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "content False\n", done.stderr


@pytest.mark.slow
def test_steps_are_trained_while_a_checkpoint_is_copied_to_the_bucket(bucket, single_device, tmp_path, monkeypatch):
    """Step 6 waits until the copy of step 4 begins, and the copy waits for step 7, so they must run together."""
    begun, reached, during = threading.Event(), threading.Event(), []
    copy_files = SharedFolder.join

    class Watch(Callback):
        def on_step(self, job, state, step):
            if step == 6:
                during.append(("begun", begun.wait(30)))
            if step == 7:
                reached.set()

    def slow_copy(store, step, parts):
        begun.set()
        during.append((step, reached.wait(30)))
        copy_files(store, step, parts)

    monkeypatch.setattr(SharedFolder, "join", slow_copy)
    config = in_process(train__steps=8, train__save_every=4, train__eval_every=0)
    place = Bucket("gs://runs/beside", tmp_path)
    train.train(config, place.folder, own_batches(config, 8), bucket=place, callbacks=[Watch()])
    assert during == [("begun", True), (4, True), (8, True)]
    assert {name.rpartition("/")[2] for name in bucket.ls("runs/beside/checkpoints")} == {"4", "8"}


def test_files_of_steps_go_to_the_bucket_and_come_back_on_another_host(tmp_path):
    name = "votes/5.gz"
    (tmp_path / "bucket" / "run" / name).parent.mkdir(parents=True)
    here, there = (Bucket(f"{tmp_path}/bucket/run", tmp_path / host) for host in ("here", "there"))
    (here.folder / name).parent.mkdir(parents=True)
    (here.folder / name).write_bytes(b"five")
    here.send(here.folder / "log", first=True)
    there.fetch()
    assert (there.folder / name).read_bytes() == b"five"


def test_what_was_lost_here_stays_in_the_bucket_except_the_summary_of_a_run_that_goes_on(tmp_path):
    there, bucket = tmp_path / "bucket" / "run", Bucket(f"{tmp_path}/bucket/run", tmp_path / "here")
    there.mkdir(parents=True)
    for name in ("run.json", "ledger.jsonl", "summary.txt"):
        (there / name).write_text("{}")
    bucket.send(bucket.folder / "log", first=True)
    assert {path.name for path in there.iterdir()} == {"run.json", "ledger.jsonl"}


def test_the_last_lines_that_were_not_sent_stay_unless_another_host_has_gone_on(bucket, tmp_path):
    """A run may also die before anything of these files was sent, but its configuration, which is sent first."""
    bucket.pipe("runs/two_hosts/config.json", b"{}")
    one, other = (Bucket("gs://runs/two_hosts", tmp_path / host) for host in ("one", "other"))
    (one.folder).mkdir()
    lines = one.folder / "metrics.jsonl"
    lines.write_text("1\n2\n")
    one.fetch()
    assert lines.read_text() == "1\n2\n", "the bucket has none"
    one.send(one.folder / "log", first=True)
    lines.write_text("1\n2\n3\n4\n5\n")
    one.fetch()
    assert lines.read_text() == "1\n2\n3\n4\n5\n"
    other.fetch()
    (other.folder / "metrics.jsonl").write_text("1\n2\n6\n")
    other.send(other.folder / "log", first=True)
    one.fetch()
    assert lines.read_text() == "1\n2\n6\n", "the other host's lines count, though there are fewer"


def joining(monkeypatch, join) -> None:
    """Let `join` take the requests that join objects; its argument sends one."""
    store = type(fsspec.filesystem("gs"))
    call = store.call

    def answer(*request, **body):
        send = functools.partial(call, *request, **body)
        return join(send) if request[2].endswith("/compose") else send()

    monkeypatch.setattr(store, "call", answer)


def test_of_a_file_that_grows_only_the_end_is_sent_once_and_in_pieces(bucket, tmp_path, monkeypatch):
    """Each request is repeated, as by gcsfs when an answer is lost.

    The first bytes of the bucket's copy differ from the file's here, and stay, since they are not sent again.
    """
    monkeypatch.setattr("checkpointing.bucket.COMPARED_BYTES", 4)
    monkeypatch.setattr("checkpointing.bucket.PIECE_BYTES", 5)
    joining(monkeypatch, lambda send: (send(), send()))
    place = Bucket("gs://runs/growing", tmp_path / "here")
    place.folder.mkdir()
    rollouts = place.folder / "rollouts.jsonl"
    for content, held in (
        ("first line\n", "first line\n"), ("first line\nsecond\n", "FIRST line\nsecond\n"),
        ("other\n", "other\n"), ("", ""),
    ):  # fmt: skip
        rollouts.write_text(content)
        place.send(place.folder / "log", first=True)
        assert bucket.cat("runs/growing/rollouts.jsonl").decode() == held
        bucket.pipe("runs/growing/rollouts.jsonl", held.replace("first", "FIRST").encode())
    assert bucket.find("runs/growing") == ["runs/growing/rollouts.jsonl"], "nothing else is left"


@pytest.mark.parametrize("refusal", [HttpError({"code": 400, "message": "two classes"}), ValueError("Bad Request")])
def test_a_growing_file_is_sent_whole_where_a_bucket_refuses_to_join_objects(bucket, tmp_path, monkeypatch, refusal):
    def refuse(send):
        raise refusal

    joining(monkeypatch, refuse)
    place = Bucket("gs://runs/refused", tmp_path / "here")
    place.folder.mkdir()
    for content in (b"1\n", b"1\n2\n"):
        (place.folder / "metrics.jsonl").write_bytes(content)
        place.send(place.folder / "log", first=True)
        assert bucket.cat("runs/refused/metrics.jsonl") == content
    assert bucket.find("runs/refused") == ["runs/refused/metrics.jsonl"], "nothing else is left"


def test_two_threads_that_send_at_once_send_each_line_once(bucket, tmp_path):
    """The thread of a save, and the main thread of a run that ends at an error."""
    place = Bucket("gs://runs/at_once", tmp_path / "here")
    place.folder.mkdir()
    send = syncing(place, place.folder / "log", first=True)
    for number in range(1, 6):
        with (place.folder / "metrics.jsonl").open("a") as file:
            file.write(f"{number}\n")
        threads = [threading.Thread(target=send) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert bucket.cat("runs/at_once/metrics.jsonl") == b"1\n2\n3\n4\n5\n"


def test_a_reader_keeps_what_the_run_has_written_here_since_it_sent_it(tmp_path):
    place = tmp_path / "bucket" / "run"
    place.mkdir(parents=True)
    (place / "config.json").touch()
    (place / "profile.json").write_text("sent")
    bucket = Bucket(f"{tmp_path}/bucket/run", tmp_path / "here")
    bucket.fetch()
    (place / "profile.json").write_text("another host's")
    os.utime(place / "profile.json", (time.time() + 2,) * 2)
    bucket.fetch(keep_newer=True)
    assert (bucket.folder / "profile.json").read_text() == "another host's", "what was only fetched is not newer"
    os.utime(place / "profile.json", (1, 1))
    (bucket.folder / "profile.json").write_text("newer")
    bucket.fetch(keep_newer=True)
    assert (bucket.folder / "profile.json").read_text() == "newer"
    bucket.fetch()
    assert (bucket.folder / "profile.json").read_text() == "another host's", "a run that goes on takes the bucket's"


def test_what_the_run_in_a_bucket_has_not_is_not_taken_for_its_own(tmp_path):
    """Another run may be there by now, or the same one goes on elsewhere."""
    place, bucket = tmp_path / "bucket" / "run", Bucket(f"{tmp_path}/bucket/run", tmp_path / "here")
    bucket.folder.mkdir()

    def fetched(files: set[str], **how) -> set[str]:
        for name in ("tokenizer.json", "summary.txt", "metrics.jsonl", "causes.html", "workers/0.json", "votes/3.gz"):
            (bucket.folder / name).parent.mkdir(exist_ok=True)
            (bucket.folder / name).touch()
        place.mkdir(parents=True, exist_ok=True)
        for name in files:
            (place / name).touch()
        bucket.fetch(**how)
        return {path.name for path in bucket.folder.rglob("*") if path.is_file()}

    everything = {"lock", "tokenizer.json", "summary.txt", "metrics.jsonl", "causes.html", "0.json", "3.gz"}
    with (bucket.folder / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert fetched(set()) == everything, "the run goes on here, and may not have sent them yet"
        assert fetched(set(), is_ours=True) == {"lock"}
    assert fetched(set(), keep_newer=True) == everything, "for a reader, these may be the last copy"
    assert fetched(set()) == {"lock"}
    assert fetched({"config.json", "tokenizer.model"}) == {
        "lock", "config.json", "tokenizer.model", "metrics.jsonl", "causes.html", "0.json", "3.gz",
    }, "what was not sent yet stays"  # fmt: skip
    (place / "votes").mkdir()
    (bucket.folder / "chat_template.jinja").touch()
    bucket.send(bucket.folder / "log", first=True)
    assert (place / "chat_template.jinja").exists()
    (bucket.folder / "chat_template.jinja").unlink()  # the next attempt's tokenizer has none
    bucket.send(bucket.folder / "log", first=True)
    assert not (place / "chat_template.jinja").exists() and (place / "config.json").exists()


@pytest.mark.parametrize("keep_newer", [True, False])
def test_files_of_another_run_with_the_same_address_are_replaced(tmp_path, keep_newer):
    """A report would show them, and a run that goes on here would send them to the bucket."""
    place, copy = tmp_path / "bucket" / "run", tmp_path / "here"
    place.mkdir(parents=True)
    copy.mkdir()
    files = ("config.json", "metrics.jsonl", "rollouts.jsonl", "profile.json", "report.html")
    for folder, names, time_of_start in ((place, files[:2], 2), (copy, files, 1)):
        for name in names:
            (folder / name).write_text(f'{{"kind": "event", "event": "start", "time": {time_of_start}}}\n')
    bucket = Bucket(str(place), copy)
    bucket.fetch(keep_newer=keep_newer)
    assert {path.name: path.read_text() for path in copy.iterdir()} == {
        name: (place / name).read_text() for name in files[:2]
    }
    with (copy / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    (copy / "profile.json").touch()
    bucket.fetch(keep_newer=keep_newer)
    assert (copy / "profile.json").exists() and (copy / "metrics.jsonl").read_text().endswith("{}\n"), "not sent yet"


def test_the_log_of_the_host_before_stays_in_the_bucket(tmp_path):
    place, copy = tmp_path / "bucket" / "run", tmp_path / "here"
    (place / "logs").mkdir(parents=True)
    (copy / "logs").mkdir(parents=True)
    (place / "logs" / "train_worker_1.out").write_text("of the first host\n")
    log = copy / "logs" / "train_worker_1.out"
    with log.open("a") as file:
        file.write("of this start\n")
        file.flush()
        syncing(Bucket(str(place), copy), log, first=False)
        file.write("and more\n")
    assert log.read_text() == "of the first host\nof this start\nand more\n"


def test_the_local_copy_of_a_run_has_the_name_of_the_run_and_of_the_folder_above():
    copy = open_bucket("gs://b/runs/group/mine/", pathlib.Path("cache")).folder
    assert open_bucket("gs://b/../..", pathlib.Path("cache")).folder.parts[-2:] == ("_", "_")
    assert copy.parts[-2:] == ("group", "mine") and copy != open_bucket("gs://c/runs/group/mine", copy).folder


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TransportError("why"), RunError), (TimeoutError("why"), RunError), (ConnectionError("why"), RunError),
        (HttpError({"code": 503, "message": "why"}), RunError), (HttpError({"code": 429, "message": "why"}), RunError),
        (HttpError({"code": 400, "message": "why"}), ConfigError), (PermissionError("why"), ConfigError),
        (OSError("Forbidden: why"), ConfigError), (DefaultCredentialsError("why"), ConfigError),
    ],
)  # fmt: skip
def test_a_supervised_run_is_started_again_after_what_may_pass_and_not_after_mistakes(
    monkeypatch, tmp_path, error, kind
):
    def fail():
        raise error

    monkeypatch.setattr("checkpointing.bucket._list_one", lambda url: fail())
    with pytest.raises(kind, match=r"--workdir=gs://b/run: .*why"):
        Bucket("gs://b/run", tmp_path).fetch()


def test_an_empty_bucket_is_there_for_an_account_that_may_only_use_objects(bucket, tmp_path, monkeypatch):
    """Such as one with the role storage.objectAdmin, which may not ask for the bucket itself."""

    def forbidden(request, response, *unused):
        response.status = HTTPStatus.FORBIDDEN

    methods = next(methods for _, methods in server.HANDLERS if methods.get("GET") is buckets.get)
    bucket.mkdir("new")
    monkeypatch.setitem(methods, "GET", forbidden)
    Bucket("gs://new/mine", tmp_path).fetch()
    with pytest.raises(ConfigError, match="--workdir=gs://nothing/mine: the bucket does not exist"):
        Bucket("gs://nothing/mine", tmp_path).fetch()


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_one_line(bucket, tmp_path):
    process = command("train.py", "--workdir=gs://nothing/mine", "--config.data.source=synthetic", cache=tmp_path)
    status, _, err = finish(process)
    assert status == 2
    assert err.strip().splitlines()[-1].startswith("error: --workdir=gs://nothing/mine: the bucket does not exist")
    status, _, err = finish(command("report.py", "gs://nothing/mine", cache=tmp_path))
    assert status == 2
    assert err.strip().splitlines()[-1].startswith("error: gs://nothing/mine: the bucket does not exist")


def test_a_run_that_was_stopped_says_so_where_the_bucket_answers_no_more(bucket, tmp_path, monkeypatch):
    """The last copies fail with what gcsfs raises, no OSError; the state is saved, and status 75 stays."""

    def stopped(*unused):
        monkeypatch.setattr(Bucket, "send", unavailable)
        raise Interrupted(5)

    def unavailable(*unused, **more):
        raise HttpError({"code": 503, "message": "unavailable"})

    monkeypatch.setattr(train, "run_training", stopped)
    copy = Bucket("gs://runs/stopped", tmp_path)
    with pytest.raises(Interrupted):
        train.train(in_process(), copy.folder, batches=iter([]), bucket=copy)
