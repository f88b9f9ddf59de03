# SPDX-License-Identifier: Apache-2.0
"""A pod of processes on this machine: made, launched on, stopped, given back."""

import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import types

import pytest

from pods import backup, launch, local, records, settings, studies, watch
from pods.connection import connect
from pods.errors import PodError
from scripts import search_then_train
from tests.pods.local_pods import LAUNCH, LocalPod, alive, wait_until
from tests.support import ROOT

WAITS = "import os, time; print(os.environ['JAX_PROCESS_INDEX'], flush=True); time.sleep(600)"
SAVES = """
import signal, sys, time
def save(*_): print("saved", flush=True); sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def two(tmp_path, monkeypatch):
    """A pod of two workers, that is made."""
    monkeypatch.setattr(launch, "LOOK_AFTER_SECONDS", 0.5)
    pod = LocalPod(tmp_path, ACCEL="v4-16")
    assert pod.run("create").status == 0
    yield pod
    pod.end()


def ready(pod: LocalPod, workers: int = 2) -> None:
    wait_until(lambda: all("ready" in pod.log(worker) for worker in range(workers)), "the programs to be ready")


def test_a_pod_is_made_with_the_code_as_it_stands_and_given_back(tmp_path):
    pod = LocalPod(tmp_path, ACCEL="v4-32")
    assert "does not exist" in pod.run("delete").stdout
    made = pod.run("create")
    assert (made.status, made.stdout) == (0, f"mine: created, 4 workers in {pod.folder}\n")
    assert "exists already" in pod.run("create").stdout
    described = json.loads(pod.run("describe", "--json").stdout)
    assert (described["state"], described["acceleratorType"], described["workers"]) == ("READY", "v4-32", 4)
    for worker in range(4):
        code = pod.code_of(worker)
        assert (code / "pods" / "local.py").is_file() and (code / ".venv" / "bin" / "python").exists()
    assert pod.run("ssh", "--worker=2", "--", "pwd").stdout.strip() == str(pod.folder / "worker-2")
    deleted = pod.run("delete")
    assert deleted.status == 0 and not pod.folder.exists()


def test_what_a_broken_create_left_is_deleted(tmp_path):
    pod = LocalPod(tmp_path, ACCEL="v4-16")
    (pod.folder / "worker-1" / "torus").mkdir(parents=True)
    deleted = pod.run("delete")
    assert (deleted.status, deleted.stdout) == (0, "mine: deleted\n") and not pod.folder.exists()


@pytest.mark.parametrize("name", ["pod.json", "launch.json", "created.json"])
@pytest.mark.parametrize("content", ["{", "[]", "\xff", "[" * 100_000, '{"workers": "x", "words": 3, "slices": []}'])
def test_a_damaged_file_of_ours_is_one_line(tmp_path, name, content):
    pod = LocalPod(tmp_path, ACCEL="v4-16")
    pod.folder.mkdir(parents=True)
    (pod.folder / "launch.json").write_text(json.dumps(LAUNCH))
    (pod.folder / name).write_bytes(content.encode("latin-1"))
    done = pod.run("supervise" if name == "created.json" else "status")
    assert (done.status, len(done.stderr.splitlines())) == (1, 1) and f"{name} is damaged" in done.last_line
    assert pod.run("delete").status == 0 and not (pod.folder / name).exists()


def test_checkpoints_outlive_the_pod(two):
    (two.folder / "shared" / "tiny").mkdir()
    assert f"{two.folder}/shared remains" in two.run("delete").stdout
    assert sorted(path.name for path in two.folder.iterdir()) == ["shared"]


def test_a_command_runs_on_all_hosts_as_one_group_and_survives_its_terminal(two):
    command = ("launch", "--", "python", "-c", WAITS)
    assert two.run(*command).status == 0
    groups = two.groups()
    assert len(groups) == 2 and all(map(alive, groups))
    assert all(os.getsid(group) == group for group in groups)  # no terminal of ours can end them
    wait_until(lambda: all(f"\n{worker}\n" in two.log(worker) for worker in (0, 1)), "their numbers")
    addresses = {
        variable
        for group in groups
        for variable in pathlib.Path(f"/proc/{group}/environ").read_text().split("\0")
        if variable.startswith(("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_COUNT"))
    }
    assert len(addresses) == 2  # the same for both
    again = two.run(*command)
    assert again.status == 0 and again.stdout.count("runs already") == 2 and two.groups() == groups
    other = two.run("launch", "--", "sleep", "9")
    assert other.status == 1 and "stop it first" in other.last_line and two.groups() == groups
    stopped = two.run("stop")
    assert stopped.status == 0 and stopped.stdout.count("exit status 143") == 2 and not any(map(alive, groups))
    assert two.run("stop").stdout.count("nothing runs") == 2


def test_python_of_a_command_is_that_of_the_host(two):
    assert two.run("launch", "--", "python", "-c", "import sys; print(sys.executable)").status == 0
    assert f"{two.code_of(1)}/.venv/bin/python" in two.log(1)


def test_a_program_that_ends_at_once_is_shown(two):
    failed = two.run("launch", "--", "sh", "-c", "echo there is no such thing; exit 7")
    assert failed.status == 1 and "there is no such thing" in failed.stderr
    assert failed.last_line.startswith("error: worker 0 ended with status 7, worker 1 ended with status 7")


def test_stop_lets_programs_save_and_kills_those_that_do_not_end(two):
    assert two.run("launch", "--", "python", "-c", SAVES).status == 0
    ready(two)
    assert two.run("stop").stdout.count("exit status 75") == 2
    assert all(two.log(worker).endswith("saved\n") for worker in (0, 1))
    assert two.run("launch", "--", "python", "-c", DEAF).status == 0
    wait_until(lambda: all(two.log(worker).endswith("ready\n") for worker in (0, 1)), "the programs")
    groups = two.groups()
    stopped = two.run("stop", "--grace_seconds=1")
    assert stopped.status == 1 and stopped.stdout.count("was killed") == 2 and not any(map(alive, groups))


def test_restart_runs_the_same_again_and_a_part_of_a_group_is_not_launched(two):
    assert "nothing was launched" in two.run("restart").last_line
    assert two.run("launch", "--", "python", "-c", SAVES).status == 0
    ready(two)
    killed = two.groups()[1]
    os.killpg(killed, signal.SIGKILL)
    wait_until(lambda: not alive(killed), "the killed group to end")
    part = two.run("launch", "--", "python", "-c", SAVES)
    assert part.status == 1 and part.last_line.startswith("error: workers 1 run nothing, but the others do")
    before = two.groups()
    assert two.run("restart").status == 0
    assert all(map(alive, two.groups())) and not set(two.groups()) & set(before) and not any(map(alive, before))


def test_copying_to_all_workers_and_back(two, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a")
    assert two.run("copy", str(tmp_path / "data"), "mine:~/there").status == 0
    assert (two.folder / "worker-1" / "there" / "a.txt").read_text() == "a"
    for path in ("mine:/there/b.txt", "mine://there/c.txt"):
        assert two.run("copy", str(tmp_path / "data" / "a.txt"), path, "--worker=1").status == 0
    below = two.folder / "worker-1" / "root" / "there"
    assert sorted(p.name for p in below.iterdir()) == ["b.txt", "c.txt"]
    assert two.run("copy", "mine:~/there", str(tmp_path / "back"), "--worker=0").status == 0
    assert (tmp_path / "back" / "a.txt").read_text() == "a"
    missing = two.run("copy", "mine:~/nothing", str(tmp_path / "back"), "--worker=0")
    assert missing.status == 1 and "nothing" in missing.last_line


def test_a_copy_that_fails_leaves_no_empty_folder_of_a_worker(two, tmp_path):
    """It would look like a copy of an empty folder; one that was there before stays."""
    (tmp_path / "kept" / "worker-0").mkdir(parents=True)
    for name, left in (("back", []), ("kept", ["worker-0"])):
        assert two.run("copy", "mine:~/nothing", str(tmp_path / name)).status == 1
        assert [path.name for path in (tmp_path / name).iterdir()] == left


def test_hosts_see_their_own_home_and_little_of_this_machine(two):
    said = two.run("ssh", "--worker=1", "--", "env", SECRET="hush", STEPS="7").stdout
    variables = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    assert variables["HOME"] == str(two.folder / "worker-1") and variables["POD_WORKER"] == "1"
    assert not {"SECRET", "STEPS"} & variables.keys() and "device_count" not in variables["XLA_FLAGS"]


def test_a_dry_run_makes_nothing(tmp_path):
    pod = LocalPod(tmp_path, ACCEL="v4-16")
    for words in (["create"], ["launch"], ["stop"], ["delete"], ["status"], ["supervise"], ["setup_optimizations"]):
        assert pod.run(*words, "--dry_run").status == 0, words
    assert not pod.folder.exists()


def words_of(done) -> list[str]:
    """Return the words of the program that a dry run would launch."""
    script = next(shlex.split(line)[2] for line in done.stdout.splitlines() if "setsid nohup" in line)
    line = script[script.index("torus-run ") :]
    return shlex.split(line[: line.index(" >> ")])[1:]


@pytest.mark.parametrize(
    ("subcommand", "variables", "expected", "absent"),
    [
        ("launch", {}, {"config": "configs/medium.py", "topology": "v4-32"}, {"config.model.remat"}),
        (
            "launch_optimized",
            {"MODEL_SIZE": "small", "SEQ_LEN": "2048", "STEPS": "7", "LR": "1e-4", "PER_DEVICE_BATCH": "2"},
            {"config": "configs/small.py", "config.batch.fit": "auto", "config.model.dtype": "bfloat16",
             "config.train.sequence_length": "2048", "config.model.max_length": "2048", "config.train.steps": "7",
             "config.train.global_batch": "32", "config.optimizer.learning_rate": "0.0001",
             "config.data.source": "huggingface", "config.data.path": "allenai/c4:train[:1000000]"},
            {"config.model.remat"},
        ),
        ("launch_optimized", {"ENABLE_TPU_OPT": "off"}, {}, {"config.batch.fit", "config.model.dtype"}),
        ("launch_optimized", {"ENABLE_OPTIMIZATIONS": "0"}, {}, {"config.batch.fit"}),
        ("launch_optimized", {"MODEL_SIZE": "countdown"}, {"config": "configs/countdown.py"}, {"config.data.source"}),
        ("launch_optimized", {"DTYPE": "f32"}, {"config.model.dtype": "float32"}, set()),
        (
            "launch_pretrain_hf", {},
            {"config.data.source": "huggingface", "config.data.path": "allenai/c4:train[:1000000]",
             "config.data.subset": "en", "config.data.field": "text"},
            {"config.batch.fit"},
        ),
        ("launch_pretrain_hf", {"SPLIT": "train"}, {"config.data.path": "allenai/c4:train"}, set()),
        ("launch_pretrain_hf", {"DATASET": "one/two"}, {"config.data.path": "one/two:train"}, set()),
        ("launch_pretrain_hf", {"DATASET": "allenai/c4"}, {"config.data.subset": "en"}, set()),
        (
            "launch_pretrain_hf",
            {"DATASET": "one/two", "SPLIT": "validation", "TEXT_KEY": "body", "DATASET2": "three/four",
             "MIX_P2": "0.3"},
            {"config.data.mixture": "0.7 one/two:validation; 0.3 three/four:train", "config.data.field": "body",
             "config.data.subset": ""},
            {"config.data.path"},
        ),
        *(
            (name, {"MODEL_SIZE": size, "NUM_EXPERTS": "4"},
             {"config": "configs/small_moe.py", "config.model.num_experts": "4"}, set())
            for name, size in (("launch", "small"), ("launch_pretrain_hf", "small"), ("launch_optimized", "small_moe"))
        ),
    ],
)  # fmt: skip
def test_variables_become_arguments_of_train(tmp_path, subcommand, variables, expected, absent):
    done = LocalPod(tmp_path, ACCEL="v4-32").run(subcommand, "--dry_run", **variables)
    assert done.status == 0, done.stderr
    program = words_of(done)
    assert program[:2] == [".venv/bin/python", "train.py"]
    values = dict(word.removeprefix("--").split("=", 1) for word in program[2:])
    assert values.items() >= expected.items() and not absent & values.keys()


@pytest.mark.parametrize("after_dashes", [False, True])
def test_data_that_are_typed_are_read_in_place_of_the_data_set(tmp_path, after_dashes):
    typed = ["--config.data.path=texts/*.txt"]
    pod = LocalPod(tmp_path, ACCEL="v4-32")
    words = words_of(pod.run("launch_optimized", "--dry_run", *(["--"] if after_dashes else []), *typed))
    assert [word for word in words if word.startswith("--config.data.")] == typed


def test_evolution_searches_with_short_trials_and_then_trains(tmp_path):
    pod = LocalPod(tmp_path, ACCEL="v4-32")
    program = words_of(
        pod.run("launch_optimized", "--dry_run", ENABLE_EVOLUTION="true", STEPS="5000", MODEL_SIZE="small")
    )
    assert program[:2] == [".venv/bin/python", "scripts/search_then_train.py"]
    search, train = program[2 : program.index("--")], program[program.index("--") + 1 :]
    given = dict(word.removeprefix("--").partition("=")[::2] for word in search)  # of equal flags the last one counts
    run = dict(word.removeprefix("--").split("=", 1) for word in train)
    assert given["root"] == f"{run['workdir']}-search" and "workdir" not in given, "trials have their own folders"
    assert given["config"] == run["config"] == "configs/small.py" and given["topology"] == run["topology"] == "v4-32"
    assert (given["config.train.steps"], run["config.train.steps"]) == ("200", "5000")
    assert (given["space"], given["trials"]) == ("spaces/any_decoder.py", "12")
    smaller = {"EVOLUTION_TRIALS": "3", "EVOLUTION_STEPS": "40"}
    words = words_of(pod.run("launch_optimized", "--dry_run", ENABLE_EVOLUTION="true", **smaller))
    assert {"--trials=3", "--config.train.steps=40", "--config.optimizer.warmup_steps=4"} <= set(words)
    assert words_of(pod.run("launch_optimized", "--dry_run"))[1] == "train.py", "it is off unless it is asked for"


def test_after_the_search_the_best_trial_is_trained_and_what_was_typed_wins(tmp_path, monkeypatch):
    """The search and the training are stand-ins: each has tests of its own."""
    asked, trained = [], []
    ended = types.SimpleNamespace(poll=lambda: 0, wait=lambda _: 0)
    monkeypatch.setattr(subprocess, "Popen", lambda words, **_: asked.append(words) or ended)
    monkeypatch.setattr(os, "execv", lambda _, words: trained.append(words))
    monkeypatch.chdir(ROOT)
    (tmp_path / "evolution").mkdir()
    best = {"trial": 5, "value": 1.0, "changes": {"model.num_layers": 3, "model.mlp_dim": 96}}
    (tmp_path / "evolution" / "best.json").write_text(json.dumps(best))
    flags, typed = ["--name=evolution", f"--root={tmp_path}", "--trials=12"], ["--config.model.mlp_dim=64"]
    try:
        search_then_train.main([*flags, "--", *typed])
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert asked == [[sys.executable, "sweep.py", "search", *flags]]
    keys = ["--config.model.num_layers=3", "--config.model.mlp_dim=96"]
    assert trained == [[sys.executable, "train.py", *keys, *typed]], "of equal flags the last one counts"


@pytest.mark.parametrize("flags", [["--root=r", "--trials=1"], ["--name=x", "--trials=1", "--root", "r"]])
def test_a_flag_of_the_search_that_is_missing_is_said_before_the_search(monkeypatch, capfd, flags):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("the search runs"))
    assert search_then_train.main([*flags, "--"]) == 2
    flag = "--root" if "--root" in flags else "--name"
    said = "it says where the best trial is read, and is written with ="
    assert capfd.readouterr().err == f"error: no {flag}=VALUE before `--`; {said}\n"


@pytest.mark.parametrize(
    ("content", "says"), [(None, "No such file"), ('{"trial": 1}', "changes is missing"), ("{", "is not valid JSON")]
)
def test_a_best_trial_that_cannot_be_read_is_one_line(tmp_path, content, says):
    (tmp_path / "sweep.py").touch()
    if content is not None:
        (tmp_path / "best.json").write_text(content)
    program = "from scripts import search_then_train as s; import pathlib, sys; s.ROOT = pathlib.Path(sys.argv[1]); "
    words = [str(tmp_path), f"--root={tmp_path.parent}", f"--name={tmp_path.name}", "--trials=1", "--"]
    done = subprocess.run(
        [sys.executable, "-c", f"{program}sys.exit(s.main(sys.argv[2:]))", *words], cwd=ROOT, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and says in done.stderr
    assert done.stderr.startswith("error: the best trial of the search cannot be read: ")


@pytest.mark.parametrize("send", [os.killpg, os.kill])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_search_saves_and_nothing_is_trained(tmp_path, number, send):
    """The search is a stand-in that takes a moment to save, and ends well then."""
    save = "(time.sleep(0.5), pathlib.Path('saved').touch(), sys.exit(0))"
    (tmp_path / "sweep.py").write_text(
        "import pathlib, signal, sys, time\n"
        f"for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, lambda *_: {save})\n"
        "pathlib.Path('best/best.json').write_text('{\"trial\": 1, \"changes\": {}}')\n"
        "pathlib.Path('began').touch()\ntime.sleep(60)\n"
    )
    (tmp_path / "train.py").write_text("open('trained', 'w')")
    (tmp_path / "best").mkdir()
    program = "from scripts import search_then_train as s; import pathlib, sys; s.ROOT = pathlib.Path(sys.argv[1]); "
    flags = [f"--root={tmp_path}", "--name=best", "--trials=1", "--"]
    words = [sys.executable, "-c", f"{program}sys.exit(s.main(sys.argv[2:]))", str(tmp_path), *flags]
    process = subprocess.Popen(words, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL)
    wait_until((tmp_path / "began").exists, "the search")
    send(process.pid, number)
    assert process.wait(20) == 75 and (tmp_path / "saved").exists() and not (tmp_path / "trained").exists()


@pytest.mark.parametrize(
    ("typed", "root", "topology"),
    [
        (["run", "exp08-ema", "--base=mini"], "{shared}/exp08-ema-mini", "v4-32"),
        (["run", "trm", "--root=mine"], "{shared}/mine", "v4-32"),
        (["search", "--trials=3"], "{shared}/searches", "v4-32"),
        (["run", "trm", "--root=gs://bucket/trm", "--topology=v4-8"], "gs://bucket/trm", "v4-8"),
    ],
)
def test_a_study_gets_a_folder_that_all_hosts_see_and_the_pods_topology(tmp_path, typed, root, topology):
    pod = LocalPod(tmp_path, ACCEL="v4-32")
    program = words_of(pod.run("launch", "--dry_run", "--", "python", "sweep.py", *typed))
    assert program[: 2 + len(typed)] == [".venv/bin/python", "sweep.py", *typed]
    values = dict(
        word.removeprefix("--").partition("=")[::2] for word in program[3:]
    )  # of equal flags the last one counts
    assert values["root"] == root.format(shared=f"{pod.folder}/shared") and values["topology"] == topology
    assert ("allow_local" in values) is not root.startswith("gs://"), "launch knows that the folder is shared"
    other = words_of(pod.run("launch", "--dry_run", "--", "python", "sweep.py", "status", "trm"))
    assert other == [".venv/bin/python", "sweep.py", "status", "trm"]


@pytest.mark.parametrize(
    ("words", "workdir", "what"),
    [
        (["python", "train.py", "--workdir=/a", "--workdir", "/b"], "/b", "run /b"),
        (["python", "train.py", "--config=mine.py"], None, "program .venv/bin/python train.py --config=mine.py"),
        (["python", "mine.py", "--workdir=/a"], None, "program .venv/bin/python mine.py --workdir=/a"),
    ],
)
def test_train_py_after_the_dashes_is_watched_in_its_folder(tmp_path, monkeypatch, words, workdir, what):
    """Else `supervise` would see no step of it, and count every restart as one without progress."""
    typed = ["--transport=local", "--accel=v4-8", f"--pod_root={tmp_path}"]
    asked, started = settings.read(typed, {})[0], []
    monkeypatch.setattr(launch, "start", lambda settings, transport, record, **how: started.append(record))
    launch.launch(asked, connect(asked), words)
    [record] = started
    assert record["workdir"] == workdir and studies.what(record) == what


def test_a_study_on_hosts_that_share_no_folder_is_refused(tmp_path):
    words = ("launch", "--dry_run", "--project=p", "--zone=z", "--", "python", "sweep.py", "run", "trm")
    done = LocalPod(tmp_path, TRANSPORT="gcloud").run(*words)
    assert done.status == 2 and "has 4 hosts, and each would write its own run folder; set BUCKET=" in done.last_line


def test_what_is_typed_wins_over_variables_and_switches(tmp_path):
    pod = LocalPod(tmp_path, ACCEL="v4-32")
    done = pod.run(
        "launch_optimized", "--dry_run", "--config.model.remat=full", "--", "--config.train.steps=9", STEPS="5"
    )
    values = dict(word.removeprefix("--").split("=", 1) for word in words_of(done)[2:])
    assert (values["config.model.remat"], values["config.train.steps"]) == ("full", "9")


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (["create", "--workers=3"], {}, "--workers=3 does not divide the 16 chips of v4-32"),
        (["create"], {"REPO_DIR": "/torus"}, "REPO_DIR=/torus is outside a local worker's home; use ~/torus"),
        (["launch_optimized"], {"ENABLE_CAUSAL": "maybe"}, "ENABLE_CAUSAL=maybe is neither true nor false"),
        (["launch_pretrain_hf"], {"DATASET2": "a/b", "MIX_P2": "1.5"}, "MIX_P2=1.5 must lie between 0 and 1"),
        (["launch_pretrain_hf"], {"DATASET2": "a/b", "CONFIG2": "de"}, "CONFIG2=de differs from CONFIG="),
        (["launch", "--config.model.remta=full"], {}, "--config.model.remta is not a configuration key; did you mean"),
        (["launch"], {"BATCH_SIZE": "7"}, "train.global_batch=7 is not a multiple"),
        (["launch_optimized"], {"OPTIMIZATION_CONFIG": "/nowhere.json"}, "/nowhere.json: No such file"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_anything_is_called(tmp_path, words, variables, message):
    done = LocalPod(tmp_path, ACCEL="v4-32").run(*words, **variables)
    assert done.status == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", [["--", "python", "train.py"], ["--", "python", "sweep.py", "search"]])
def test_a_secret_after_the_dashes_is_refused_too(tmp_path, words):
    """It would be on the command lines of all hosts, and in files there."""
    for secret in (["--config.logging.alerts=https://hooks/1"], ["--config.logging.alerts", "https://hooks/1"],
                   ["bash -c 'python train.py --config.logging.alerts=https://hooks/1'"]):  # fmt: skip
        done = LocalPod(tmp_path, ACCEL="v4-32").run("launch", "--dry_run", *words, *secret)
        assert done.status == 2 and "--config.logging.alerts is a secret" in done.last_line
        assert "hooks/1" not in done.stdout + done.stderr


def test_if_a_host_cannot_begin_a_command_the_others_end_theirs(tmp_path, monkeypatch):
    pod, start, begun = local.Local(settings.read(["--transport=local", "--name=mine"], {})[0]), local.Local._start, []
    monkeypatch.setattr(local.Local, "_home", lambda self, index: tmp_path)

    def fails_for_the_second(self, index, command, variables):
        if index == 1:
            raise OSError(12, "Cannot allocate memory")
        begun.append(start(self, index, command, variables))
        return begun[-1]

    monkeypatch.setattr(local.Local, "_start", fails_for_the_second)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        pod._run_on([0, 1], "exec sleep 60", False)
    assert begun[0].wait(10) == -signal.SIGKILL
    begun[0].stdout.close()


def test_without_a_pod_its_absence_is_told(tmp_path):
    pod = LocalPod(tmp_path, ACCEL="v4-16")
    for words in (["launch", "--", "true"], ["stop"], ["status"], ["validate"], ["ssh", "--", "true"]):
        done = pod.run(*words)
        assert done.status == 1 and "there is no pod mine" in done.stdout + done.stderr, words


def test_a_worker_that_never_answers_hides_no_other_and_is_unreachable(two, tmp_path, monkeypatch):
    """As where a read of its heartbeat waits for a dead file server."""
    asked, _ = settings.read(["--transport=local", "--name=mine"], two.environment)
    monkeypatch.setattr(watch, "LOOK_SECONDS", 2.0)
    (tmp_path / "run" / "workers").mkdir(parents=True)
    os.mkfifo(tmp_path / "run" / "workers" / "0.json")
    first, second = watch.look(asked, connect(asked), LAUNCH | {"workdir": str(tmp_path / "run")})
    assert second.reachable and not first.reachable
    assert first.trouble() == "worker 0 is unreachable: no answer within 2 s"


def test_another_type_than_the_pods_own_is_refused(two):
    done = two.run("launch", ACCEL="v4-32")
    assert done.status == 2 and "ACCEL=v4-32, but the pod mine is a v4-16" in done.last_line


@pytest.mark.parametrize(("transport", "inside"), [("local", "/."), ("gcloud", "/*")])
def test_a_second_backup_copies_what_is_in_the_folder(tmp_path, transport, inside):
    """cp reads no patterns of a shell, and the scp of gcloud needs one."""
    asked, _ = settings.read([f"--transport={transport}", "--name=mine", "--workdir=~/run"], {})
    copied = []
    there = types.SimpleNamespace(
        num_workers=1, describe=lambda: None, copy=lambda source, target, worker: copied.append((source, target))
    )
    backup.backup(asked, there, [str(tmp_path)])
    assert copied == [(f"mine:~/run{inside}", str(tmp_path))]


def test_an_interrupted_backup_takes_no_other_run(tmp_path):
    """And one that copied nothing leaves nothing, as after a wrong name."""

    def copying(*names: str):
        def copy(source, target, worker):
            for name in names:
                (tmp_path / "backup" / name).touch()
            raise PodError("interrupted")

        return types.SimpleNamespace(num_workers=1, describe=lambda: None, copy=copy)

    (tmp_path / "backup").mkdir()
    tries = [
        ("one", [], "interrupted", False), ("two", ["a"], "interrupted", True), ("one", [], "backup of ~/two", True),
        ("two", [], "interrupted", True),
    ]  # fmt: skip
    for run, files, error, is_marked in tries:
        asked, _ = settings.read(["--transport=gcloud", "--name=mine", f"--workdir=~/{run}"], {})
        with pytest.raises(PodError, match=error):
            backup.backup(asked, copying(*files), [str(tmp_path / "backup")])
        assert (tmp_path / "backup" / "backup.json").exists() == is_marked


def test_a_backup_has_a_summary_only_if_the_run_has_finished(tmp_path):
    """A run that was continued after the first backup has none."""
    summary = tmp_path / "summary.txt"

    def copying(content: str = "", error: str = ""):
        def copy(source, target, worker):
            if content:
                summary.write_text(content)
            if error:
                raise PodError(error)

        return types.SimpleNamespace(num_workers=1, describe=lambda: None, copy=copy)

    asked, _ = settings.read(["--transport=gcloud", "--name=mine", "--workdir=~/run"], {})
    backup.backup(asked, copying("finished"), [str(tmp_path)])
    with pytest.raises(PodError, match="no such pod"):
        backup.backup(asked, copying(error="no such pod"), [str(tmp_path)])
    dry, _ = settings.read(["--transport=gcloud", "--name=mine", "--workdir=~/run", "--dry_run"], {})
    backup.backup(dry, copying(), [str(tmp_path)])
    assert summary.read_text() == "finished", "nothing was copied"
    with pytest.raises(PodError, match="cut short"):
        backup.backup(asked, copying("again", "cut short"), [str(tmp_path)])
    assert summary.read_text() == "again"
    backup.backup(asked, copying(), [str(tmp_path)])
    assert not summary.exists()


def test_the_default_folder_of_backups_must_be_this_users(tmp_path, monkeypatch):
    """In /tmp another user could have made it, with links to files of this one."""
    monkeypatch.setattr(backup, "BACKUP", str(tmp_path / "backup"))
    asked, _ = settings.read(["--transport=gcloud", "--name=mine", "--workdir=~/run"], {})
    there = types.SimpleNamespace(num_workers=1, describe=lambda: None, copy=lambda *places, worker: None)
    backup.backup(asked, there, [])
    assert (tmp_path / "backup").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: (tmp_path / "backup").stat().st_uid + 1)
    with pytest.raises(PodError, match="backup is not a folder of this user"):
        backup.backup(asked, there, [])


@pytest.mark.parametrize(("typed", "folder"), [([], "/launched/tiny"), (["--workdir=/mine"], "/mine")])
def test_a_backup_is_of_the_launched_run_unless_another_is_typed(tmp_path, monkeypatch, typed, folder):
    asked, _ = settings.read(["--transport=gcloud", "--name=mine", *typed], {})
    monkeypatch.setattr(records, "launched", lambda _: True)
    monkeypatch.setattr(records, "read", lambda _: LAUNCH | {"workdir": "/launched/tiny"})
    copied = []
    there = types.SimpleNamespace(
        num_workers=1, describe=lambda: None, copy=lambda source, target, worker: copied.append(source)
    )
    backup.backup(asked, there, [str(tmp_path)])
    assert copied == [f"mine:{folder}/*"]
