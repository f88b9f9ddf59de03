# SPDX-License-Identifier: Apache-2.0
"""Several processes train one model: real ones, on this machine, with four simulated devices between them."""

import json
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import time

import pytest

from reporting.metrics import read_lines
from tests import groups
from tests.hostile import Siege
from tests.receiver import receiver
from tests.test_train import RISING, SMALL, lines_of

OF_A_GROUP = SMALL | RISING | {
    "model.dtype": "float32", "mesh.data": 2, "mesh.fsdp": 2, "optimizer.name": "sgd", "train.steps": 6,
    "train.eval_every": 2, "train.save_every": 2, "checkpoint.keep": 99, "evaluation.sample_tokens": 0,
    "evaluation.batches": 23, "logging.tensorboard": False,  # all that is held out, the last batch not full
    "logging.report": False,
}  # fmt: skip
ENDLESS = {"train.steps": 100_000}
RENUMBERED = ("tests/renumbered.py", "train.py")
DEVICES = 4
SIXTH = '"kind": "eval", "step": 6'
NUM_STRANGERS = 300
HANG_SECONDS = 12  # longer than it takes to compile for the third mesh
KILLED, KILLED_SECONDS = 2, 30  # who, and in which the others must end


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> pathlib.Path:
    """A folder with texts whose held-out windows do not fill whole batches."""
    return with_texts(tmp_path_factory.mktemp("groups"))


def with_texts(folder: pathlib.Path) -> pathlib.Path:
    """Write texts below a folder; return the folder."""
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


def test_a_program_that_hangs_shows_where(place, monkeypatch):
    """So that a failure on a machine that nobody can log in to can be understood."""
    monkeypatch.setattr(groups, "SECONDS", 2)
    program = "import threading\n\ndef wait_for_ever():\n    threading.Event().wait()\n\nwait_for_ever()"
    [(status, _, err)] = groups.finish([groups.start_alone(["-c", program], cache=place / "cache")])
    assert status == -signal.SIGABRT and "wait_for_ever" in err


def start(
    place: pathlib.Path, workdir: str, count: int, changes: dict | None = None, flags=(), program=("train.py",), **how
):  # fmt: skip
    """Start the processes of a run in `place`/workdir."""
    values = OF_A_GROUP | {"data.path": f"{place}/texts/*.txt"} | (changes or {})
    keys = [f"--config.{key}={value}" for key, value in values.items()]
    arguments = [*program, f"--workdir={place / workdir}", *flags, *keys]
    return groups.start(arguments, count=count, cache=place / "cache", **{"devices": DEVICES} | how)


def losses(place: pathlib.Path, workdir: str, after: int = 0) -> dict[str, dict]:
    """Return what steps up to the sixth came to; what an endless run did after it is left out."""
    trained, evaluated = (lines_of(place / workdir, kind) for kind in ("train", "eval"))
    steps = range(after + 1, 7)
    return {
        "trained": {step: (trained[step]["loss"], trained[step]["gradient_norm"]) for step in steps},
        "evaluated": {step: (evaluated[step]["eval_loss"], evaluated[step]["eval_tokens"]) for step in steps[1::2]},
    }


def go_on(place: pathlib.Path, workdir: str, after: int) -> str:
    """Make a workdir of what four processes had saved by a step."""
    copy = place / workdir
    shutil.copytree(place / "four", copy, ignore=shutil.ignore_patterns("metrics.jsonl", "summary.txt"))
    for folder in (copy / "checkpoints").iterdir():
        if folder.name != str(after):
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    return workdir


def start_of(place: pathlib.Path, workdir: str) -> int:
    """Return the step that a run went on from."""
    lines = map(json.loads, (place / workdir / "metrics.jsonl").read_text().splitlines())
    return next(line["step"] for line in lines if line.get("event") == "start")


def wait_for(place: pathlib.Path, workdir: str, line: str, processes: list[subprocess.Popen]) -> None:
    """Return when the metrics have a line that begins so."""
    deadline, path = time.monotonic() + groups.SECONDS, place / workdir / "metrics.jsonl"
    while not path.exists() or not re.search(line + r",.*\n", path.read_text()):
        dead = [process for process in processes if process.poll() is not None]
        assert time.monotonic() < deadline and not dead, dead and dead[0].stderr.read()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def alerted():
    """The receiver of the alerts of the four processes."""
    with receiver() as server:
        yield server


@pytest.fixture(scope="module")
def of_four(place, alerted) -> list[tuple[int, str, str]]:
    """What 4 processes printed that trained in `place`/four until number 2 was killed, some steps after the sixth."""
    processes = start(place, "four", 4, ENDLESS | {"logging.alerts": alerted.url})
    wait_for(place, "four", SIXTH, processes)
    processes[KILLED].kill()
    began = time.monotonic()
    ended = groups.finish(processes)
    assert time.monotonic() - began < KILLED_SECONDS
    return ended


@pytest.fixture(scope="module")
def of_two(place, of_four) -> list[tuple[int, str, str]]:
    """What 2 processes printed that went on in `place`/two, one reading for both, until number 1 had a SIGTERM.

    Strangers were at the door of their hub all the time, and jax numbers the two in the other order.
    """
    port, changes = groups.free_ports(), ENDLESS | {"checkpoint.restore": "broadcast"}
    processes = start(place, go_on(place, "two", 2), 2, changes, program=RENUMBERED, port=port)
    siege = Siege(port + 1, NUM_STRANGERS)
    wait_for(place, "two", SIXTH, processes)
    assert siege.addresses == groups.listening(port + 1) == {"127.0.0.1"}
    assert groups.listening(port) <= {"127.0.0.1", "::ffff:127.0.0.1"}  # jax's coordinator
    siege.join(groups.SECONDS)
    assert siege.made == NUM_STRANGERS
    processes[1].send_signal(signal.SIGTERM)
    return groups.finish(processes)


def test_losses_are_bit_identical_between_one_two_and_four_processes(place, of_four, of_two):
    """One process goes through the same collectives: it too is initialised as a group."""
    ended = groups.finish(start(place, "one", 1))
    assert [status for status, _, _ in ended] == [0], ended
    assert losses(place, "one") == losses(place, "four")
    assert losses(place, "two", after=2) == losses(place, "four", after=2)
    assert losses(place, "one")["evaluated"][6][1] % (8 * 32) > 0


def test_process_0_reports_and_every_one_keeps_a_log_and_a_sign_of_life(place, of_four, of_two):
    assert "step      6/100000" in of_four[0][1]
    for number, (_, out, _) in enumerate(of_four):
        for line in (f"Process index: {number}", "Process count: 4", "Local devices: 1", f"Global devices: {DEVICES}"):
            assert line in out
        assert number == 0 or "step      6/" not in out
        assert "step      6/100000" in (place / "four" / "logs" / f"train_worker_{number}.out").read_text()
        sign = json.loads((place / "four" / "workers" / f"{number}.json").read_text())
        assert sign["process"] == number and sign["host_memory_gib"] > 0 and len(sign["code"]) == 12
    written = read_lines(place / "four" / "metrics.jsonl")
    steps = [line["step"] for line in written if line["kind"] == "train"]
    assert len(steps) == len(set(steps)), "each step is written once, by one process"
    last = int(re.search(r"saved at step (\d+)", of_two[0][2])[1])
    for number in range(2):
        sign = json.loads((place / "two" / "workers" / f"{number}.json").read_text())
        assert (sign["process"], sign["step"], sign["phase"]) == (number, last, "stopped")


def test_a_killed_process_ends_the_others_who_name_it(place, of_four):
    for number, (status, _, err) in enumerate(of_four):
        if number != KILLED:
            assert status == 1
            assert err.strip().splitlines()[-1] == f"error: process {KILLED} of 4 ({socket.gethostname()}) died"
            log = (place / "four" / "logs" / f"train_worker_{number}.out").read_text()
            assert "the stacks of this process:" in log
            # In the loop, or at the end if a collective failed before this process got the message.
            assert "train.py" in log or "in _with_one_line" in log


def test_a_killed_process_is_one_alert_of_process_0(of_four, alerted):
    said = f"process {KILLED} of 4 ({socket.gethostname()}) died"
    assert [(alert["event"], alert["text"]) for alert in alerted.taken] == [("lost_worker", said)]


def test_a_checkpoint_of_four_processes_goes_on_in_fewer(place, of_two):
    """Bit for bit, by one of the two that reads for the other too."""
    assert start_of(place, "two") == 2
    assert losses(place, "two", after=2) == losses(place, "four", after=2)


def test_strangers_at_the_hub_change_nothing_and_are_counted(place, of_two):
    """The losses, too, are those of processes that none disturbed, as the test above has it."""
    log = (place / "two" / "logs" / "train_worker_0.out").read_text()
    [number] = re.findall(r"WARNING - closed (\d+) connections that did not know the secret of the run", log)
    assert 0.95 * NUM_STRANGERS < int(number) <= NUM_STRANGERS  # some hang up before they are seen
    assert [err.count("warning") for _, _, err in of_two] == [0, 0] and not (place / "two" / "run_secret").exists()


def test_what_c_libraries_print_is_not_shown(of_two):
    """gloo prints its connections to stdout, which is for the run's own lines."""
    assert all("Gloo" not in out for _, out, _ in of_two) and "step " in of_two[0][1]


def test_a_signal_to_one_stops_all_at_the_same_step_saved(place, of_two):
    assert [status for status, _, _ in of_two] == [75] * 2, of_two
    (line,) = {err.strip().splitlines()[-1] for _, _, err in of_two}
    step = re.fullmatch(r"saved at step (\d+); run the same command to continue", line).group(1)
    assert (place / "two" / "checkpoints" / step).is_dir()


@pytest.mark.slow
def test_processes_whose_run_diverges_wait_until_its_findings_are_written(place):
    """All raise the same error, and process 0 then reads the documents and writes the report."""
    changes = {"train.bad_steps": 1, "train.roll_backs": 0, "logging.report": True}
    ended = groups.finish(start(place, "diverged", 2, changes, ["--faults=nan@4"]))
    assert [status for status, _, _ in ended] == [3, 3], ended
    lines = [err.strip().splitlines()[-1] for _, _, err in ended]
    assert all("the documents of the bad batches are in" in line for line in lines), lines
    assert {"bad_documents.txt", "report.html"} <= {path.name for path in (place / "diverged").iterdir()}
    words = ["train.py", f"--workdir={place}/diverged", "--explain_step=3"]
    told, silent = groups.finish(groups.start(words, count=2, cache=place / "cache", devices=DEVICES))
    assert told[0] == silent[0] == 0 and "under checkpoint 2" in told[1] and silent[1] == "", (told, silent)


@pytest.mark.slow
def test_tasks_are_scored_by_two_processes_as_by_one_and_written_once(place):
    """By the same program: one process has both devices. The items fill several batches, one of them not full."""
    items = [{"question": f"{n} is", "choices": [f"{n // 2} times", "9"], "answer": 0} for n in range(2, 13)]
    items += [{"text": f"{n} is 3 times {n // 3}; " * 5} for n in range(3, 9, 3)]
    (place / "sums.jsonl").write_text("\n".join(map(json.dumps, items)))
    changes = {
        "train.steps": 2, "train.eval_every": 0, "train.save_every": 0, "evaluation.tasks": f"{place}/sums.jsonl",
        "evaluation.tasks_every": 1, "mesh.data": 2, "mesh.fsdp": 1, "data.holdout_fraction": 0.05,
    }  # fmt: skip
    started = [start(place, f"scored-{count}", count, changes, devices=2) for count in (1, 2)]
    ended = [end for processes in started for end in groups.finish(processes)]
    assert [status for status, _, _ in ended] == [0] * 3, ended
    one, two = (
        [json.loads(line) for line in (place / f"scored-{count}" / "metrics.jsonl").read_text().splitlines()]
        for count in (1, 2)
    )
    one, two = ([line for line in lines if line["kind"] == "tasks"] for lines in (one, two))
    assert [line["step"] for line in two] == [1, 2] and {"sums/acc", "sums/bits_per_byte"} <= two[0].keys()
    for line in (*one, *two):
        del line["time"]
    assert one == two


@pytest.fixture(scope="module")
def of_other_meshes(place, of_four) -> tuple[int, str]:
    """How the first of 2 processes ended that went on in `place`/hung, until the other one was stopped dead.

    On another mesh, and on a third while they run.
    """
    changes = {"mesh.data": 1, "mesh.fsdp": 2, "mesh.model": 2, "layout.changes": "5: data=4", "train.eval_every": 0}
    processes = start(place, go_on(place, "hung", 4), 2, ENDLESS | changes | {"train.hang_seconds": HANG_SECONDS})
    wait_for(place, "hung", '"kind": "train", "step": 7', processes)
    processes[1].send_signal(signal.SIGSTOP)
    _, err = processes[0].communicate(timeout=groups.SECONDS)
    return processes[0].returncode, err


@pytest.mark.slow
def test_a_checkpoint_of_four_processes_goes_on_on_other_meshes(place, of_other_meshes):
    """With the same examples, so that the losses differ only by rounding."""
    ended = groups.finish(start(place, go_on(place, "alone", 4), 1, {"mesh.data": 1, "mesh.fsdp": 1}, devices=1))
    assert [status for status, _, _ in ended] == [0], ended
    four = [loss for loss, _ in losses(place, "four", after=4)["trained"].values()]
    for workdir in ("alone", "hung"):
        assert start_of(place, workdir) == 4
        trained = lines_of(place / workdir, "train")
        assert [trained[step]["loss"] for step in (5, 6)] == pytest.approx(four, rel=1e-5)


@pytest.mark.slow
def test_one_that_hangs_ends_the_run_with_the_stacks_of_the_others(place, of_other_meshes):
    status, err = of_other_meshes
    assert status == 1
    host = re.escape(socket.gethostname())
    said = rf"error: no step ended within {HANG_SECONDS} s: process 1 \({host}\) has sent no heartbeat for \S+ s; "
    assert re.match(said + r"it was in .+; .+ has the stacks of all threads", err.strip().splitlines()[-1]), err
    log = (place / "hung" / "logs" / "train_worker_0.out").read_text()
    assert "most recent call first" in log and "in train_from" in log


def test_a_late_process_is_named_by_the_others(place):
    began = time.monotonic()
    ended = groups.finish(start(place, "late", 4, flags=["--join_seconds=4"], absent=(3,)))
    assert time.monotonic() - began < 4 + 20  # the rest is the start of Python on a busy machine
    for status, _, err in ended:
        assert status == 1
        assert "process 3 of 4 did not join within 4 s (joined: 0 on " in err.strip().splitlines()[-1]
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
def of_parts(place) -> list[tuple[int, str, str]]:
    """What four processes of tests/parts_of_a_group.py printed, which have no folder of a run."""
    ended = groups.finish(groups.start(["tests/parts_of_a_group.py"], count=4, cache=place / "cache"))
    assert [status for status, _, _ in ended] == [0] * 4, ended
    return ended


@pytest.fixture(scope="module")
def parts(of_parts) -> list[dict]:
    """The same, read."""
    return [json.loads(out.strip().splitlines()[-1]) for _, out, _ in of_parts]


@pytest.mark.slow
def test_a_run_that_no_secret_protects_says_so_once(of_parts):
    said = [[line for line in err.splitlines() if line.startswith("warning:")] for _, _, err in of_parts]
    assert [len(lines) for lines in said] == [1, 0, 0, 0]
    assert re.fullmatch(
        r"warning: no secret protects this run: anyone who can reach port \d+ of localhost can end it; "
        r"set TORUS_RUN_SECRET to the same secret in all processes",
        said[0][0],
    )


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


def test_a_batch_that_was_sampled_before_a_checkpoint_reaches_processes_that_do_not_have_its_file(parts):
    assert [said["kept"] for said in parts] == [True] * 4


def test_the_batch_of_process_0_is_sent_where_jax_has_another_process_0(place):
    words = ["tests/renumbered.py", "tests/parts_of_a_group.py"]
    ended = groups.finish(groups.start(words, count=2, cache=place / "cache"))
    said = [json.loads(out.strip().splitlines()[-1]) for status, out, _ in ended if status == 0]
    assert [part["kept"] for part in said] == [True] * 2, ended
