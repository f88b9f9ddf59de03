# SPDX-License-Identifier: Apache-2.0
"""Faults strike a run, and what it promised holds: it goes back, skips, refuses, names, and ends as it would have."""

import dataclasses
import json
import math
import pathlib
import random
import resource
import shutil
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from checkpointing.checkpoints import Checkpoints, SaveFailed
from cluster.hub import RunError
from cluster.interruption import Interrupted
from core import assembly, inspection, job
from core.between_steps.bad_checkpoints import Suspicion, example_after, set_aside
from core.between_steps.faults import parse_faults
from core.callbacks import Callback, RollBack
from input_pipeline import ledger
from parallelism.mesh import mesh_context
from reporting.clock import OF_STEPS
from reporting.step_log import Diverged, NonFinite, StepLog
from tests.support import write_sums
from tests.test_train import command, finish, in_process, lines_of
from training.transforms import guard


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder with documents of sums."""
    folder = tmp_path_factory.mktemp("survival")
    write_sums(folder / "texts", 40)
    return folder


def on_texts(texts, **changes):
    """A configuration that reads them, with the optimizer that is compiled soonest."""
    usual = {"train__eval_every": 0, "train__save_every": 4, "optimizer__name": "sgd", "evaluation__sample_tokens": 0}
    config = in_process(**usual | changes)
    config.model.dtype = "float32"
    config.data.update(source="text", path=f"{texts}/texts/*.txt", cache_dir=str(texts / "cache"))
    return config


def run(config, workdir, faults: str = "", batches=None) -> dict[int, dict]:
    """Train in this process; return the last line of each step."""
    try:
        train.train(config, workdir, batches, faults=parse_faults(faults))
    finally:  # a disk that is full is so for pytest too
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return lines_of(workdir, "train")


def events(workdir, kind: str) -> list[dict]:
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("event") == kind]


def saved_states(config, *checkpoints) -> list:
    """Return the states of checkpoints, each given as (workdir, step)."""
    run, states = assembly.assemble(config), []
    for workdir, step in checkpoints:
        with Checkpoints(workdir) as found, mesh_context(run.mesh):
            states.append(jax.device_get(found.restore(step, run.abstract_state)))
    return states


def assert_same(one, other) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def record_batches(monkeypatch) -> list[dict]:
    """Return a list that fills with every batch that is trained on."""
    seen, usual = [], job.pipeline.training_batches

    def recorded(*arguments, **named):
        for batch in usual(*arguments, **named):
            seen.append(batch)
            yield batch

    monkeypatch.setattr(job.pipeline, "training_batches", recorded)
    return seen


class Calm(NamedTuple):
    """A run that nothing happened to.

    Attributes:
        lines: of its steps.
        batches: that it was trained on.
        waited: {step: phase that the time of the first wait for it counted for}.
    """

    workdir: pathlib.Path
    lines: dict[int, dict]
    batches: list[dict]
    waited: dict[int, str]


@pytest.fixture(scope="module")
def calm(texts) -> Calm:
    """A run of 12 steps, saved after each fourth and evaluated after each third."""
    waited, usual = {}, StepLog.wait_for_pending

    def watched(log):
        if log.pending:
            waited.setdefault(log.pending[-1][0], log.speed.clock.phase)
        usual(log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepLog, "wait_for_pending", watched)
        patch.setattr("checkpointing.checkpoints.PATIENCE_SECONDS", 60.0)  # all is saved, however busy the machine
        seen = record_batches(patch)
        return Calm(texts / "calm", run(on_texts(texts, train__eval_every=3), texts / "calm"), seen, waited)


def test_what_is_waited_for_a_step_is_time_of_steps_before_a_save_and_an_evaluation_too(calm):
    """Else the step before them would pass for one that took no time, and tokens a second for twice what they are."""
    assert list(calm.waited) == list(range(1, 13)) and set(calm.waited.values()) <= set(OF_STEPS), calm.waited


def test_a_gradient_that_is_no_number_changes_nothing_but_the_count(
    single_device, texts, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("checkpointing.checkpoints.PATIENCE_SECONDS", 60.0)  # each step is saved
    config = on_texts(texts, train__steps=5, train__save_every=1, checkpoint__keep=9)
    with pytest.raises(Interrupted):  # or the state after a step that is not finite would not be saved
        run(config, tmp_path, "nan@4,sigterm@4,nan@40")
    trained = run(config, tmp_path, "nan@40")
    assert [line for line in capsys.readouterr().out.splitlines() if "struck" in line] == ["never struck: nan@40"]
    before, after = saved_states(config, (tmp_path, 3), (tmp_path, 4))
    for part in ("params", "optimizer", "carry"):
        assert_same(getattr(before, part), getattr(after, part))
    assert_same(*({k: v for k, v in state.extra.items() if k != "guard"} for state in (before, after)))
    assert (int(after.step), int(after.extra["guard"]["skipped"]), int(after.examples)) == (4, 1, 32)
    assert [trained[step]["skipped"] for step in range(1, 6)] == [0, 0, 0, 1, 0]
    assert trained[5]["learning_rate"] == pytest.approx(trained[4]["learning_rate"])  # the update still to be taken
    (event,) = events(tmp_path, "update_not_taken")
    assert (event["step"], event["gradient_norm"]) == (4, None)


class Regrets(Callback):
    """Finds after step 10 that the steps from 6 on were bad."""

    def on_step(self, job, state, step):
        if step == 10 and not job.roll_backs:
            job.checkpoints.wait()
            return RollBack("a callback regrets them", 6)
        return None


def test_a_callback_that_rolls_back_gets_a_checkpoint_from_before_its_first_step(
    single_device, texts, tmp_path, monkeypatch
):
    """The checkpoint of step 8 has the bad steps in it; finite as they are, only the callback knows."""
    monkeypatch.setattr("checkpointing.checkpoints.PATIENCE_SECONDS", 60.0)  # each is saved
    train.train(on_texts(texts, train__steps=12), tmp_path, callbacks=[Regrets()])
    (event,) = events(tmp_path, "roll_back")
    assert (event["step"], event["first_step"], event["last_step"]) == (4, 6, 10)
    assert [event["step"] for event in events(tmp_path, "regretted")] == [8]
    assert ledger.sections(tmp_path)[-1]["skips"] == [(40, 40)] and 12 in lines_of(tmp_path, "train")
    assert events(tmp_path, "goodput")[-1]["seconds"]["lost"] > 0, "the steps after 4 are trained again"


def test_a_callback_that_regrets_steps_from_before_a_resume_leaves_out_all_since_the_checkpoint(
    single_device, texts, tmp_path, monkeypatch
):
    """The resumed process does not know the batch of step 6."""
    monkeypatch.setattr("checkpointing.checkpoints.PATIENCE_SECONDS", 60.0)
    train.train(on_texts(texts, train__steps=8), tmp_path)
    train.train(on_texts(texts, train__steps=12), tmp_path, callbacks=[Regrets()])
    assert [event["step"] for event in events(tmp_path, "roll_back")] == [4]
    assert ledger.sections(tmp_path)[-1]["skips"] == [(32, 48)] and 12 in lines_of(tmp_path, "train")


def test_a_callback_that_regrets_all_that_is_saved_ends_the_run(single_device, texts, tmp_path, monkeypatch):
    monkeypatch.setattr("checkpointing.checkpoints.PATIENCE_SECONDS", 60.0)
    config = on_texts(texts, train__steps=12, checkpoint__keep=1)
    with pytest.raises(NonFinite, match="a callback regrets them; no checkpoint is from before step 6"):
        train.train(config, tmp_path, callbacks=[Regrets()])
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [8], "it is as good as it was"


@pytest.mark.slow
def test_too_many_in_a_row_go_back_to_the_last_good_checkpoint_and_leave_out_their_batches(texts, tmp_path):
    """The result is, bit for bit, that of a run that was given the other batches from the start.

    Both change their mesh on the way, the one twice, since it goes back to before.
    """
    config = on_texts(
        texts, train__steps=12, train__bad_steps=1, train__save_every=5, layout__changes="6: data=2,fsdp=4"
    )
    trained = run(config, tmp_path / "back", "nan@7")
    (event,) = events(tmp_path / "back", "roll_back")
    assert (event["step"], event["first_step"], event["last_step"]) == (5, 7, 7)
    assert sorted(trained) == list(range(1, 13)) and not any(line["skipped"] for line in trained.values())
    assert [section["skips"] for section in ledger.sections(tmp_path / "back")] == [[], [(48, 8)]]
    mixture = train.prepare_corpus(config, vocab_size_typed=True).train
    examples = np.delete(np.arange(13 * 8).reshape(13, 8), 6, axis=0)
    others = (mixture.read(rows, 32, config.train.seed) for rows in examples)
    run(config, tmp_path / "given", batches=others)
    assert_same(*saved_states(config, (tmp_path / "back", 12), (tmp_path / "given", 12)))


def test_a_run_that_diverges_wherever_it_goes_back_to_ends_with_status_3_and_names_its_documents(
    single_device, texts, tmp_path
):
    config = on_texts(
        texts, train__steps=30, train__bad_steps=2, train__roll_backs=1, train__save_every=1,
        optimizer__learning_rate=1e30, optimizer__clip_norm=0.0,
    )  # fmt: skip
    with pytest.raises(NonFinite, match="after 1 roll back; nothing bad was saved") as error:
        run(config, tmp_path)
    assert error.value.exit_status == 3
    text = (tmp_path / "bad_documents.txt").read_text()
    assert text.startswith("step ") and f"{texts}/texts/" in text
    with Checkpoints(tmp_path) as checkpoints:
        saved = checkpoints.steps()
    assert saved
    for state in saved_states(config, *((tmp_path, step) for step in saved)):
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


def test_a_run_that_begins_again_has_all_its_roll_backs(single_device, texts, tmp_path):
    """A run that saved nothing takes other keys, and what it did before does not count."""
    keys = dict(train__steps=12, train__bad_steps=1, train__roll_backs=1, train__save_every=0)
    with pytest.raises(NonFinite, match="after 1 roll back"):
        run(on_texts(texts, **keys), tmp_path, "nan@2, nan@8")
    run(on_texts(texts, **keys | {"train__steps": 6}), tmp_path)  # which saves its last state
    run(on_texts(texts, **keys), tmp_path, "nan@10")
    assert [event["step"] for event in events(tmp_path, "roll_back")] == [0, 6]


@pytest.mark.slow
def test_a_poisoned_document_is_not_learned_and_stands_at_the_top_of_its_step(single_device, texts, tmp_path):
    """One command finds it: --explain_step with the step whose update was not taken."""
    shutil.copytree(texts / "texts", tmp_path / "texts")
    noise = random.Random(0)
    (tmp_path / "texts" / "poison.txt").write_text("".join(chr(noise.randrange(0xA1, 0x17F)) for _ in range(80)))
    config = on_texts(
        texts, train__steps=120, train__spike_deviations=4.0, train__save_every=60, train__log_every=40,
        data__holdout_fraction=0.05, optimizer__name="adamw", train__seed=4,  # which has it in steps 48, 103 and 119
    )  # fmt: skip
    config.data.path = f"{tmp_path}/texts/*.txt"
    run(config, tmp_path / "run")
    skipped = [event["step"] for event in events(tmp_path / "run", "update_not_taken")]
    assert skipped, "no batch spiked"
    for step in skipped:
        table = inspection.explain_step(config, tmp_path / "run", tmp_path / "run", step)
        assert "poison.txt" in table[2], table[:4]


@pytest.mark.slow
def test_a_flipped_bit_is_found_by_computing_a_step_twice_and_its_device_is_named(texts, tmp_path):
    config = on_texts(texts, train__steps=8, train__recheck_every=3)
    with pytest.raises(
        RunError, match=r"step 6 gave different bits when computed twice, on device 7 of process 0, in \d+ arr"
    ):
        run(config, tmp_path, "flip@6")
    assert run(config, tmp_path)[8]["loss"] > 0  # and goes on from the checkpoint before


@pytest.mark.slow
def test_copies_that_drift_apart_are_found_where_the_flip_was_between_checks(texts, tmp_path):
    config = on_texts(texts, train__steps=8, train__recheck_every=4)
    config.mesh.update(data=8, fsdp=1)
    with pytest.raises(RunError, match="device 7 of process 0"):
        run(config, tmp_path, "flip@3")


# Writes that are under way when one fails end after Orbax has closed their event loop, and each prints that.
FULL_DISK = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@FULL_DISK
def test_a_full_disk_stops_no_training_and_the_next_save_works(texts, calm, tmp_path):
    config = on_texts(texts)
    trained = run(config, tmp_path, "full_disk:4@6")
    assert sorted(trained) == list(range(1, 13)), "lines that could not be written were written later"
    failed = events(tmp_path, "save_failed")
    assert failed and all("File too large" in event["error"] for event in failed)
    assert 12 in {event["step"] for event in events(tmp_path, "saved")}
    assert_same(*saved_states(config, (tmp_path, 12), (calm.workdir, 12)))


def copied(calm, workdir: pathlib.Path) -> pathlib.Path:
    """Return a copy of the calm run; its checkpoints are of steps 8 and 12."""
    return pathlib.Path(shutil.copytree(calm.workdir, workdir))


@FULL_DISK
def test_a_last_save_that_fails_is_no_success(texts, calm, tmp_path, monkeypatch):
    monkeypatch.setattr("checkpointing.checkpoints.LAST_TRIES_SECONDS", (0.0, 0.1))
    workdir = copied(calm, tmp_path / "longer")
    with pytest.raises(SaveFailed, match="File too large"):
        run(on_texts(texts, train__steps=15), workdir, "full_disk:99@14")
    with Checkpoints(workdir) as checkpoints:
        assert checkpoints.newest() == 12


def test_a_checkpoint_goes_on_on_another_mesh_with_the_same_examples(texts, calm, tmp_path, monkeypatch):
    workdir = copied(calm, tmp_path / "other")
    shutil.rmtree(workdir / "checkpoints" / "12")
    (workdir / "summary.txt").unlink()
    config, seen = on_texts(texts), record_batches(monkeypatch)
    config.mesh.update(data=2, fsdp=1, context=2, model=2)
    other = run(config, workdir)
    for step in range(9, 13):
        assert other[step]["loss"] == pytest.approx(calm.lines[step]["loss"], rel=1e-5), step
    for ours, theirs in zip(calm.batches[8:], seen, strict=True):
        assert_same(ours, theirs)


def test_checkpoints_are_verified_from_the_command_line(texts, calm, tmp_path, capsys):
    workdir = copied(calm, tmp_path / "damaged")
    folder = workdir / "checkpoints"
    arrays = (path for path in (folder / "12" / "state").rglob("*") if path.is_file())
    victim = max(arrays, key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 4
    victim.write_bytes(content)
    status, out, err = finish(command("train.py", "--verify_checkpoints", f"--workdir={workdir}", cache=texts))
    assert status == 1 and "has damaged checkpoints" in err
    assert f"checkpoint 12: DAMAGED: {victim.relative_to(folder / '12')} has other bytes than were saved" in out
    assert "checkpoint 8: good  (kept: newest)" in out and "1 of 2 good" in out
    trained = run(on_texts(texts), workdir)
    told = capsys.readouterr()
    assert "checkpoint 12 is damaged" in told.err and "step  9/12" in told.out, told
    assert (folder / "12.damaged").is_dir() and (folder / "12").is_dir()
    assert math.isfinite(trained[12]["loss"])


def spoiling(monkeypatch, after: int):
    """Have the update of one step, once, make parameters finite and so large that no loss is."""
    usual, done = job.Job.start, []

    def watched(self, record):
        step = self.train_step

        def spoiled(state, batch):
            state, scalars = step(state, batch)
            if int(state.step) == after and not done:
                done.append(after)
                state = dataclasses.replace(state, params=jax.tree.map(lambda leaf: leaf * 1e30, state.params))
            return state, scalars

        self.train_step = spoiled
        return usual(self, record)

    monkeypatch.setattr(job.Job, "start", watched)


@pytest.mark.parametrize(("after", "aside"), [(8, ["8.damaged"]), (7, [])], ids=["at_a_save", "before_a_save"])
def test_a_state_that_no_step_can_go_on_from_is_not_saved_or_not_used(
    single_device, texts, tmp_path, monkeypatch, after, aside
):
    """As after an overflow: each number is finite, and no gradient is. It was saved, and gone back to for ever."""
    spoiling(monkeypatch, after)
    config = on_texts(texts, train__steps=12, train__save_every=4, train__bad_steps=2)
    lines = run(config, tmp_path)
    assert sorted(lines) == list(range(1, 13)) and math.isfinite(lines[12]["gradient_norm"])
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"8", "12", *aside}
    assert [event["step"] for event in events(tmp_path, "roll_back")] == ([8, 4] if aside else [4])
    for state in saved_states(config, (tmp_path, 8), (tmp_path, 12)):
        assert all(np.abs(leaf).max() < 100 for leaf in jax.tree.leaves(state.params))


def test_the_only_checkpoint_is_not_set_aside_for_other_weights(single_device, texts, tmp_path, monkeypatch):
    """It may be an import. The run ends, and says that no batch helped."""
    spoiling(monkeypatch, 8)
    config = on_texts(texts, train__steps=12, train__save_every=8, train__bad_steps=1)
    with pytest.raises(NonFinite, match=r"no step after checkpoint 8 had a finite gradient, .* no other checkpoint"):
        run(config, tmp_path)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"8"}


@pytest.mark.slow
@pytest.mark.parametrize(("roll_backs", "aside"), [(2, set()), (3, {"4.damaged"})])
def test_a_checkpoint_is_bad_after_three_streaks_of_spikes_not_after_two(
    single_device, texts, tmp_path, monkeypatch, roll_backs, aside
):
    """All losses are finite; the guard takes each for a spike after the fourth step."""
    usual = guard.judge
    monkeypatch.setattr(
        guard, "judge", lambda memory, loss, *more: usual(memory, jnp.where(memory["seen"] < 4, loss, jnp.inf), *more)
    )
    config = on_texts(texts, train__steps=12, train__save_every=2, train__bad_steps=1, train__roll_backs=roll_backs)
    with pytest.raises(NonFinite, match=f"after {roll_backs} roll backs"):
        run(config, tmp_path)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"2", "4"} | aside


def test_no_example_before_the_restored_checkpoint_is_left_out_again():
    """A streak may begin before a checkpoint that was saved between two of its steps."""
    usual, regretted = Diverged("", 6, 9), Diverged("", 6, 9, applied=True)
    assert [example_after(usual, first, 24, begun=8) for first in (20, 32)] == [24, 32]
    assert example_after(regretted, 32, 24, begun=5) == 32
    assert example_after(regretted, 32, 24, begun=6) == 24, "this process does not know the batch of step 6"


def test_roll_backs_to_two_checkpoints_are_no_evidence_against_one():
    suspicion, aside = Suspicion(), []
    checkpoints = types.SimpleNamespace(steps=lambda: [4, 8], set_aside=lambda step, why: aside.append(step))
    found = [suspicion.finds_bad(checkpoints, Diverged("", step + 1, step + 2), step) for step in (8, 4, 8, 8)]
    assert found == [False, False, False, True] and aside == [8]


def test_a_checkpoint_of_the_first_step_that_is_regretted_is_set_aside_too():
    steps = [4, 6, 8]
    checkpoints = types.SimpleNamespace(steps=lambda: [*steps], set_aside=lambda step, why, event: steps.remove(step))
    set_aside(checkpoints, Diverged("", 6, 9, applied=True))
    assert steps == [4]
