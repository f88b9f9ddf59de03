# SPDX-License-Identifier: Apache-2.0
"""How a process ends: in one line that a terminal can show, also after a signal, from a thread, or with a hung disk."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from tests.support import ROOT

BEGINS = """
import signal, sys, threading, time
from core import ending
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
def wait():  # in short sleeps: a signal just before a long one would not interrupt it
    for _ in range(600):
        time.sleep(0.1)
"""
FAILS_IN_A_THREAD = """
from cluster.hub import RunError
def fail():
    raise RunError("no step ended within 900 s")
"""


def started(program: str, output: int = subprocess.PIPE) -> subprocess.Popen:
    """Start a Python program that begins with the imports above."""
    words = [sys.executable, "-c", f"{BEGINS}{program}"]
    environment = os.environ | {"TERM": "xterm"}
    return subprocess.Popen(words, cwd=ROOT, env=environment, text=True, stdout=output, stderr=output)


def test_the_last_line_has_no_character_that_a_terminal_obeys():
    """A name of a file may be a stranger's."""
    process = started('ending.install(); raise ValueError("a\\033[2J")')
    assert process.communicate()[1].splitlines()[-1].startswith("error: ValueError: a\ufffd[2J (")


def test_the_last_line_names_the_place_of_a_syntax_error(tmp_path):
    """And not the importing code of Python."""
    (tmp_path / "mine.py").write_text("x = 1\ny = (\n")
    process = started(f"ending.install(); sys.path.insert(0, {str(tmp_path)!r}); import mine")
    assert f"({tmp_path}/mine.py:2" in process.communicate()[1].splitlines()[-1]


def test_output_in_an_encoding_without_a_character_has_its_number():
    """A run whose sample could not be printed would never end well."""
    words = [sys.executable, "-c", f'{BEGINS}ending.install(); print("\ufffd!")']
    done = subprocess.run(words, cwd=ROOT, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"\\ufffd!\n")
    environment = os.environ | {"PYTHONIOENCODING": "ascii:replace"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True)
    assert done.stdout == b"?!\n", "as asked for"


@pytest.mark.parametrize(
    ("output", "more", "line"),
    [
        ("/dev/full", "", "error: standard output: No space left on device\n"),
        ("", "", "error: the program that reads this output has closed it\n"),
        ("", "startup.drop_native_stdout();", "error: the program that reads this output has closed it\n"),
    ],
)
def test_output_that_cannot_be_written_at_the_end_is_one_line(output, more, line):
    """Short output is written only then, and Python would end with 120. In a group, stdout has another number."""
    if output:
        out = os.open(output, os.O_WRONLY)
    else:
        unread, out = os.pipe()
        os.close(unread)
    words = [sys.executable, "-c", f'{BEGINS}from cluster import startup; ending.install(); {more} print("done")']
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(words, cwd=ROOT, env=environment, text=True, stdout=out, stderr=subprocess.PIPE)
    os.close(out)
    assert (done.returncode, done.stderr) == (1, line)


def test_a_process_that_ends_from_a_thread_gives_the_terminal_back():
    program = f"""{FAILS_IN_A_THREAD}
from reporting.display import Display
ending.install()
with Display(100) as display:
    threading.Thread(target=fail).start()
    time.sleep(60)
"""
    terminal, end = pty.openpty()
    process = started(program, output=end)
    os.close(end)
    shown = b""
    while part := _read(terminal):
        shown += part
    os.close(terminal)
    assert process.wait() == 1
    assert shown.count(b"\033[?25l") == shown.count(b"\033[?25h") == 1, "the cursor is hidden, and shown again"
    assert shown.rstrip().endswith(b"error: no step ended within 900 s")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the program has ended
        return b""


def test_a_python_program_ends_when_a_thread_says_that_its_run_cannot_go_on():
    """Its run would hang, or write to a bucket that another run has taken over."""
    begin = "ending.threads_end_the_process()\nthreading.Thread(target=fail).start()"
    process = started(f"{FAILS_IN_A_THREAD}{begin}\ntime.sleep(60)")
    assert process.communicate() == ("", "error: no step ended within 900 s\n") and process.returncode == 1


def test_a_thread_hook_of_the_callers_own_stays():
    program = f"""{FAILS_IN_A_THREAD}
threading.excepthook = lambda args: print("mine", args.exc_value)
ending.threads_end_the_process()
threading.Thread(target=fail).start()
"""
    assert started(program).communicate() == ("mine no step ended within 900 s\n", "")


def test_a_log_on_a_disk_that_hangs_does_not_keep_a_process_alive(tmp_path):
    os.mkfifo(tmp_path / "log")  # to open it for writing waits for a reader
    process = started(f"""
import logging
from files import stacks
stacks.SECONDS = 0.2
ending.LOG.addHandler(logging.FileHandler({str(tmp_path / "log")!r}, delay=True))
threading.Thread(target=ending.with_the_others, args=["process 1 of 2 died", 1]).start()
time.sleep(60)
""")
    assert process.communicate(timeout=30)[1] == "error: process 1 of 2 died\n" and process.returncode == 1


def test_the_loss_of_the_terminal_interrupts_as_sigterm_does():
    process = started("ending.install(); print('ready', flush=True); wait()")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    assert process.communicate()[1].startswith("interrupted") and process.returncode == 75


def test_nohup_outlives_the_terminal():
    program = "signal.signal(signal.SIGHUP, signal.SIG_IGN); ending.install(); signal.raise_signal(signal.SIGHUP)"
    process = started(f"{program}; print('lives')")
    assert process.communicate() == ("lives\n", "") and process.returncode == 0


def test_a_run_whose_terminal_is_gone_ends_as_any_interrupted_one():
    """Nothing more can be written there, and the bar cannot be removed."""
    terminal, end = pty.openpty()
    process = started(
        """
from reporting.display import Display
ending.install()
with Display(100) as display:
    wait()
""",
        output=end,
    )
    os.close(end)
    shown = b""
    while b"compiling the step" not in shown and (part := _read(terminal)):
        shown += part
    os.close(terminal)
    process.send_signal(signal.SIGHUP)
    assert process.wait() == 75


@pytest.mark.parametrize(
    "use",
    [
        "list(in_threads(read, range(1, 9), 2))",
        "import contextlib\nwith contextlib.closing(in_threads(read, range(9), 2)) as results:\n"
        "    for result in results: wait()",
    ],
    ids=["waiting for a result", "using a result"],
)
def test_an_interruption_does_not_wait_for_reads_under_way(use):
    """They may take minutes on a slow network."""
    process = started(
        """
from input_pipeline.threads import in_threads
ending.install()
def read(number):
    if number:
        print("reading", flush=True)
        time.sleep(60)
USE
""".replace("USE", use)
    )
    assert process.stdout.readline().startswith("reading")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75 and time.monotonic() - began < 20
    process.communicate()
