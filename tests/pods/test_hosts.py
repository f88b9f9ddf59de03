# SPDX-License-Identifier: Apache-2.0
"""The commands of the hosts, run by a shell in a folder that plays a host's home."""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import shlex
import subprocess
import sys
import time

import pytest

from pods import hosts, settings, watch

SAVES = 'trap "exit 75" TERM; echo started; while :; do sleep 0.05; done'  # as train.py: 75 after SIGTERM
HANGS = 'trap "" TERM; while :; do sleep 0.05; done'


class Host:
    """Worker 3 of a pod."""

    def __init__(self, home: pathlib.Path):
        self.home, self.code = home, home / "torus"
        self.settings, _ = settings.read(["--grace_seconds=1"], {})

    def run(self, command: str, shell: str = "bash") -> subprocess.CompletedProcess:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "POD_WORKER": "3",
            "GIT_CONFIG_GLOBAL": "/dev/null",
        }
        return subprocess.run([shell, "-c", command], cwd=self.home, env=environment, capture_output=True, text=True)

    def launch(self, *words: str, **options) -> subprocess.CompletedProcess:
        return self.run(hosts.launch(self.settings, words, **options))

    def status(self, heartbeat: str = "") -> dict:
        return json.loads(self.run(hosts.status_line(self.settings, heartbeat)).stdout)

    def wait_for_log(self, text: str, name: str = "train_worker_3.out") -> None:
        end = time.monotonic() + 20
        while text not in (self.code / "logs" / name).read_text():
            assert time.monotonic() < end, text
            time.sleep(0.02)


STUB = """#!/bin/sh
[ "$1" = checkout ] && exit 1
[ "$1" = -c ] && [ "${0##*/}" = python3 ] && exit 0
exit 0
"""


# Each makes the file CANARY where a shell takes any part of it for a command.
HOSTILE = (
    "$(touch CANARY)", "`touch CANARY`", "; touch CANARY;", "'; touch CANARY; '", '"; touch CANARY; "',
    "|touch CANARY&\ntouch CANARY\n#*?[]{}~!<>\\",
)  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_no_setting_is_a_command_on_a_host(tmp_path, text):
    """Every text that can reach a host's shell: settings, addresses of code, words, variables, a launch's record."""
    text, host, tools = text.replace("CANARY", str(tmp_path / "canary")), Host(tmp_path), tmp_path / "bin"
    tools.mkdir()
    for name in ("git", "make", "python3", "curl", "setsid", "gcloud"):
        (tools / name).write_text(STUB)
        (tools / name).chmod(0o755)
    fields = {name: text for name, field in settings.FIELDS.items() if isinstance(field.default, str)}
    for repo_dir, activate in ((f"~/{text}", ""), (f"{tmp_path}/{text}", text)):
        given = dataclasses.replace(host.settings, **fields | {"repo_dir": repo_dir, "venv_activate": activate})
        commands = [
            hosts.setup(given, text, "0" * 40),
            hosts.setup(given, "url", text),
            hosts.launch(given, [text, text], environment={text: text}, log="log"),
            hosts.launch(given, [text], environment={text: hosts.WORKER_NUMBER}, log=text),
            hosts.status_line(given, watch.heartbeat_path(text)),
            hosts.status_line(given, watch.heartbeat_path(f"gs://{text}/{text}")),
            hosts.tail(given, follow=False),
            hosts.stop(given),
            hosts.count_devices(given),
            hosts.protect_secrets(given),
            hosts.read_command(given, text, "metrics.jsonl"),
            hosts.read_command(given, f"gs://{text}/{text}", "metrics.jsonl"),
        ]
        for shell in ("bash", "sh"):  # at first without the folder of the code
            for command in commands:
                host.run(f"PATH={tools}:$PATH; {command}", shell)
                assert not (tmp_path / "canary").exists(), command


@pytest.fixture
def host(tmp_path):
    (tmp_path / "torus").mkdir()
    host = Host(tmp_path)
    yield host
    host.run(hosts.stop(host.settings))


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_of_two_that_launch_at_once_one_does(host, shell):
    """The user and `supervise` may both restart; `stop` knows only one process group."""
    command = hosts.launch(host.settings, ["bash", "-c", SAVES])
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        first, second = sorted(threads.map(lambda _: host.run(command, shell).stdout.split(",")[0], range(2)))
    assert (first, second) == ("worker 3: launched", "worker 3: runs already")


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_what_is_launched_outlives_its_shell_and_stop_lets_it_save(host, shell):
    done = host.run(hosts.launch(host.settings, ["bash", "-c", SAVES]), shell)
    assert done.returncode == 0 and "worker 3: launched, process group" in done.stdout, done.stderr
    host.wait_for_log("started\n")
    status = host.status()
    assert status["alive"] is True and status["status"] is None
    assert 0 <= status["now"] - status["started"] < 60 and status["rss_gib"] >= 0
    done = host.run(hosts.stop(host.settings), shell)
    assert (done.returncode, done.stdout) == (0, "worker 3: stopped, exit status 75\n")
    status = host.status()
    assert (status["alive"], status["pid"], status["status"]) == (False, None, 75)
    again = host.run(hosts.stop(host.settings))
    assert (again.returncode, again.stdout) == (0, "worker 3: nothing runs\n")


def test_launching_the_same_again_says_so_and_another_is_refused(host):
    assert host.launch("bash", "-c", SAVES).returncode == 0
    pid = host.status()["pid"]
    again = host.launch("bash", "-c", SAVES)
    assert (again.returncode, again.stdout) == (0, f"worker 3: runs already, process group {pid}\n")
    other = host.launch("true")
    assert other.returncode == 1 and "another program runs" in other.stderr
    assert host.status()["pid"] == pid


def attached(host: Host, shell: str, program: str) -> subprocess.Popen:
    """Run a program as sshd does for a call that waits for it."""
    command = hosts.in_environment(host.settings, hosts.attached(program))
    environment = {"PATH": os.environ["PATH"], "HOME": str(host.home), "POD_WORKER": "3"}
    return subprocess.Popen(
        [shell, "-c", command], cwd=host.home, env=environment, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_a_program_that_a_call_waits_for_is_ended_by_stop(host, shell):
    """As those of `validate`, whose devices it keeps after the end of the call."""
    first = attached(host, shell, "(echo answer; exit 4)")
    assert (first.communicate()[0], first.returncode) == ("answer\n", 4) and host.status()["pid"] is None
    waiting = attached(host, shell, f"bash -c {shlex.quote(SAVES)}")
    assert waiting.stdout.readline() == "started\n" and host.status()["alive"]
    assert "another program runs" in host.launch("true").stderr
    second = attached(host, shell, "echo begun")
    assert (second.communicate()[0], second.returncode) == ("", 1)
    assert host.run(hosts.stop(host.settings)).stdout.startswith("worker 3: stopped")
    waiting.communicate(timeout=20)
    assert waiting.returncode == 75 and host.status()["pid"] is None


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_what_is_known_of_the_last_launch_outlives_a_call_that_waits(host, shell):
    host.launch("sh", "-c", "echo begun; exit 9")
    end = time.monotonic() + 20
    while (before := host.status())["status"] is None or before["alive"]:
        assert time.monotonic() < end
    files = {name: (host.code / name).read_text() for name in ("run.pid", "run.boot", "run.command")}
    os.utime(host.code / "run.pid", (1_700_000_000, 1_700_000_000))
    hangs, stop = f"echo started; {HANGS}", hosts.stop(host.settings, for_good=False)
    killed = [("kill -s KILL -- -{}", "", True), (stop, "", True)]  # a killed one cannot put back the files
    for end, said, is_kept in [(stop, "worker 3: stopped\n", False), ("kill -s PIPE -- -{}", "", False), *killed]:
        waiting = attached(host, shell, f"bash -c {shlex.quote(SAVES if said else hangs)}")
        assert waiting.stdout.readline() == "started\n"
        assert (host.status()["alive"], host.status()["status"]) == (True, None)
        assert host.run(end.replace("{}", str(waiting.pid)), shell).stdout == said
        waiting.communicate(timeout=20)
        now = host.status()
        assert (now["alive"], now["pid"], now["status"], now["started"]) == (False, before["pid"], 9, 1_700_000_000)
        assert (host.code / "run.kept").exists() == is_kept
    last = attached(host, shell, "echo answer")
    assert last.communicate() == ("answer\n", "") and last.returncode == 0
    after = host.status()
    assert (after["pid"], after["status"], after["started"]) == (before["pid"], 9, 1_700_000_000)
    assert {name: (host.code / name).read_text() for name in files} == files
    assert not (host.code / "run.kept").exists()


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_where_nothing_can_be_written_nothing_is_launched(host, shell):
    (host.code / "logs").write_text("a file where the folder should be")
    done = host.run(hosts.launch(host.settings, ["sleep", "600"]), shell)
    assert done.returncode == 1 and "worker 3: cannot write to" in done.stderr and not done.stdout
    assert not (host.code / "run.pid").exists()


def test_what_does_not_end_is_killed_with_all_that_it_started(host):
    host.launch("bash", "-c", f"bash -c '{HANGS}' & {HANGS}")
    time.sleep(0.2)
    pid = host.status()["pid"]
    done = host.run(hosts.stop(host.settings))
    assert (done.returncode, done.stderr) == (1, "worker 3: did not end within 1 s and was killed\n")
    assert (host.status()["status"], host.status()["stopped"]) == (None, True)
    listed = subprocess.run(["ps", "-A", "-o", "pgid=,stat="], capture_output=True, text=True).stdout.splitlines()
    assert [line for line in listed if line.split()[0] == str(pid) and not line.split()[1].startswith("Z")] == []


def test_who_was_stopped_for_good_says_so_until_the_next_launch(host):
    assert host.launch("bash", "-c", SAVES).returncode == 0
    host.wait_for_log("started\n")  # before, SIGTERM would kill it
    assert host.run(hosts.stop(host.settings, for_good=False)).returncode == 0
    assert host.status()["stopped"] is False
    assert host.run(hosts.stop(host.settings)).stdout == "worker 3: nothing runs\n"  # in a pause before a restart
    assert host.status()["stopped"] is True
    assert host.launch("true").returncode == 0 and host.status()["stopped"] is False


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_a_restart_does_not_undo_a_stop_that_came_before_it(host, shell):
    restart = hosts.launch(host.settings, ["bash", "-c", SAVES], unless_stopped=True)
    assert host.run(restart, shell).returncode == 0
    host.wait_for_log("started\n")
    assert host.run(hosts.stop(host.settings), shell).returncode == 0
    done = host.run(restart, shell)
    assert (done.returncode, done.stderr) == (1, "worker 3: the run was stopped by `stop`\n")
    assert (host.status()["alive"], host.status()["stopped"]) == (False, True)


def test_a_program_launched_during_a_stop_can_be_stopped(host, tmp_path):
    """The stop has found nothing, and removes the old run.pid; the launch writes its own after that."""
    slow = tmp_path / "slow" / "rm"
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\n[ "$2" = run.pid ] && touch {tmp_path}/removing && sleep 0.5\nexec /bin/rm "$@"\n')
    slow.chmod(0o755)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        stopping = threads.submit(host.run, f"PATH={slow.parent}:$PATH; {hosts.stop(host.settings)}")
        while not (tmp_path / "removing").exists():
            time.sleep(0.01)
        assert host.launch("bash", "-c", SAVES).returncode == 0
        assert stopping.result().stdout == "worker 3: nothing runs\n"
    assert host.status()["alive"] is True
    host.wait_for_log("started\n")
    assert host.run(hosts.stop(host.settings)).stdout == "worker 3: stopped, exit status 75\n"


def test_a_stop_leaves_the_program_of_a_launch_that_follows_it(host, tmp_path):
    """It looks again 0.2 s after the signal; the old program has ended and the new one has begun meanwhile."""
    slow = tmp_path / "slow" / "sleep"
    slow.parent.mkdir()
    slow.write_text(f"#!/bin/sh\ntouch {tmp_path}/waits\nuntil [ -e {tmp_path}/go ]; do /bin/sleep 0.02; done\n")
    slow.chmod(0o755)
    saves_slowly = SAVES.replace("exit 75", "sleep 0.5; exit 75")
    assert host.launch("bash", "-c", saves_slowly).returncode == 0
    host.wait_for_log("started\n")
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        stopping = threads.submit(host.run, f"PATH={slow.parent}:$PATH; {hosts.stop(host.settings)}")
        end = time.monotonic() + 20
        while time.monotonic() < end and (not (tmp_path / "waits").exists() or host.status()["alive"]):
            time.sleep(0.01)
        assert host.launch("bash", "-c", SAVES).returncode == 0
        (tmp_path / "go").touch()
        assert stopping.result().returncode == 0
    assert host.status()["alive"] is True and host.status()["pid"]


def test_a_program_is_stopped_where_the_lock_cannot_be_opened(host):
    """As on a disk that is full or read-only."""
    assert host.launch("bash", "-c", SAVES).returncode == 0
    host.wait_for_log("started\n")  # before it, the program cannot save
    (host.code / "run.lock").unlink()
    (host.code / "run.lock").mkdir()
    assert host.run(hosts.stop(host.settings), "sh").stdout == "worker 3: stopped, exit status 75\n"


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_without_its_environment_nothing_is_started(host, shell):
    host.settings, _ = settings.read(["--venv_activate=~/none/activate"], {})
    done = host.run(hosts.launch(host.settings, ["sleep", "600"]), shell)
    assert done.returncode != 0 and "none/activate" in done.stderr and list(host.code.iterdir()) == []


def test_the_number_of_a_process_of_an_earlier_boot_is_nobodys(host):
    sleeper = subprocess.Popen(["sleep", "30"], start_new_session=True)
    (host.code / "run.pid").write_text(f"{sleeper.pid}\n")
    (host.code / "run.boot").write_text("an earlier one\n")
    assert host.run(hosts.stop(host.settings)).stdout == "worker 3: nothing runs\n"
    assert sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()


def test_words_variables_and_secrets_arrive_as_they_are(host):
    (host.code / ".env").write_text("HF_TOKEN='it'\\''s a secret'\n")
    (host.code / ".env").chmod(0o644)
    program = (
        "import os, sys; print(sys.argv[1:], *map(os.environ.get, ('A', 'INDEX', 'HF_TOKEN')), sep='|', flush=True)"
    )
    words = [sys.executable, "-c", program, "a b", "$HOME", "it's", "*"]
    done = host.launch(*words, environment={"A": "x $y", "INDEX": hosts.WORKER_NUMBER}, log="train_optimized_worker")
    assert done.returncode == 0
    host.wait_for_log("['a b', '$HOME', \"it's\", '*']|x $y|3|it's a secret\n", "train_optimized_worker_3.out")
    assert (host.code / ".env").stat().st_mode & 0o777 == 0o600
    assert "secret" not in (host.code / "run.command").read_text()


def test_a_heartbeat_goes_into_the_status(host):
    (host.code / "workers").mkdir()
    (host.code / "workers" / "3.json").write_text('{"step": 7}')
    assert host.status("workers/$W.json")["heartbeat"] == {"step": 7}
    assert host.status("workers/none.json")["heartbeat"] is None


def test_tail_shows_the_newest_log(host):
    (host.code / "logs").mkdir()
    missing = host.run(hosts.tail(host.settings, follow=False))
    assert (missing.returncode, missing.stderr) == (1, "worker 3: there is no log yet\n")
    for age, name in ((100, "train_worker_3.out"), (0, "train_optimized_worker_3.out"), (50, "train_worker_4.out")):
        file = host.code / "logs" / name
        file.write_text(f"{name}\n")
        os.utime(file, (time.time() - age,) * 2)
    assert host.run(hosts.tail(host.settings, follow=False)).stdout == "train_optimized_worker_3.out\n"


def test_without_the_code_it_is_told(host):
    host.code.rmdir()
    done = host.launch("true")
    assert (done.returncode, done.stderr) == (1, "worker 3: there is no ~/torus here; `pod.py setup` creates it\n")


def git(folder: pathlib.Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    return subprocess.run(
        ["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A repository whose `make setup` says with what it was called."""
    folder = tmp_path / "origin"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "Makefile").write_text('setup:\n\t@echo "$(ACCELERATOR) $(EXTRAS) $(PYTHON)"\n')
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "one")
    return folder


def test_setup_brings_a_commit_from_nothing_from_a_broken_start_and_again(host, repository):
    def setup(commit):
        return host.run(hosts.setup(host.settings, str(repository), commit))

    first = git(repository, "rev-parse", "HEAD")
    (host.code / ".git").mkdir()  # what an interrupted set-up may leave
    for _ in range(2):
        done = setup(first)
        assert done.returncode == 0, done.stderr
        accelerator, extras, python = done.stdout.splitlines()[0].split()
        assert (accelerator, extras) == ("tpu", "huggingface") and python.startswith("python3")
        assert done.stdout.splitlines()[1] == f"worker 3: {first[:12]} is set up"
    (repository / "more").write_text("x")
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "two")
    second = git(repository, "rev-parse", "HEAD")
    assert setup(second).returncode == 0 and git(host.code, "rev-parse", "HEAD") == second
    missing = setup("1" * 40)
    assert missing.returncode == 1
    assert missing.stderr.splitlines()[-1].startswith(f"worker 3: commit {'1' * 12} is not in {repository}")
    host.launch("true")
    assert git(host.code, "status", "--porcelain") == ""  # run.* and logs/ are not changes
    assert host.status()["commit"] == second and host.status()["changed"] == 0


def test_an_environment_of_the_hosts_is_taken_in_place_of_our_own(host, repository):
    activate = host.home / "my env" / "activate"
    activate.parent.mkdir()
    activate.write_text("export MINE=yes\n")
    host.settings, _ = settings.read(["--venv_activate=~/my env/activate"], {})
    done = host.run(hosts.setup(host.settings, str(repository), git(repository, "rev-parse", "HEAD")))
    assert done.returncode == 0 and "tpu" not in done.stdout
    host.launch("bash", "-c", "echo mine: $MINE")
    host.wait_for_log("mine: yes")
