# SPDX-License-Identifier: Apache-2.0
"""A plan within a grant: what fits, in which order, at what cost; and hours from the user's own rehearsals."""

import dataclasses
import gzip
import types

import pytest

from configs import topologies
from configs.base import get_config
from rehearsal import estimate, sealed
from rehearsal.compiler import FACTS, PROGRAM, Compiler, digest
from settings import loading
from settings.keys import flat
from studies import suites
from studies.cost import grant, planning, rehearsals
from studies.cost.planning import Estimate
from tests.studies.conftest import ended, needs_optuna, sweep

STUDY, NAMES = suites.find("exp08-ema")
MEMBERS = suites.members(STUDY, NAMES, topology="v4-64")
GRANT = grant.Grant(days=1, topology="v4-64", price=0.0, storage_price=0.1, keep="last")  # 768 chip-hours


def hours(*known: float | None) -> dict[str, Estimate]:
    """Return an estimate of hours of the slice for each of the five configurations."""
    found = zip(MEMBERS, known, strict=True)
    return {member.digest: Estimate(10, one, None if one is None else 0.0) for member, one in found}


def test_trials_fit_in_the_order_of_the_study_and_unknown_ones_are_not_counted_as_nothing():
    names = {member.digest: member.name for member in MEMBERS}
    share = grant.share_out(GRANT, hours(20.0, None, 5.0, 4.0, 1.0))
    assert {names[digest]: verdict for digest, verdict in share.items()} == {
        "a-off": grant.FITS, "b-0.99": grant.UNKNOWN, "c-0.995": grant.TOO_LONG, "d-0.999": grant.FITS,
        "e-0.9995": grant.TOO_LONG,
    }  # fmt: skip


def test_the_lines_say_what_fits_at_what_cost_and_what_is_not_known():
    found = hours(20.0, None, 5.0, 4.0, 1.0)
    sizes = {member.digest: 10**9 for member in MEMBERS}
    lines = grant.lines(dataclasses.replace(GRANT, price=2.0), MEMBERS, found, sizes)
    assert lines[0] == "a grant of 1 day of v4-64: 768.00 chip-hours, $2.00 a chip-hour"
    assert lines[2].split() == ["exp08-ema", "5", "2", "2", "1", "768.00", "768.00", "$1,536.00"]
    assert lines[3:] == [
        "fits: 2 of 5 trials, 768.00 chip-hours (100.0% of the grant), $1,536.00",
        "does not fit: 2 trials, exp08-ema/c-0.995, exp08-ema/e-0.9995",
        "not known, and not counted: 1 trial, exp08-ema/b-0.99",
        "storage with --keep=last: 2 checkpoints, at most 2.00 GB, $0.01 for 1 day",
    ]
    unknown = grant.lines(GRANT, MEMBERS, hours(*[None] * 5), dict.fromkeys(sizes))
    assert unknown[2].split() == ["exp08-ema", "5", "0", "0", "5", "not", "known", "-", "-"]
    assert unknown[3].startswith("fits: 0 of 5 trials, 0.00 chip-hours")
    one = grant.lines(GRANT, MEMBERS, found, sizes | {MEMBERS[0].digest: None})[-1]
    assert one.endswith("size and cost not known: 1 trial is neither rehearsed here nor done")


@pytest.mark.parametrize("keep, count", [("all", "6 checkpoints"), ("best", "1 checkpoint"), ("none", "0 checkpoints")])
def test_storage_counts_what_the_retention_keeps_and_is_not_known_without_sizes(keep, count):
    given = dataclasses.replace(GRANT, keep=keep)
    found, sizes = hours(20.0, None, 5.0, 4.0, 1.0), {member.digest: 10**9 for member in MEMBERS}
    line = next(line for line in grant.lines(given, MEMBERS, found, sizes) if line.startswith("storage"))
    assert line.startswith(f"storage with --keep={keep}: {count}, at most {count[0]}.00 GB, $")
    line = next(line for line in grant.lines(given, MEMBERS, found, dict.fromkeys(sizes)) if line.startswith("storage"))
    assert ("size and cost not known" in line) == (keep != "none")


def test_the_best_of_a_group_may_be_its_largest_checkpoint():
    sizes = {member.digest: (5 - number) * 10**9 for number, member in enumerate(MEMBERS)}
    found = hours(*[1.0] * 5)
    line = next(one for one in grant.lines(dataclasses.replace(GRANT, keep="best"), MEMBERS, found, sizes)
                if one.startswith("storage"))  # fmt: skip
    assert "1 checkpoint, at most 5.00 GB" in line


def test_a_rehearsal_of_the_user_gives_hours_and_the_size_of_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    member, preset = MEMBERS[0], topologies.get("v4-64")
    assert planning.estimate_of(member, "v4-64").hours is None, "nothing is recorded of a step without an average"
    typed = member.changes  # as in the command that the plan names
    config = loading.load(str(loading.ROOT / member.recipe), "v4-64", typed).config
    folder = Compiler(tmp_path / "torus" / "rehearsals").folder(config, preset)
    folder.mkdir(parents=True)
    (folder / PROGRAM).write_bytes(gzip.compress(b"program"))
    state = {"parameters": 100, "optimizer": 200, "extra": 0, "carry": 12, "batch": 999}
    facts = {
        "state": state,
        "on_host": 0,
        "mesh": {"data": 2, "dcn_data": 1},
        "out_of_memory": False,
        "total_bytes": 1e9,
    }
    sealed.write(folder / FACTS, facts | {"program_sha256": digest(folder / PROGRAM)})
    monkeypatch.setattr(estimate, "_estimate", lambda compiled: {"step_seconds": 3.6})
    found = planning.estimates(MEMBERS, "v4-64", price=0.0)[member.digest]
    assert (found.hours, found.cost) == (pytest.approx(8.138), 0.0), "and 0 is a price"
    assert rehearsals.checkpoint_bytes(member.values, "v4-64") == 312 * 32 / 2
    measured = planning.estimates(MEMBERS, "v4-64", measured={member.digest: 2.0})[member.digest]
    assert (measured.hours, measured.is_measured) == (2.0, True)


@pytest.mark.slow
@needs_optuna
def test_a_plan_uses_what_was_measured_and_status_says_what_is_left(tmp_path):
    from studies.storage import open_storage
    from studies.trials import Queue, order_of

    queue = Queue(open_storage(f"sqlite:///{tmp_path}/studies.db", create=True), "trm", "maximize", create=True)
    queue.enqueue([order_of(MEMBERS[0], str(tmp_path), "v4-64")])
    results = {"ran_seconds": 7200.0, "chip_hours": 64.0, "checkpoint_bytes": 5 * 10**9}
    queue.finish(queue.claim_next({MEMBERS[0].digest}), 1.0, results, {})
    given = ["exp08-ema", "--topology=v4-64", "--price=0", "--grant_days=3"]
    processes = [sweep(tmp_path, *words) for words in (
        ("plan", *given, "--keep=last", "--storage_price=1"), ("status", *given, "--budget=100"),
    )]  # fmt: skip
    (status, plan, err), (other, stands, _) = map(ended, processes)
    assert (status, other) == (0, 0), err
    assert "exp08-ema/a-off     8,138  2.00   $0.00  optimizer.ema_decay=0.0" in plan
    assert "1 of them are done, with their measured hours" in plan
    assert stands.splitlines()[-2:] == [
        "budget: 100.00 chip-hours, 64.00 spent, 36.00 left ($0.00)",
        "grant of 3 days: 2,304.00 chip-hours, 64.00 spent, 2,240.00 left ($0.00)",
    ]
    assert "64.00       $0.00" in stands


def test_only_steps_of_unknown_time_are_compiled_and_each_result_is_a_line(monkeypatch, tmp_path):
    """The baseline's time is recorded; the compiler's answers stand for minutes of compilation."""
    study, names = suites.find("exp09-optimizer")
    found = suites.members(study, names, topology="v4-64", overrides={"data.cache_dir": str(tmp_path)})
    asked = []

    def answers(compiler, wanted):
        asked.extend(config.optimizer.name for config, _ in wanted)
        yield 1, rehearsals.CompileError("the compiler says no")
        yield 0, types.SimpleNamespace(fits=False)
        yield 2, types.SimpleNamespace(fits=True)

    monkeypatch.setattr(rehearsals.Compiler, "compile_all", answers)
    monkeypatch.setattr(rehearsals, "check_compiler", lambda preset: None)
    monkeypatch.setattr(rehearsals, "estimate", lambda compiled: {"step_seconds": 41e-6})
    lines = list(rehearsals.fill_cache(found, "v4-64"))
    assert asked == ["adamw", "adamw", "adamw", "lion"], "adam_atan2 is the recorded baseline"
    assert lines[0].startswith("1 of 4: exp09-optimizer/c-adamw-0.99, refused: the compiler says no; ")
    assert lines[1].startswith("2 of 4: exp09-optimizer/b-adamw-0.95, does not fit in the memory of a chip of v4-64; ")
    assert ", 41.0 us a step; " in lines[2]


def test_checkpoints_that_stay_are_the_newest_the_best_and_those_of_every_so_many_steps():
    config = get_config()
    config.checkpoint.update(keep=2, keep_best=1, keep_every=100)
    config.train.steps = 1050
    member = types.SimpleNamespace(values=flat(config))
    assert [grant.checkpoints_of(member, keep) for keep in ("all", "last", "best", "none")] == [13, 1, 1, 0]
