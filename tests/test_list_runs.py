# SPDX-License-Identifier: Apache-2.0
"""`make runs` lists each run with its state, for any content of its folder."""

import fcntl
import json
import subprocess
import sys

import pytest

from tests.support import ROOT

SCRIPT = ROOT / "scripts" / "list_runs.py"


@pytest.fixture
def runs(tmp_path):
    """A folder of four runs: finished, imported, damaged, and one that is training."""

    def make(name: str, lines: list, checkpoint: int | None, record: dict, **files):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"model.name": "decoder_lm"}')
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        if checkpoint is not None:
            (folder / "checkpoints" / str(checkpoint)).mkdir(parents=True)
            (folder / "checkpoints" / str(checkpoint) / "record.json").write_text(json.dumps(record))
        for file, text in files.items():
            path = folder / file.replace("___", "/").replace("__", ".")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return folder

    lines = [{"kind": "train", "step": 20, "loss": 2.5}, {"kind": "eval", "step": 20, "eval_loss": 2.25}]
    started = json.dumps({"command": ["train.py", "--config=a b.py"]})
    make("done", lines, 20, {}, summary__txt="", run__json=started)
    make("deep/imported", [], 0, {"weights_only": []})
    make("torn", [*lines, {"kind": "train", "step": "x"}], 10, {}, run__json="[")
    make("wrong", lines, None, {}, workers___0__json='{"phase": "failed"}')
    (tmp_path / "runs" / "published").mkdir()
    (tmp_path / "runs" / "published" / "config.json").write_text('{"model_type": "llama"}')  # not a run
    with (make("now", lines[:1], None, {}) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield tmp_path / "runs"


def listed(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


def test_each_run_has_its_state_step_losses_and_command(runs):
    done = listed(runs)
    assert done.returncode == 0, done.stderr
    rows = [line.removeprefix(f"{runs}/").split() for line in done.stdout.splitlines()]
    assert rows == [
        ["run", "state", "step", "loss", "held", "out"],
        ["deep/imported", "imported", "-", "-", "-"],
        ["done", "finished", "20", "2.5000", "2.2500"],
        ["train.py", "'--config=a", "b.py'"],
        ["now", "running", "20", "2.5000", "-"],
        ["torn", "stopped", "20", "2.5000", "2.2500"],
        ["wrong", "failed", "20", "2.5000", "2.2500"],
    ]


def test_an_evaluation_is_found_behind_many_steps_and_one_of_abandoned_steps_is_not_shown(runs):
    """The steps since then take more than a MiB."""
    lines = [
        {"kind": "eval", "step": 500, "eval_loss": 2.0}, {"kind": "eval", "step": 900, "eval_loss": 1.0},
        {"kind": "event", "event": "start", "step": 500},
        *({"kind": "train", "step": step, "loss": 3.0, "note": "x" * 500} for step in range(501, 3501)),
    ]  # fmt: skip
    (runs / "torn" / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    row = next(line for line in listed(runs).stdout.splitlines() if line.startswith(f"{runs}/torn"))
    assert row.split()[1:] == ["stopped", "3,500", "3.0000", "2.0000"]


def test_a_run_that_was_stopped_between_logged_steps_is_at_its_checkpoint(runs):
    (runs / "torn" / "checkpoints" / "27").mkdir()
    row = next(line for line in listed(runs).stdout.splitlines() if line.startswith(f"{runs}/torn"))
    assert row.split()[1:] == ["stopped", "27", "2.5000", "2.2500"]


def test_a_name_or_command_is_shown_without_what_a_terminal_would_obey(tmp_path):
    folder = tmp_path / "a\033[31m"
    folder.mkdir()
    (folder / "config.json").write_text('{"model.name": "decoder_lm"}')
    (folder / "run.json").write_text(json.dumps({"command": ["train.py", "\033]52;c;QQ\007"]}))
    shown = listed(tmp_path).stdout
    assert "a\ufffd[31m" in shown and "]52;c;QQ" in shown and "\033" not in shown and "\007" not in shown


def test_a_folder_without_runs_and_one_that_is_not_there(tmp_path):
    assert listed(tmp_path).stdout == f"There are no runs below {tmp_path}. `make train` starts one.\n"
    done = listed(tmp_path / "none")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "not a folder" in done.stderr


@pytest.mark.parametrize("command", ["scripts/list_runs.py", "pod.py help"])
def test_output_that_nobody_reads_any_more_ends_a_list_in_one_line(runs, command):
    words = [sys.executable, *command.split(), *([runs] if "list" in command else [])]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == "error: the program that reads this output has closed it\n"
    assert process.wait() == 1
    process.stderr.close()


def test_a_notebook_that_lists_runs_outlives_a_thread_that_fails(tmp_path):
    program = (
        f"import threading\nfrom scripts import list_runs\nlist_runs.main([{str(tmp_path)!r}])\n"
        "thread = threading.Thread(target=lambda: 1 / 0)\nthread.start()\nthread.join()\nprint('alive')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("alive\n"), done.stderr


def test_help_says_what_it_does():
    assert "List the runs below a folder" in listed("--help").stdout
