# SPDX-License-Identifier: Apache-2.0
"""Commands that are started with a Python without packages."""

import shlex
import shutil
import subprocess
import sys

import pytest

from core import interpreter
from tests.support import ROOT

BARE = [sys._base_executable, "-I"]  # the interpreter that .venv was made from: it has no packages
COMMANDS = {
    "train.py --config=configs/tinny.py": "did you mean configs/tiny.py?",
    "pod.py helpp": "did you mean help?",
    "scripts/list_runs.py {nothing}": "There are no runs below",
    "scripts/deploy_optimizations.py --sequence-length=x": "--sequence-length=x",
    "examples/plot_run.py": "usage",
}


@pytest.fixture(scope="module")
def bare() -> str:
    """A Python in which absl cannot be imported."""
    done = subprocess.run([*BARE, "-c", "import absl"], capture_output=True)
    if done.returncode == 0:
        pytest.skip("the Python that .venv was made from has the packages itself")
    return BARE[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_another_python_runs_in_the_workspaces(command, bare, tmp_path):
    words = command.format(nothing=tmp_path).split()
    done = subprocess.run([bare, *words], cwd=ROOT, capture_output=True, text=True)
    assert COMMANDS[command] in done.stdout + done.stderr


def test_arguments_and_exit_status_stay_what_they_are(bare, tmp_path):
    done = subprocess.run(
        [bare, "-X", "dev", "-m", "examples.tpu_v4_32_training", "--steps=0", f"--workdir={tmp_path} x"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: --steps=0")


def test_without_an_environment_one_line_says_what_to_run(bare, tmp_path):
    (tmp_path / "core").mkdir()
    shutil.copy(ROOT / "core" / "interpreter.py", tmp_path / "core")
    (tmp_path / "command.py").write_text(
        "from core import interpreter\ntry:\n    import absl\nexcept ModuleNotFoundError as e:\n"
        "    interpreter.restart(e)\n"
    )
    done = subprocess.run([bare, "command.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "error: Python package absl is not installed here; run `make setup`, then .venv/bin/python\n"
    )


STOPS = {  # arguments and standard input: no program can be started again from the second, and -S hides all packages
    "a program from standard input": (["-"], "import train; print('went on')"),
    "without site-packages": (["-S", "train.py"], ""),
}


@pytest.mark.parametrize("case", STOPS)
def test_where_starting_again_would_not_help_one_line_says_what_to_run(bare, case):
    words, program = STOPS[case]
    done = subprocess.run([bare, *words], input=program, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.endswith("is not installed here; run `make setup`, then .venv/bin/python\n")


def test_a_command_is_named_so_that_it_works_in_the_current_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert interpreter.call_of("generate.py") == ".venv/bin/python generate.py"
    elsewhere = tmp_path / "deleted"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert shlex.split(interpreter.call_of("generate.py")) == [f"{ROOT}/.venv/bin/python", f"{ROOT}/generate.py"]
    elsewhere.rmdir()
    assert shlex.split(interpreter.call_of("generate.py"))[1] == f"{ROOT}/generate.py"
