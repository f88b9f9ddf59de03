# SPDX-License-Identifier: Apache-2.0
"""What a stranger's machine does to a command: closed streams, no home, another user's cache, a narrow terminal."""

import contextlib
import fcntl
import os
import pathlib
import pty
import shutil
import struct
import subprocess
import sys
import tempfile
import termios

import pytest

from files.atomic import writing
from input_pipeline.cache import cache_path, locked
from input_pipeline.errors import DataError
from tests.checkpointing.test_disk import FILE_BYTES, full_disk
from tests.support import ROOT

NOBODY = 65534
FIRST_FILE = """
import os, sys
from core import ending
ending.install()
with open(sys.argv[1], "w") as file:
    print("to nobody")
    print("to nobody", file=sys.stderr)
    file.write(f"{file.fileno() > 2} {sys.stdin.read()!r}")
"""
DAMAGED = """
import pathlib, sys
import jax
from cluster import compiled_programs
folder = pathlib.Path(sys.argv[1])
jax.config.update("jax_compilation_cache_dir", str(folder))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
compiled_programs.watch(str(folder))
called = jax.jit(lambda x: 3 * x + 1)

def compile_again():
    jax.clear_caches()
    assert called(2.0) == 7

compile_again()
entries = sorted(folder.iterdir())
for path in entries:
    path.write_bytes(path.read_bytes()[:20])
compile_again()
print(len(entries) > 0, sorted(folder.iterdir()) == entries, min(path.stat().st_size for path in entries) > 20)
compile_again()
folder.rename(folder.with_name("moved"))
folder.touch()
called = jax.jit(lambda x: 3 * x + 2 - 1)
compile_again()
"""
PROGRESS = """
import time
from reporting.display import Display
with Display(200_000) as display:
    display.train(20, {"loss": 7.579, "tokens_per_second": 3_287_432.0, "mfu": 0.55, "step_seconds": 2.0})
    time.sleep(0.3)
"""


def test_a_program_whose_streams_are_closed_runs_and_gives_their_numbers_to_no_file(tmp_path):
    words = [sys.executable, "-c", FIRST_FILE, str(tmp_path / "written")]
    subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words], cwd=ROOT, check=True)
    assert (tmp_path / "written").read_text() == "True ''"


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(DataError, match=r"~/.cache/torus: this user has no home folder; set XDG_CACHE_HOME"):
        cache_path("")


@pytest.mark.slow
def test_tensorflow_is_imported_on_a_disk_that_became_full(tmp_path):
    """A run imports it after its first steps."""
    code = """if True:
        from input_pipeline import tensorflow_import
        from tests.checkpointing import test_disk
        test_disk.FILE_BYTES = 0
        with test_disk.full_disk():
            tensorflow_import.tensorflow()
    """
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_cache_on_a_full_disk_is_an_error_of_the_cache(tmp_path):
    refused = pytest.raises(DataError, match=r"File too large; the cache must be writable, on a disk with free space")
    with full_disk(), refused, locked(tmp_path / "shards.lock", print), writing(tmp_path / "shards") as file:
        file.write(bytes(FILE_BYTES + 1))
        file.flush()
    with locked(tmp_path / "shards.lock", print):  # which is free again
        pass


@contextlib.contextmanager
def as_another_user():
    """Be another user than the one whose files there are, where this process may."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_finished_files_of_another_users_cache_are_read_and_others_not_written(tmp_path):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with locked(folder / "shards.lock", print):
            (folder / "shards").write_text("finished")
        (folder / "shards.lock").chmod(0o444)
        folder.chmod(0o555)
        with as_another_user():
            with locked(folder / "shards.lock", print):
                assert (folder / "shards").read_text() == "finished"
            refused = pytest.raises(DataError, match=f"{folder}/other.lock: Permission denied; the cache must be writa")
            with refused, locked(folder / "other.lock", print):
                pytest.fail("it could not be locked")
        folder.chmod(0o755)


def test_a_damaged_compiled_program_is_replaced_and_a_lost_cache_is_one_line(tmp_path):
    words = [sys.executable, "-c", DAMAGED, str(tmp_path / "compiled")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "True True True\n", done.stderr
    read, written = done.stderr.splitlines()
    assert read.startswith(f"a compiled program in {tmp_path}/compiled cannot be read (")
    assert written.startswith(f"compiled programs cannot be kept in {tmp_path}/compiled (")


def test_progress_on_a_terminal_of_60_columns_keeps_the_time_left():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    words = [sys.executable, "-c", PROGRESS]
    with subprocess.Popen(words, cwd=ROOT, stdout=theirs, env=environment | {"TERM": "xterm"}) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # at its end
            while part := os.read(ours, 4096):
                shown += part
    os.close(ours)
    assert process.returncode == 0
    for words in (b"step     20/200000", b"3,287,432 tokens/s", b"4.6", b"days left"):
        assert words in shown


@pytest.mark.slow
def test_a_part_of_a_venv_is_made_again_and_nothing_is_installed_outside(tmp_path):
    """As an interrupted removal left it: its Python is that of the system, and its stamp says that all is installed."""
    for name in ("Makefile", "pyproject.toml", *(path.name for path in ROOT.glob("requirements*.lock"))):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys._base_executable)
    shutil.copy(ROOT / "requirements.lock", tmp_path / ".venv" / "installed-cpu.lock")
    guarded = os.environ | {"PIP_REQUIRE_VIRTUALENV": "1", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    command = ["make", "setup", f"PYTHON={sys._base_executable}"]
    done = subprocess.run(command, cwd=tmp_path, env=guarded, capture_output=True, text=True)
    assert done.returncode != 0 and "could not be installed; the cause is above" in done.stderr, "there is no index"
    assert (tmp_path / ".venv" / "pyvenv.cfg").exists() and not (tmp_path / ".venv" / "installed-cpu.lock").exists()
    assert not (tmp_path / ".venv-removed").exists()
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    assert not (tmp_path / ".venv").exists()
