# SPDX-License-Identifier: Apache-2.0
"""Several processes train one model: real ones, on this machine, with eight simulated devices between them."""

import json
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import time

import pytest

from tests import groups
from tests.test_train import RISING, SMALL, lines_of

OF_A_GROUP = SMALL | RISING | {
    "model.dtype": "float32",
    "mesh.data": 2, "mesh.fsdp": 4, "model.embed_dim": 32, "train.steps": 6, "train.eval_every": 2,
    "train.save_every": 2, "evaluation.sample_tokens": 0, "evaluation.batches": 3, "logging.tensorboard": False,
}  # fmt: skip
ENDLESS = {"train.steps": 100_000, "train.eval_every": 50, "train.save_every": 0}
KILLED_SECONDS = 30  # in which the others must end


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> pathlib.Path:
    """A folder with texts whose held-out windows do not fill whole batches."""
    folder = tmp_path_factory.mktemp("groups")
    (folder / "texts").mkdir()
    for index in range(23):
        words = " ".join(f"{number * (index + 3)} is {number} times {index + 3};" for number in range(40 + index))
        (folder / "texts" / f"{index}.txt").write_text(words)
    return folder


@pytest.fixture(autouse=True)
def none_left():
    """No process survives its test."""
    yield
    groups.end_all()


def start(place: pathlib.Path, workdir: str, count: int, changes: dict | None = None, flags=(), **how):
    values = OF_A_GROUP | {"data.path": f"{place}/texts/*.txt"} | (changes or {})
    keys = [f"--config.{key}={value}" for key, value in values.items()]
    arguments = ["train.py", f"--workdir={place / workdir}", *flags, *keys]
    return groups.start(arguments, count=count, cache=place / "cache", **how)


def train(place: pathlib.Path, workdir: str, count: int, changes: dict | None = None) -> list[tuple[int, str, str]]:
    ended = groups.finish(start(place, workdir, count, changes))
    assert [status for status, _, _ in ended] == [0] * count, ended
    return ended


def losses(place: pathlib.Path, workdir: str) -> dict[str, list]:
    trained, evaluated = (lines_of(place / workdir, kind) for kind in ("train", "eval"))
    return {
        "loss": [trained[step]["loss"] for step in sorted(trained)],
        "gradient_norm": [trained[step]["gradient_norm"] for step in sorted(trained)],
        "eval_loss": [(evaluated[step]["eval_loss"], evaluated[step]["eval_tokens"]) for step in sorted(evaluated)],
    }


def wait_for_step(place: pathlib.Path, workdir: str, processes: list[subprocess.Popen], step: int = 3) -> None:
    deadline, path = time.monotonic() + groups.SECONDS, place / workdir / "metrics.jsonl"
    while not path.exists() or not re.search(rf'"kind": "train", "step": {step},', path.read_text()):
        dead = [process for process in processes if process.poll() is not None]
        assert time.monotonic() < deadline and not dead, dead and dead[0].stderr.read()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def of_four(place) -> list[tuple[int, str, str]]:
    """What a run of 4 processes in `place`/four printed."""
    return train(place, "four", 4)


def test_losses_are_bit_identical_between_one_two_and_four_processes(place, of_four):
    """One process goes through the same collectives: it too is initialised as a group."""
    train(place, "one", 1)
    train(place, "two", 2)
    assert losses(place, "one") == losses(place, "two") == losses(place, "four")
    assert len(losses(place, "four")["loss"]) == 6 and len(losses(place, "four")["eval_loss"]) == 3


def test_process_0_reports_and_every_one_keeps_a_log_and_a_sign_of_life(place, of_four):
    assert "step 6/6" in of_four[0][1]
    for number, (_, out, _) in enumerate(of_four):
        for line in (f"Process index: {number}", "Process count: 4", "Local devices: 2", "Global devices: 8"):
            assert line in out
        assert number == 0 or "step 6/6" not in out
        assert "step 6/6" in (place / "four" / "logs" / f"train_worker_{number}.out").read_text()
        sign = json.loads((place / "four" / "workers" / f"{number}.json").read_text())
        assert (sign["process"], sign["step"], sign["phase"]) == (number, 6, "finished")
        assert sign["host_memory_gib"] > 0 and len(sign["code"]) == 12


@pytest.mark.parametrize(("count", "restore"), [(1, "read"), (2, "broadcast")])
def test_a_checkpoint_of_four_processes_goes_on_in_fewer(place, of_four, count, restore):
    """Bit for bit; by broadcast one of the two reads, for the other too."""
    copy = place / f"from-four-{count}"
    shutil.copytree(place / "four", copy, ignore=shutil.ignore_patterns("metrics.jsonl", "summary.txt"))
    shutil.rmtree(copy / "checkpoints" / "6")
    train(place, copy.name, count, {"checkpoint.restore": restore})
    assert losses(place, copy.name)["loss"] == losses(place, "four")["loss"][4:]


@pytest.mark.parametrize(
    ("count", "devices", "mesh"),
    [
        (1, 1, {"mesh.data": 1, "mesh.fsdp": 1}),
        (4, 8, {"mesh.data": 1, "mesh.fsdp": 4, "mesh.model": 2, "layout.changes": "5: data=8"}),
    ],
)
def test_a_checkpoint_of_four_processes_goes_on_on_other_meshes(place, of_four, count, devices, mesh):
    """With the same examples, so that the losses are the same but for rounding; on a third mesh while it runs."""
    copy = place / f"elastic-{count}"
    shutil.copytree(place / "four", copy, ignore=shutil.ignore_patterns("metrics.jsonl", "summary.txt"))
    shutil.rmtree(copy / "checkpoints" / "6")
    ended = groups.finish(start(place, copy.name, count, mesh, devices=devices))
    assert [status for status, _, _ in ended] == [0] * count, ended
    assert losses(place, copy.name)["loss"] == pytest.approx(losses(place, "four")["loss"][4:], rel=1e-5)


def test_a_killed_process_ends_the_others_who_name_it(place):
    workdir, count, killed = "killed", 4, 2
    processes = start(place, workdir, count, ENDLESS)
    wait_for_step(place, workdir, processes)
    processes[killed].kill()
    began = time.monotonic()
    ended = groups.finish(processes)
    assert time.monotonic() - began < KILLED_SECONDS
    for number, (status, _, err) in enumerate(ended):
        if number != killed:
            assert status == 1
            assert err.strip().splitlines()[-1] == f"error: process {killed} of {count} ({socket.gethostname()}) died"
            log = (place / workdir / "logs" / f"train_worker_{number}.out").read_text()
            assert "this process was here:" in log and "train.py" in log


def test_a_signal_to_one_stops_all_at_the_same_step_saved(place):
    processes = start(place, "stopped", 2, ENDLESS)
    wait_for_step(place, "stopped", processes)
    processes[1].send_signal(signal.SIGTERM)
    ended = groups.finish(processes)
    last = {err.strip().splitlines()[-1] for _, _, err in ended}
    assert [status for status, _, _ in ended] == [75] * 2, ended
    (line,) = last
    step = re.fullmatch(r"saved at step (\d+); run the same command to go on", line).group(1)
    assert (place / "stopped" / "checkpoints" / step).is_dir()


def test_one_that_hangs_ends_the_run_with_the_stacks_of_the_others(place):
    processes = start(place, "hung", 2, ENDLESS | {"train.hang_seconds": 6})
    wait_for_step(place, "hung", processes)
    processes[1].send_signal(signal.SIGSTOP)
    _, err = processes[0].communicate(timeout=60)
    assert processes[0].returncode == 1
    said = rf"error: no step ended for 6 s: process 1 \({socket.gethostname()}\) gives no sign of life for \S+ s; "
    assert re.match(said + r"it was in .+; where every thread was is in ", err.strip().splitlines()[-1]), err
    log = (place / "hung" / "logs" / "train_worker_0.out").read_text()
    assert "most recent call first" in log and "in train_from" in log


def test_a_late_process_is_named_by_the_others(place):
    began = time.monotonic()
    ended = groups.finish(start(place, "late", 4, flags=["--join_seconds=4"], absent=(3,)))
    assert time.monotonic() - began < 4 + 20  # the rest is the start of Python on a busy machine
    for status, _, err in ended:
        assert status == 1
        assert "process 3 of 4 did not come up within 4 s (there are: 0 on " in err.strip().splitlines()[-1]
    assert not (place / "late").exists()


def test_hosts_that_are_not_the_same_are_told_before_anything_begins(place):
    without_mesh = {key: value for key, value in OF_A_GROUP.items() if not key.startswith("mesh.")}
    keys = [f"--config.{key}={value}" for key, value in without_mesh.items()]
    arguments = ["train.py", f"--workdir={place / 'differ'}", f"--config.data.path={place}/texts/*.txt", *keys]
    variables = {1: {"TPU_MESH_CONFIG": "4,1,2"}}
    for status, _, err in groups.finish(groups.start(arguments, count=2, cache=place / "cache", variables=variables)):
        assert status == 2 and "differ in their configuration: " in err
        assert f"process 1 ({socket.gethostname()})" in err and len(err.strip().splitlines()) == 1
    assert not (place / "differ").exists()


def test_hosts_with_other_data_are_told(place):
    """Each host has a folder of its own at the same path; here the path goes by way of the home folder."""
    for number in range(2):
        home = place / f"home-{number}"
        shutil.copytree(place / "texts", home / "texts")
    (place / "home-1" / "texts" / "3.txt").write_text("something else; " * 99)
    variables = {number: {"HOME": str(place / f"home-{number}")} for number in range(2)}
    ended = groups.finish(start(place, "other-data", 2, {"data.path": "~/texts"}, variables=variables))
    for status, _, err in ended:
        assert status == 2 and "differ in their corpus: digest is " in err.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def parts(place) -> list[dict]:
    """What each of four processes of tests/parts_of_a_group.py printed."""
    ended = groups.finish(groups.start(["tests/parts_of_a_group.py"], count=4, cache=place / "cache"))
    assert [status for status, _, _ in ended] == [0] * 4, ended
    return [json.loads(out.strip().splitlines()[-1]) for _, out, _ in ended]


def test_rows_of_the_processes_are_disjoint_and_cover_the_batch(parts):
    for said in parts:
        for of_processes in said["rows"].values():
            assert sorted(row for part in of_processes for row in part) == list(range(16))


def test_copies_of_a_parameter_that_differ_between_processes_are_named_everywhere(parts):
    host = socket.gethostname()
    for said in parts:
        assert said["difference"].startswith("params is not the same on device ")
        assert f"of process 0 ({host})" in said["difference"] and f"of process 2 ({host})" in said["difference"]


def test_an_array_moves_between_the_meshes_of_four_processes(parts):
    assert all(said["moved"] for said in parts)
