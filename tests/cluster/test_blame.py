# SPDX-License-Identifier: Apache-2.0
"""The process that blocks a run is found from heartbeats alone, without the clocks of the machines."""

import pytest

from cluster.blame import Heartbeat, Judge, slow, to_blame

PHASES = ("start_up", "compile", "data", "rollout", "step", "wait", "evaluation", "save")


def beat(process: int, phase: str, number: int, stay: float, **more) -> Heartbeat:
    """Return a beat of process 0 on host-a, 1 on host-b and so on, in step 7."""
    given = {"step": 7, "seconds": dict.fromkeys(PHASES, 0.0)} | more
    return Heartbeat(process, f"host-{chr(97 + process)}", phase, number=number, phase_seconds=stay, **given)


WAITING = [beat(0, "wait", 30, 1799.0), beat(1, "wait", 30, 1799.5)]


@pytest.mark.parametrize(
    ("beats", "why", "processes", "text"),
    [
        (
            [*WAITING, beat(2, "data", 28, 1800.0, age=0.9)],
            "behind", (2,), "process 2 (host-c) has been in data of step 7 for 1801 s",
        ),
        (
            [*WAITING, beat(2, "wait", 24, 8.0), beat(3, "wait", 24, 7.0)],
            "behind", (2, 3), "processes 2 (host-c), 3 (host-d) have been in step of step 7 for 7.0 s",
        ),
        (
            [*WAITING, beat(2, "step", 30, 3.0, age=12.0)],
            "silent", (2,), "process 2 (host-c) has sent no heartbeat for 12 s; it was in step of step 7",
        ),
        (
            [*WAITING, beat(2, "save", 9, 3.0), beat(3, "data", 9, 3.0, age=12.0)],
            "silent", (3,), "process 3 (host-d) has sent no heartbeat for 12 s; it was in data of step 7",
        ),
        (
            [WAITING[0], beat(1, "data", 9, 3.0, age=12.0), beat(2, "save", 8, 3.0, age=13.0)],
            "silent", (2, 1),
            "processes 2 (host-c), 1 (host-b) have sent no heartbeat for 12 s; the first was in save of step 7",
        ),
        (
            [beat(0, "data", 9, 3.0, age=60.0), beat(1, "wait", 10, 3.0, age=61.0)],  # the hub was frozen, not they
            "behind", (0,), "process 0 (host-a) has been in data of step 7 for 63 s",
        ),
        ([beat(0, "compile", 1, 0.25)], "together", (0,), "process 0 (host-a) has been in compile for 0.25 s"),
        (
            [beat(0, "start_up", 0, 50.0, waits=True), beat(1, "start_up", 0, 60.0)],
            "behind", (1,), "process 1 (host-b) has been in start-up for 60 s",
        ),
        (
            [beat(number, "wait", 4, 90.0 + number) for number in range(6)],
            "together", (0, 1, 2, 3, 4, 5),
            "processes 0 (host-a), 1 (host-b), 2 (host-c), 3 (host-d) and 2 more have been in step of step 7 for 90 s",
        ),
    ],
)  # fmt: skip
def test_the_silent_and_then_the_last_are_to_blame(beats, why, processes, text):
    blame = to_blame(beats)
    assert (blame.why, blame.processes, blame.text) == (why, processes, text)


def after(steps: int, *spent: dict[str, float], phase: str = "step", first: int = 7) -> list[Heartbeat]:
    """Return the beats of processes that did `steps` steps; each step took the seconds `spent` by phase."""
    return [
        beat(
            process, phase, 100, 0.01, step=first + steps,
            seconds={name: steps * seconds.get(name, 0.0) for name in PHASES},
        )
        for process, seconds in enumerate(spent)
    ]  # fmt: skip


WAITS, DATA = {"data": 0.1, "step": 0.1, "wait": 1.9}, {"data": 1.9, "step": 0.2, "wait": 0.0}
ON_A_CPU = {"data": 0.1, "step": 2.0}  # where giving the devices their work waits for them
SLOW_STEP = {"data": 0.1, "step": 2.0, "wait": 0.0}
HIDDEN = {"data": 0.9, "step": 0.1, "wait": 1.1}  # behind the work of its devices, which the others wait for too


@pytest.mark.parametrize(
    ("spent", "process", "text"),
    [
        ([WAITS, WAITS, DATA], 2, "it spends 1.9 of 2.1 s per step in data; the others wait 86% of the time for it"),
        ([ON_A_CPU, DATA], 1, "it spends 1.9 of 2.1 s per step in data; the others wait 86% of the time for it"),
        (
            [SLOW_STEP, WAITS, WAITS],
            0,
            "it spends 2.0 of 2.1 s per step in step; the others wait 90% of the time for it",
        ),
        ([WAITS, WAITS, HIDDEN], None, ""),
        ([WAITS, WAITS], None, ""),
        ([DATA, DATA], None, ""),
        ([DATA], None, ""),
    ],
)
def test_who_hardly_waits_while_the_others_do_is_slow(spent, process, text):
    found = slow(after(0, *spent), after(5, *spent))
    assert (found is None) == (process is None)
    if found:
        assert found.processes == (process,)
        assert found.text == f"process {process} (host-{chr(97 + process)}) is slow: {text}"


def test_who_is_behind_is_told_again_only_after_twice_the_time():
    judge, told = Judge(), []
    for second in range(50):
        beats = [beat(0, "wait", 30, float(second)), beat(1, "data", 28, second + 0.5)]
        told += [(second, blame.text) for blame in judge.look(beats)]
    assert [second for second, _ in told] == [11, 22, 44]
    assert told[0][1] == "process 1 (host-b) has been in data of step 7 for 12 s; the others have waited 11 s"


def test_one_process_that_gets_on_means_that_nobody_waits():
    beats = [beat(0, "wait", 30, 60.0), beat(1, "data", 28, 61.0), beat(2, "wait", 31, 0.2)]
    assert Judge().look(beats) == []


@pytest.mark.parametrize(("count", "phase", "is_told"), [(1, "data", True), (2, "wait", True), (2, "save", False)])
def test_all_together_are_told_where_it_is_known_how_long_it_usually_takes(count, phase, is_told):
    judge = Judge()
    assert judge.look([beat(p, phase, 1, 60.0) for p in range(count)]) == []  # perhaps the first step is like that
    assert judge.look(after(20, *[WAITS] * count)) == []
    told = judge.look([beat(p, phase, 400, 60.0, step=27) for p in range(count)])  # over ten steps of 2.1 s
    assert [blame.why for blame in told] == ["together"] * is_told


def test_slow_steps_want_a_longer_wait_before_it_is_told():
    judge = Judge()
    judge.look(after(0, WAITS, WAITS))
    judge.look(after(20, WAITS, WAITS))
    for seconds, told in ((20.0, 0), (22.0, 1)):  # steps of 2.1 s
        assert len(judge.look([beat(0, "wait", 500, seconds), beat(1, "data", 499, seconds)])) == told


def test_the_slow_one_is_told_once_and_again_after_twice_the_time_and_anew_after_it_was_well():
    judge, told, totals = Judge(), [], [dict.fromkeys(PHASES, 0.0) for _ in range(3)]
    for step in range(1, 81):
        for total, seconds in zip(totals, (WAITS, WAITS, WAITS if 40 < step <= 50 else DATA), strict=True):
            total.update({phase: total[phase] + seconds.get(phase, 0.0) for phase in PHASES})
        beats = [beat(p, "step", 5 * step, 0.01, step=step, seconds=dict(total)) for p, total in enumerate(totals)]
        told += [(step, blame.processes, blame.why) for blame in judge.look(beats)]
    steps = [step for step, _, _ in told]  # windows are of five steps of 2.1 s
    assert steps[0] == 11 and 20 < steps[1] < 30 and steps[2] == 61 and 70 < steps[3] < 80 and len(steps) == 4
    assert {(processes, why) for _, processes, why in told} == {((2,), "slow")}


def test_a_window_does_not_begin_while_steps_do_not():
    judge = Judge()
    judge.look(after(0, WAITS, DATA, phase="compile", first=0))
    for steps in (10, 20):
        assert judge.look(after(steps, WAITS, DATA)) == []
    assert len(judge.look(after(30, WAITS, DATA))) == 1


def test_figures_are_what_json_can_hold():
    figures = to_blame([*WAITING, beat(2, "wait", 28, 1800.0)]).figures()
    assert figures == {
        "why": "behind", "processes": (2,), "host": "host-c", "phase": "step", "step": 7, "seconds": 1800.0
    }  # fmt: skip
