# SPDX-License-Identifier: Apache-2.0
"""A run is kept going: the verdict of each look, and a real run in which one process is killed."""

import itertools
import json
import os
import signal
import subprocess
import time

import pytest

from pods import launch, records, settings, studies, supervise, watch
from pods.errors import PodError
from pods.transports import Deletion, Result
from pods.watch import Worker
from tests.pods.local_pods import LAUNCH, LocalPod, alive, small_run, wait_until
from tests.pods.recording import Recorder

BEAT = {"step": 7, "phase": "training", "code": "abc", "time": 0.0}
BUILDS = BEAT | {"phase": "building"}


class Pod:
    """A transport with prepared answers, which records the requests."""

    num_workers = 2

    def __init__(self):
        self.described, self.asked = {"state": "READY"}, []

    def describe(self):
        return self.described

    def run(self, command, **options):
        self.asked.append("stop")  # nothing else is run by it
        assert "run.stopped" not in command  # which is for the user's
        return [Result(0, 0, "")]

    def delete(self):
        self.asked.append("delete")
        return Deletion("deleted")

    def __getattr__(self, name):
        def ask():
            self.asked.append(name)
            return name

        return ask


@pytest.fixture
def looks(monkeypatch):
    """What the next looks find, and what was launched again; the last one stays."""
    found, launched = [], []
    monkeypatch.setattr(supervise, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(records, "launched", lambda _: True)
    monkeypatch.setattr(records, "read", lambda _: launched[-1] if launched else LAUNCH)
    monkeypatch.setattr(watch, "look", lambda *_: found.pop(0) if len(found) > 1 else found[0])
    monkeypatch.setattr(launch, "start", lambda settings, transport, record, **_: launched.append(record) or 0)
    return found, launched


def supervisor(*flags: str) -> supervise.Supervisor:
    asked, _ = settings.read(["--transport=local", "--poll_seconds=0", "--name=mine", *flags], {})
    return supervise.Supervisor(asked, Pod(), LAUNCH)


def workers(**second) -> list[Worker]:
    """Return two that are well, the second changed."""
    well = {"alive": True, "launched": True, "heartbeat": BEAT, "age": 1.0}
    return [Worker(0, **well), Worker(1, **(well | second))]


def ended(status: int | None, **changes) -> dict:
    return {"alive": False, "status": status} | changes


FINISHED = [Worker(n, launched=True, status=0) for n in range(2)]


@pytest.mark.parametrize(
    ("found", "end", "trouble"),
    [
        (workers(), None, ""),
        (FINISHED, 0, ""),
        (workers(**ended(0)), None, ""),  # the other one will end, too
        (workers(**ended(3)), 3, "worker 1 ended with status 3"),
        (workers(**ended(2)), 2, "worker 1 ended with status 2"),
        (workers(**ended(1)), None, "worker 1 ended with status 1"),
        (workers(**ended(None)), None, "worker 1 died and left no exit status"),
        (workers(age=9999.0), None, "worker 1 hangs: step 7 was 9999 s ago"),
        ([*workers()[:1], *workers(age=9999.0)[1:], Worker(2, alive=True, launched=True, heartbeat=BUILDS, age=9.0)],
         None, ""),  # who waits for one that builds what was lost
        (workers(heartbeat=BUILDS, age=9999.0), None, ""),  # ended by itself, whose watchdog knows more
        ([Worker(n, launched=True, status=75) for n in range(2)], None, "all workers were interrupted"),
        ([Worker(n, stopped=True, status=75) for n in range(2)], 75, "the run was stopped by `stop`"),
        # `stop` is still at it; it had to kill; what it ended does not save
        ([Worker(n, launched=True, stopped=True, status=75) for n in range(2)], 75, "the run was stopped by `stop`"),
        (workers(stopped=True), 75, "the run was stopped by `stop`"),
        ([Worker(n, stopped=True) for n in range(2)], 75, "the run was stopped by `stop`"),
        (workers(stopped=True, **ended(143)), 75, "the run was stopped by `stop`"),
        ([Worker(n, launched=True, stopped=True, status=0) for n in range(2)], 0, ""),  # too late
        ([Worker(n, launched=False, status=75) for n in range(2)], None, "nothing runs"),  # ended by supervise itself
        ([Worker(n) for n in range(2)], None, "nothing runs"),
        (workers(reachable=False, error="timed out"), None, ""),  # once may be the network's fault
        ([Worker(0, launched=True, status=1), Worker(1, launched=True, status=137)], None,
         "worker 1 ended with status 137 (signal 9)"),  # who was killed, not who ended because of it
    ],
)  # fmt: skip
def test_what_a_look_comes_to(found, end, trouble):
    verdict = supervisor().judge(found)
    assert (verdict.end, verdict.trouble) == (end, trouble)


OF_STUDY = LAUNCH | {"study": "/shared/trm"}


@pytest.mark.parametrize(
    ("status", "end"),
    [(1, 1), (2, 2), (75, None), (137, None)],  # failed trials and a mistake are final; trials that are left are not
)
def test_how_a_study_ended_decides_whether_it_is_started_again(status, end):
    one = supervise.Supervisor(supervisor().settings, Pod(), OF_STUDY)
    verdict = one.judge([Worker(n, launched=True, status=status) for n in range(2)])
    assert verdict.end == end and bool(verdict.trouble)


def test_another_trial_is_progress_though_its_steps_begin_again(looks, monkeypatch):
    found, launched = looks
    trials = iter(["a/1", "a/1", "a/1", "a/1", "a/2", "a/2", "a/2"])
    progress = {"workdir": "/shared/trm/a", "time": 0.0, "done": 0, "failed": 0, "left": 2}
    monkeypatch.setattr(studies, "_read", lambda *_: progress | {"trial": next(trials, "a/2")})
    found += [workers(heartbeat=BEAT | {"step": 900}), workers(**ended(137, heartbeat=BEAT))]
    given = supervisor("--max_restarts=3").settings
    assert supervise.Supervisor(given, Pod(), OF_STUDY).run() == 1 and len(launched) == 3 + 3


def test_a_few_steps_are_no_progress():
    """Else a run that always dies after its first step would be restarted for ever."""
    one = supervisor()
    for step, restarts in ((100, 0), (100 + supervise.PROGRESS_STEPS - 1, 2), (100 + supervise.PROGRESS_STEPS, 0)):
        one.restarts = 2
        one._note_progress(workers(heartbeat=BEAT | {"step": step}), "")
        assert one.restarts == restarts, step


def test_a_worker_that_stays_unreachable_is_trouble():
    one, away = supervisor(), workers(reachable=False, error="timed out")
    verdicts = [one.judge(found) for found in (away, away, workers(), away, away, away)]  # once it answers between
    assert [bool(verdict.trouble) for verdict in verdicts] == [False] * 5 + [True]


def test_who_cannot_look_says_so_once_while_it_lasts(looks, capfd):
    one = supervisor()

    def fail():
        raise PodError("gcloud: reauthentication needed")

    one.transport.describe = fail
    assert [one.look() for _ in range(5)] == [supervise.Verdict()] * 5
    (alert,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("ALERT")]
    assert alert == "ALERT: mine: the run is unsupervised, because gcloud fails: gcloud: reauthentication needed"


def test_a_death_stops_the_rest_and_starts_all_again(looks, capfd):
    found, launched = looks
    found += [workers(), workers(**ended(137)), workers(), FINISHED]
    one = supervisor()
    assert one.run() == 0 and len(launched) == 1 and one.transport.asked == ["stop"]
    assert "ALERT: mine: worker 1 ended with status 137 (signal 9); restart 1 of 10" in capfd.readouterr().err


def test_a_program_that_is_launched_from_another_terminal_is_supervised(looks, capfd):
    """A restart of the one before would take its place, and that of its record."""
    found, launched = looks
    other = LAUNCH | {"words": ["sleep", "2002"], "time": 1.0}
    launched.append(other)
    found += [workers(**ended(1)), FINISHED]
    one = supervisor()
    one.restarts = 3
    assert one.run() == 0 and [record["words"] for record in launched] == [other["words"]] * 2
    assert one.restarts == 1 and "launched meanwhile: launch, " in capfd.readouterr().out


def test_a_restart_by_somebody_else_during_the_pause_is_left_alone(looks, monkeypatch):
    found, launched = looks
    found += [workers(**ended(1)), FINISHED]
    one = supervisor()
    monkeypatch.setattr(supervise, "_pause", lambda tries: launched.append(LAUNCH | {"time": 1.0}) or 0.0)
    assert one.run() == 0 and len(launched) == 1 and not one.transport.asked, "nothing is stopped"


def test_a_full_disk_here_fails_one_restart(looks, monkeypatch, capfd):
    found, launched = looks
    found += [workers(**ended(1)), workers(**ended(1)), FINISHED]
    start, failures = launch.start, [OSError(28, "No space left on device")]

    def starts(*given, **options):
        if failures:
            raise failures.pop()
        return start(*given, **options)

    monkeypatch.setattr(launch, "start", starts)
    assert supervisor().run() == 0 and len(launched) == 1
    assert "restart failed: [Errno 28] No space left on device" in capfd.readouterr().err


def test_a_pod_that_somebody_made_between_two_tries_is_kept(looks, monkeypatch):
    one = supervisor()
    one.transport.described = None

    def create():
        one.transport.asked.append("create")
        if one.transport.described is None:
            one.transport.described = {"state": "READY"}
            raise STOCK_OUT
        return "exists already"

    monkeypatch.setattr(one.transport, "create", create, raising=False)
    one.create_again()
    assert one.transport.asked == ["delete", "create", "create", "wait"]


def test_a_pod_that_comes_after_delete_is_deleted(looks, monkeypatch):
    one, there = supervisor(), [True]
    monkeypatch.setattr(records, "launched", lambda _: there[0])
    monkeypatch.setattr(one.transport, "wait", lambda: there.clear() or there.append(False) or "ready", raising=False)
    with pytest.raises(PodError, match="the pod was deleted by `delete`"):
        one.create_again()
    assert one.transport.asked == ["delete", "create", "delete"]


@pytest.mark.parametrize("state", ["PREEMPTED", "UNKNOWN", None])
def test_a_pod_that_was_taken_away_is_made_again(looks, state):
    found, launched = looks
    found += [FINISHED]
    one = supervisor()
    one.transport.described = {"state": state} if state else None
    create = one.create_again

    def come_back():
        create()
        one.transport.described = {"state": "READY"}

    one.create_again = come_back
    assert one.run() == 0 and len(launched) == 1
    assert one.transport.asked == ["delete", "create", "wait", "put_code"]


STOCK_OUT = PodError("gcloud compute tpus tpu-vm create: There is no more capacity in the zone")


def test_a_pod_that_no_zone_can_give_back_yet_is_waited_for_without_a_restart(looks, monkeypatch, capfd):
    found, launched = looks
    found += [FINISHED]
    one, failures = supervisor("--max_restarts=1"), [STOCK_OUT] * 20
    one.transport.described = None

    def create():
        if failures:
            raise failures.pop()
        one.transport.described = {"state": "READY"}
        return "created"

    monkeypatch.setattr(one.transport, "create", create, raising=False)
    assert one.run() == 0 and len(launched) == 1 and one.restarts == 1
    said = capfd.readouterr().err
    assert said.count("no pod yet: gcloud compute tpus tpu-vm create: There is no more capacity") == 20
    assert said.count("ALERT") == 1


@pytest.mark.parametrize(
    ("failure", "wait"), [(STOCK_OUT, 0), (PodError("Quota limit exceeded"), 60), (PodError("no VERSION", 2), 60)]
)
def test_a_creation_that_fails_for_good_is_a_restart(looks, monkeypatch, capfd, failure, wait):
    """After wait_seconds, or for a reason that time does not change."""
    one, tries = supervisor("--max_restarts=3", f"--wait_seconds={wait}"), []
    one.transport.described = None

    def create():
        tries.append(failure)
        raise failure

    monkeypatch.setattr(supervise, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(one.transport, "create", create, raising=False)
    assert one.run() == 1 and len(tries) == 3
    assert "supervise gives up after 3 restarts without progress" in capfd.readouterr().err


def test_the_pauses_between_two_tries_grow_to_a_limit():
    pauses = [supervise._pause(tries) for tries in (1, 2, 3, 9, 10, 2000)]
    assert pauses == [2, 4, 8, 512, 600, 600]


@pytest.mark.parametrize(
    "described",
    [{"state": "REPAIRING"}, {"state": "RESTARTING"}, {"state": "STARTING"},
     {"state": "READY", "health": "UNHEALTHY_MAINTENANCE"}],
)  # fmt: skip
def test_what_google_repairs_is_waited_for_and_said_once(looks, monkeypatch, capfd, described):
    found, launched = looks
    found += [workers(reachable=False, error="timed out")]
    one, polls = supervisor("--max_restarts=1"), []

    def sleep(_):
        polls.append(1)
        if len(polls) == 9:
            one.transport.described, found[:] = {"state": "READY", "health": "HEALTHY"}, [FINISHED]

    one.transport.described = described
    monkeypatch.setattr(time, "sleep", sleep)
    assert one.run() == 0 and (launched, one.restarts, len(polls)) == ([], 0, 9)
    said = f"the pod is {list(described.values())[-1]}; waiting until it is READY"
    assert capfd.readouterr().err.count(said) == 1


@pytest.mark.parametrize(
    ("described", "trouble", "looks_more"),
    [({"state": "REPAIRING"}, "the pod is still REPAIRING", 1),
     ({"state": "READY", "health": "UNHEALTHY_MAINTENANCE"}, "worker 1 is unreachable: timed out", 3)],
)  # fmt: skip
def test_a_repair_that_does_not_end_is_trouble(looks, monkeypatch, described, trouble, looks_more):
    looks[0].append(workers(reachable=False, error="timed out"))
    one, now, alerts = supervisor("--wait_seconds=100"), [1000.0], []
    one.transport.described = described
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(one, "alert", alerts.append)
    one.blind, one.unreachable, one.mixed_since = 2, 2, 5.0
    assert [one.look() for _ in range(5)] == [supervise.Verdict()] * 5
    assert (one.blind, one.unreachable, one.mixed_since) == (0, 0, None)
    now[0] += 100
    verdicts = [one.look() for _ in range(looks_more)]
    assert [verdict.trouble for verdict in verdicts] == [""] * (looks_more - 1) + [trouble]
    assert verdicts[-1].lost == (described["state"] != "READY") and len(alerts) == 1


def test_a_run_of_a_maintained_pod_can_end(looks):
    found, _ = looks
    one = supervisor()
    one.transport.described = {"state": "READY", "health": "UNHEALTHY_MAINTENANCE"}
    for ending, status in ((FINISHED, 0), (workers(**ended(3)), 3), ([Worker(n, stopped=True) for n in range(2)], 75)):
        found[:] = [ending]
        assert one.look().end == status
    for interrupted in (workers(**ended(137)), [Worker(n, launched=True, status=75) for n in range(2)]):
        found[:] = [interrupted]
        assert one.look() == supervise.Verdict()


def test_code_whose_installation_failed_is_installed_by_the_next_restart(looks, monkeypatch):
    found, launched = looks
    found += [workers(**ended(1)), FINISHED]
    one, failures = supervisor(), [PodError("pip cannot reach the index")]
    one.transport.described = None

    def put_code():
        one.transport.described = {"state": "READY"}
        one.transport.asked.append("put_code")
        if failures:
            raise failures.pop()

    monkeypatch.setattr(one.transport, "put_code", put_code, raising=False)
    assert one.run() == 0 and len(launched) == 1
    assert one.transport.asked == ["delete", "create", "wait", "put_code", "stop", "put_code"]


def test_a_reimaged_pod_gets_its_code_again(looks, monkeypatch):
    found, launched = looks
    found += [workers(reachable=False, error="there is no ~/torus here")] * 3 + [FINISHED]
    one = supervisor()
    states = iter(["REIMAGING"])
    monkeypatch.setattr(one.transport, "describe", lambda: {"state": next(states, "READY")})
    assert one.run() == 0 and len(launched) == 1 and one.transport.asked == ["stop", "put_code"]


def test_restarts_are_bounded_and_progress_forgets_them(looks, capfd):
    found, launched = looks
    found += [workers(**ended(1))]
    one = supervisor("--max_restarts=3")
    assert one.run() == 1 and len(launched) == 3
    assert "supervise gives up after 3 restarts without progress" in capfd.readouterr().err
    found[:] = [workers(**ended(1))] * 2 + [workers(heartbeat=BEAT | {"step": 90})] + [workers(**ended(1))] * 9
    launched.clear()
    assert supervisor("--max_restarts=3").run() == 1 and len(launched) == 2 + 3


def test_a_pod_that_was_given_back_is_not_made_again(looks, monkeypatch):
    found, launched = looks
    found += [workers(**ended(1))]
    one, kept = supervisor(), [False]
    one.transport.described = None
    monkeypatch.setattr(records, "launched", lambda _: kept[0])
    assert one.run() == 75 and (launched, one.transport.asked) == ([], [])
    kept[0] = True
    monkeypatch.setattr(time, "sleep", lambda _: kept.__setitem__(0, False))  # in the pause
    assert one.run() == 75 and (launched, one.transport.asked) == ([], [])


def test_a_queued_spot_pod_comes_back_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "FIRST_PAUSE_SECONDS", 0.0)
    gcloud = Recorder(tmp_path)
    options = "--network=n --internal_ips --labels=a=b --metadata=c=d --data_disk=source=d --valid_until_duration=6h"
    made = gcloud.run("create", "--queued", "--spot", "--queued_resource=q", *options.split(), "--accel=v4-16")
    assert made.status == 0, made.stderr
    record = LAUNCH | {"accelerator": "v4-16"}
    (tmp_path / "pods" / "torus" / "launch.json").write_text(json.dumps(record))
    words = ("supervise", "--max_restarts=1", "--labels=e=f", "--repo_url=https://example.com/torus")
    done = gcloud.run(*words, FAKE_NODE_STATE="PREEMPTED", FAKE_HOSTS="2")
    assert done.status == 1 and "the pod is PREEMPTED; supervise gives up after 1 restart without" in done.stderr
    again = [argv for argv in done.argvs if argv[2:4] == ["queued-resources", "create"]]
    before = [word.replace("a=b", "e=f") for word in made.argvs[0]]
    assert [argv[:-1] for argv in again] == [before[:-1]] and "--spot" in again[0]
    assert before[-1].startswith("--metadata-from-file=torus-run-secret=/") and before[-1] != again[0][-1]
    assert ["queued-resources", "delete", "q"] in [argv[2:5] for argv in done.argvs]


def test_the_zone_of_another_terminal_makes_no_second_pod(tmp_path):
    """There the pod seems to be gone, while it runs and costs."""
    gcloud = Recorder(tmp_path)
    gcloud.run("create", ACCEL="v4-8", ZONE="za")
    (tmp_path / "pods" / "torus" / "launch.json").write_text(json.dumps(LAUNCH))
    done = gcloud.run("supervise", ZONE="zb", FAKE_HOSTS="0")
    assert done.status == 2 and "was created with ZONE=za, but here ZONE=zb; type --zone=za" in done.last_line
    done = gcloud.run("supervise", "--zone=zb", "--max_restarts=0", FAKE_HOSTS="0")
    assert "the pod is gone" in done.stderr


def test_a_restart_that_fails_is_tried_again(looks, monkeypatch, capfd):
    found, _ = looks
    found += [workers(**ended(1)), workers(**ended(1)), FINISHED]
    answers = [PodError("no capacity")]
    monkeypatch.setattr(launch, "start", lambda *_, **__: answers and (_ for _ in ()).throw(answers.pop()))
    assert supervisor().run() == 0
    assert "restart failed: no capacity" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("found_first", "says"),
    [
        (workers(), "the run continues, `stop` ends it"),
        (workers(**ended(1)), "a restart was interrupted, `restart` starts"),
    ],
)
def test_who_ends_it_is_told_whether_anything_runs(found_first, says, looks, monkeypatch, capfd):
    def interrupted(*unused):
        raise KeyboardInterrupt

    looks[0].append(found_first)
    monkeypatch.setattr(time, "sleep", interrupted)  # between two looks, or before a restart
    monkeypatch.setattr(supervise, "connect", lambda _: Pod())
    monkeypatch.setattr(records, "read", lambda _: LAUNCH | {"accelerator": "v4-8"})
    assert supervise.supervise(supervisor().settings, Pod(), []) == 130
    assert says in capfd.readouterr().err


def test_alerts_go_to_the_command_and_its_failure_ends_nothing(looks, tmp_path, capfd):
    found, _ = looks
    found += [workers(**ended(1)), FINISHED]
    assert supervisor(f"--alert=printf '%s' >> {tmp_path}/alerts").run() == 0
    assert (tmp_path / "alerts").read_text().startswith("mine: worker 1 ended with status 1; restart 1 of 10")
    found[:] = [workers(**ended(1)), FINISHED]
    assert supervisor("--alert=false").run() == 0
    assert "--alert=false failed: 1" in capfd.readouterr().err


@pytest.fixture
def pod(tmp_path):
    """A pod of two workers, two simulated chips each."""
    pod = LocalPod(tmp_path)
    assert pod.run("create", "--workers=2", ACCEL="v4-8").status == 0
    yield pod
    pod.end()


@pytest.mark.slow
def test_a_real_pod_that_was_taken_away_comes_back_and_what_the_user_ends_does_not(pod, monkeypatch):
    monkeypatch.setattr(launch, "LOOK_AFTER_SECONDS", 0.2)
    assert pod.run("launch", "--", "sleep", "600").status == 0
    before, description = pod.groups(), pod.folder / "pod.json"
    supervising = pod.start("supervise", "--poll_seconds=0.2")
    assert supervising.stdout.readline().startswith("supervising mine")
    records.write_json(description, json.loads(description.read_text()) | {"state": "PREEMPTED"})  # is read meanwhile
    wait_until(lambda: len(pod.groups()) == 2 and not set(pod.groups()) & set(before), "another launch")
    assert not any(map(alive, before)) and all(map(alive, pod.groups()))
    made = json.loads(description.read_text())
    assert (made["state"], made["acceleratorType"], made["workers"]) == ("READY", "v4-8", 2)
    assert end_in_the_pause(pod, supervising, 2, "stop").startswith(
        "ALERT: mine: the pod is PREEMPTED; restart 1 of 10"
    )

    assert pod.run("launch", "--", "sleep", "600").status == 0
    supervising = pod.start("supervise", "--poll_seconds=0.2")
    end_in_the_pause(pod, supervising, 1, "delete")


def end_in_the_pause(pod: LocalPod, supervising: subprocess.Popen, restart: int, word: str) -> str:
    """Kill a worker, and before it is started again `stop` or `delete`; return what `supervise` said before that."""
    os.killpg(pod.groups()[1], signal.SIGKILL)
    said = list(itertools.takewhile(lambda line: f"restart {restart} of 10" not in line, supervising.stdout))
    groups = pod.groups()
    assert pod.run(word).status == 0
    rest, _ = supervising.communicate(timeout=60)
    assert supervising.returncode == 75 and f"by `{word}`; it is not restarted" in rest, rest
    assert pod.groups() == [] and not any(map(alive, groups))
    return "".join(said)


@pytest.mark.slow
def test_the_life_of_a_run_of_real_processes(pod, tmp_path, monkeypatch):
    """Launched, looked at, stopped; taken up again, one of two killed while supervised; it reaches its last step."""
    monkeypatch.setattr(launch, "LOOK_AFTER_SECONDS", 0.2)

    def begin(steps: int) -> int:
        off = dict.fromkeys(("ENABLE_NEUROPLASTICITY", "ENABLE_CAUSAL", "ENABLE_META_LEARNING"), "false")
        return pod.run("launch_optimized", *small_run(tmp_path, train__steps=steps), DTYPE="f32", **off).status

    assert begin(1000) == 0  # more steps than are taken before it is stopped
    wait_until(pod.steps, "a step")
    looks = []

    def all_beat() -> bool:
        looks.append(pod.status())
        return all((worker["heartbeat"] or {}).get("step") for worker in looks[-1]["workers"])

    wait_until(all_beat, "heartbeats of steps")
    state = looks[-1]
    assert state["problems"] == [] and {worker["process"] for worker in state["workers"]} == {"training"}
    assert state["launched"]["switches"]["on"] == ["ENABLE_TPU_OPT"]

    groups = pod.groups()
    stopped = pod.run("stop")
    assert stopped.status == 0 and stopped.stdout.count("exit status 75") == 2 and not any(map(alive, groups))
    last = pod.steps()[-1]
    checkpoints = pod.folder / "shared" / "tiny" / "checkpoints"
    assert last < 1000 and (checkpoints / str(last)).is_dir()
    assert pod.run("status").status == 0
    assert "train.py" in pod.run("tail", "--worker=0-1", "--lines=500").stdout

    end = last + 3
    assert begin(end) == 0
    supervising = pod.start("supervise", f"--alert=echo >> {tmp_path}/alerts")
    assert supervising.stdout.readline().startswith("supervising mine")
    os.killpg(pod.groups()[1], signal.SIGKILL)
    said, _ = supervising.communicate(timeout=180)
    assert supervising.returncode == 0, said
    assert "worker 1 died and left no exit status; restart 1 of 10" in (tmp_path / "alerts").read_text()
    assert pod.steps()[last:] == [*range(last + 1, end + 1)] and (checkpoints / str(end)).is_dir()
    starts = [line["step"] for line in pod.metrics() if line.get("event") == "start"]
    assert starts == [0, last]  # not from nothing again
    assert {worker["process"] for worker in pod.status()["workers"]} == {"finished"}
    assert pod.run("metrics", "--json").status == 0
    assert time.time() - pod.metrics()[-1]["time"] < 60
