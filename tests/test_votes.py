# SPDX-License-Identifier: Apache-2.0
"""A run on ARC ends with what the votes of its answers come to, kept for later ones, the same on any devices."""

import json
import shutil

import jax
import numpy as np
import pytest

import train
from checkpointing.checkpoints import Checkpoints
from configs.trm import sudoku_mini
from core import assembly, evaluators
from core.evaluations.votes import vote
from input_pipeline.puzzles import arc
from parallelism.mesh import mesh_context
from puzzles import voting
from tests import groups
from tests.test_train import lines_of

AUGMENTATIONS = 3


def write_tasks(folder, copied: str = "") -> None:
    """Write an ARC-1 of one task a subset, and two in the one that is held out, one of them with two tests.

    Answers are grids at random, but of the task `copied` what the questions are.
    """
    rng = np.random.default_rng(0)
    folder.mkdir()

    def grid():
        return rng.integers(0, 10, rng.integers(2, 5, 2)).tolist()

    for subset in arc.SUBSETS["arc1"][0]:
        tests = {f"{subset}-a": 1} | ({f"{subset}-b": 2} if subset == "evaluation" else {})
        challenges = {
            name: {
                "train": [{"input": grid(), "output": grid()} for _ in range(2)],
                "test": [{"input": grid()} for _ in range(count)],
            }
            for name, count in tests.items()
        }
        solutions = {
            name: [test["input"] if name == copied else grid() for test in task["test"]]
            for name, task in challenges.items()
        }
        (folder / f"arc-agi_{subset}_challenges.json").write_text(json.dumps(challenges))
        (folder / f"arc-agi_{subset}_solutions.json").write_text(json.dumps(solutions))


def small_config(place, **train_changes):
    config = sudoku_mini.get_config()
    config.model.update(
        embed_dim=16, mlp_dim=24, num_heads=1, num_kv_heads=1, layer_loop="scan", dtype="float32", vocab_size=12,
        max_length=900, puzzle_dim=16, prefix_length=1, num_puzzles=32, mixer="attention", low_cycles=1, high_cycles=1,
        num_layers=1,
    )  # fmt: skip
    config.data.update(
        source="arc", path=str(place / "tasks"), puzzle_augmentations=AUGMENTATIONS, cache_dir=str(place / "cache")
    )
    config.train.update(dict(steps=1, global_batch=8, sequence_length=900, log_every=1, eval_every=0) | train_changes)
    config.optimizer.schedule = "constant"
    config.mesh.update(data=8, fsdp=1)
    config.supervision.max_steps = 2
    config.logging.tensorboard = config.logging.report = False
    return config


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run of one step that went on to a second, whose votes were pooled with those of the first."""
    place = tmp_path_factory.mktemp("votes")
    write_tasks(place / "tasks")
    train.train(small_config(place), place / "run")
    longer = small_config(place, steps=2)
    longer.evaluation.pooled_votes = True
    train.train(longer, place / "run")
    return place


def tasks_of(place) -> dict:
    return train.prepare_corpus(small_config(place), vocab_size_typed=True).heldout.test_puzzles


def votes_on(place, config, devices) -> voting.Votes:
    run = assembly.assemble(config, devices=devices)
    with Checkpoints(place / "run") as checkpoints, mesh_context(run.mesh):
        params = checkpoints.restore_eval_params(2, run.abstract_state.params)
        corpus = train.prepare_corpus(config, vocab_size_typed=True)
        return vote(evaluators.EvaluationContext(run, params, {}, corpus, place, 2))


@pytest.mark.slow
def test_a_run_ends_with_what_votes_come_to(place):
    written = lines_of(place / "run", "votes")
    names = {f"pass@{k}" for k in voting.PASSES}
    assert written.keys() == {1, 2}
    assert names <= written[1].keys() and "pooled/pass@2" not in written[1]
    assert names | {f"pooled/{name}" for name in names} <= written[2].keys()
    summary = (place / "run" / "summary.txt").read_text()
    assert "held-out pass@2: " in summary and " of 2 tasks (@1 " in summary
    assert "held-out, pooled with earlier votes, pass@2: " in summary


@pytest.mark.slow
def test_votes_of_each_step_are_kept_and_the_submission_has_the_form_of_kaggle(place):
    kept = [voting.Votes.load(place / "run" / "votes" / f"{step}.gz") for step in (1, 2)]
    assert [len(votes) for votes in kept] == [3 * (1 + AUGMENTATIONS)] * 2
    submission = json.loads((place / "run" / "submission.json").read_text())
    assert {name: len(tests) for name, tests in submission.items()} == {"evaluation-a": 1, "evaluation-b": 2}
    for tests in submission.values():
        for attempts in tests:
            assert attempts.keys() == {"attempt_1", "attempt_2"}
            assert all(np.array(grid).ndim == 2 for grid in attempts.values())
    assert submission == voting.submission(kept[1], tasks_of(place))


@pytest.mark.slow
def test_one_device_and_eight_give_the_same_votes(place):
    alone = small_config(place)
    alone.mesh.data = 1
    one, many = votes_on(place, alone, jax.devices()[:1]), votes_on(place, small_config(place), jax.devices())
    kept = voting.Votes.load(place / "run" / "votes" / "2.gz")
    tasks = tasks_of(place)
    assert many == kept, "what was kept is what these devices say again, to the last bit"
    assert len(one) == len(many)
    assert voting.submission(one, tasks) == voting.submission(many, tasks)
    assert voting.results(one, tasks) == voting.results(many, tasks)


@pytest.mark.slow
def test_two_processes_vote_together_as_one_does(place, tmp_path):
    shutil.copytree(place / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "votes")
    arguments = ["--evaluate_only", f"--workdir={tmp_path}/run", "--config.mesh.data=8", "--config.mesh.fsdp=1"]
    ended = groups.finish(groups.start(["train.py", *arguments], count=2, cache=place / "cache"))
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert ["held-out pass@2: " in out for _, out, _ in ended] == [True, False]
    files = [workdir / "votes" / "2.gz" for workdir in (place / "run", tmp_path / "run")]
    assert voting.Votes.load(files[0]) == voting.Votes.load(files[1])


@pytest.mark.slow
def test_evaluation_alone_votes_too(place, capsys):
    config = small_config(place)
    config.evaluation.pooled_votes = True
    corpus = train.prepare_corpus(config, vocab_size_typed=True)
    evaluators.evaluate_newest(config, place / "run", place / "run", corpus)
    out = capsys.readouterr().out
    assert "not the run's own puzzles" not in out
    assert "checkpoints/2\n" in out and "held-out pass@2: " in out and "pooled with earlier votes, pass@2: " in out


@pytest.mark.slow
def test_votes_on_other_puzzles_do_not_replace_those_of_the_run(place, tmp_path, capsys):
    """A run that goes on would pool them with its own; and the table has no rows of these puzzles."""
    run = shutil.copytree(place / "run", tmp_path / "run")
    write_tasks(tmp_path / "others", "evaluation-b")
    kept = {name: (run / name).read_bytes() for name in ("votes/2.gz", "submission.json")}
    config = small_config(place)
    config.data.path = str(tmp_path / "others")
    corpus = train.prepare_corpus(config, vocab_size_typed=True)
    evaluators.evaluate_newest(config, run, run, corpus)
    assert "Note: these are not the run's own puzzles" in capsys.readouterr().out
    assert {name: (run / name).read_bytes() for name in kept} == kept
    assert len(voting.Votes.load(run / "evaluated" / corpus.digest[:12] / "votes" / "2.gz")) == 3 * (1 + AUGMENTATIONS)


def copying(params: dict) -> dict:
    """Return weights by which a model answers what it is asked: a token's vector goes through as it came."""
    params = jax.tree.map(np.zeros_like, jax.device_get(params))
    params["embedding"]["embedding"] = np.eye(*params["embedding"]["embedding"].shape, dtype=np.float32)
    params["head"]["kernel"] = np.eye(*params["head"]["kernel"].shape, dtype=np.float32)
    return params


@pytest.mark.parametrize(("copied", "solved"), [("evaluation-b", 0.5), ("", 0.0)])
def test_a_task_is_solved_where_all_its_answers_are_among_the_first_k(tmp_path, copied, solved):
    """One of the two that are held out asks for what a model that copies says, to both its questions, or none does."""
    write_tasks(tmp_path / "tasks", copied)
    config = small_config(tmp_path)
    run = assembly.assemble(config)
    with mesh_context(run.mesh):
        state = run.init()
        params = jax.tree.map(lambda new, leaf: jax.device_put(new, leaf.sharding), copying(state.params), state.params)
        corpus = train.prepare_corpus(config, vocab_size_typed=True)
        votes = vote(evaluators.EvaluationContext(run, params, {}, corpus, tmp_path, 0))
    found = voting.results(votes, tasks_of(tmp_path))
    assert found == {f"pass@{k}": solved for k in voting.PASSES}
