# SPDX-License-Identifier: Apache-2.0
"""What is measured on held-out batches, and what is said where there was nothing to measure."""

import math
import types

import jax
import numpy as np
import pytest

from configs.base import MESH_AXES, get_config
from core import evaluation
from core.between_steps.stages import Stage
from core.evaluations.votes import earlier_votes
from core.evaluators import EvaluationContext
from core.job import Job
from input_pipeline.tasks.countdown import CountdownWindows
from input_pipeline.tokenization import open_tokenizer
from input_pipeline.windows import Windows
from objectives import language_modeling
from objectives.objective import Objective
from parallelism.axis_rules import batch_sharding
from parallelism.mesh import make_mesh
from puzzles.voting import Votes
from reporting.step_log import format_evaluation
from tests.input_pipeline.memory import mixture_of_one


class Counting:
    """A run, and an objective, whose batches are what it measures."""

    objective = Objective()

    def eval_step(self, params, batch, frozen):
        return batch

    def format_metrics(self, figures):
        return "loss", f"{figures['loss']:.2f}", "tokens"


def measured(monkeypatch, *batches):
    monkeypatch.setattr(evaluation, "heldout_batches", lambda *_: batches)
    figures, weight = evaluation.evaluate_heldout(EvaluationContext(Counting(), {}, {}, None, None, 0))
    return figures, weight, format_evaluation(Counting(), figures, weight)


def test_means_are_of_all_that_counts(monkeypatch):
    figures, weight, said = measured(monkeypatch, {"loss": (6.0, 2)}, {"loss": (0.0, 0)}, {"loss": (2.0, 2)})
    assert (figures, weight, said) == ({"loss": 2.0}, 4, ("loss", "2.00", "tokens"))


@pytest.mark.parametrize("returned", [None, {}, {"mine": 1.0}], ids=str)
def test_what_summary_may_not_return_is_named(monkeypatch, returned):
    monkeypatch.setattr(Counting, "objective", types.SimpleNamespace(summary=lambda means: returned))
    with pytest.raises(TypeError, match=r"^summary of the objective returned .* must return a dictionary with 'loss'"):
        measured(monkeypatch, {"loss": (6.0, 2)})


@pytest.mark.parametrize("returned", [None, "loss 1.0", ("loss", 1.0, "tokens"), ("loss", "1.0")], ids=str)
def test_what_format_metrics_may_not_return_is_named(returned):
    with pytest.raises(TypeError, match=r"^format_metrics of the objective returned .*; it must return three texts"):
        format_evaluation(types.SimpleNamespace(format_metrics=lambda figures: returned), {}, 1)


def test_votes_of_later_steps_and_damaged_ones_are_left_out(tmp_path, caplog):
    """A damaged file ends no run, and the steps after a roll back are no earlier ones."""
    for name in ("10", "20", "30", "other"):
        Votes().save(tmp_path / f"{name}.gz")
    (tmp_path / "10.gz").write_bytes(b"no votes")
    assert list(earlier_votes(tmp_path, 30)) == ["20"]
    assert "the votes of step 10 are left out: " in caplog.text


def test_a_prompt_that_fills_the_model_has_no_sample_and_no_command():
    """The length of the cache is a multiple of 128, so a negative room would be 128 tokens."""
    tokenizer = open_tokenizer("byte")
    rows = {"tokens": np.array([[*b"some words, and more"]]), "segments": np.ones((1, 20))}
    heldout = types.SimpleNamespace(read=lambda rows_, length: rows)
    corpus = types.SimpleNamespace(heldout=heldout, tokenizer=tokenizer, is_of_conversations=False)
    config = get_config()
    for max_length, expected in ((12, []), (14, ["--max_tokens=1"]), (200, ["--max_tokens=64"])):
        config.model.max_length = max_length
        assert [line.split()[-1] for line in evaluation.next_lines(config, corpus, "runs/a")] == expected
    config.model.max_length = 12
    assert evaluation.sample_lines(types.SimpleNamespace(config=config), {}, corpus) == []


def test_a_mean_over_nothing_is_no_perfect_loss(monkeypatch):
    figures, weight, said = measured(monkeypatch, {"loss": (0.0, 0)})
    assert math.isnan(figures["loss"]) and weight == 0 and said == ("loss", "unknown", "tokens")


def test_a_lost_batch_does_not_lower_the_bits_per_byte():
    """The bytes are those of all held-out text, so a part of the tokens must stand for all of them."""
    text = types.SimpleNamespace(num_documents=1, num_tokens=100, num_bytes=300, packing_summary=lambda length: "")
    corpus = types.SimpleNamespace(heldout=text, is_of_conversations=False, unigram_bits_per_byte=None)
    run = types.SimpleNamespace(objective=language_modeling.make(get_config()), config=get_config())
    for weight in (100, 75):
        line = evaluation.heldout_lines(run, {"loss": 6 * math.log(2)}, weight, corpus)[-1]
        assert line == "held-out bits per byte: 2.00"


def test_a_problem_of_a_task_is_a_prompt_too():
    corpus = types.SimpleNamespace(heldout=CountdownWindows(0, "heldout"), tokenizer=open_tokenizer("numbers"))
    assert evaluation.opening(corpus, 128)


TEXT = {"tokens": [1, 2, 3, 4], "targets": [2, 3, 8, -1], "segments": [1, 1, 1, 0], "positions": [0, 1, 2, 0]}
PUZZLE = {"inputs": [1, 2, 3, 4], "labels": [1, 2, 8, -100], "puzzle_identifiers": 1}
FACTS = {"vocab_size": 9, "num_identifiers": 2}


class Own(Windows):
    """A window source of a user, with one row."""

    num_tokens, digest = 64, ""

    def __init__(self, row: dict, facts: dict):
        self.row, self.fills = row, dict.fromkeys(row, 0)
        vars(self).update(facts)

    def read(self, indices, sequence_length):
        return {name: np.array([row] * len(indices), np.int32) for name, row in self.row.items()}


def read_by_a_run(source: Own, like: dict) -> None:
    """Read a batch to train on and one to evaluate on, for a step that takes rows `like` these."""
    config = get_config()
    config.train.sequence_length, config.model.vocab_size, config.model.num_puzzles = 4, 9, 2
    config.data.source = "mine"
    abstract = {name: jax.ShapeDtypeStruct((2, *np.shape(row)), np.int32) for name, row in like.items()}
    sharding = batch_sharding(make_mesh(dict.fromkeys(MESH_AXES[1:], 1), jax.devices()[:1]))
    run = types.SimpleNamespace(config=config, abstract_batch=abstract, batch_sharding=sharding)
    lost = types.SimpleNamespace(record=str, ahead=0, gather_reason=str)
    corpus = types.SimpleNamespace(train=mixture_of_one(source), heldout=source)
    job = types.SimpleNamespace(config=config, run=run, corpus=corpus, lost=lost)
    errors = []
    for read in (lambda: Job._batches(job, Stage(0, 0, 2), 1), lambda: evaluation.batches_of_rows(run, corpus, 2, 1)):
        try:
            assert len(list(read())) == 1
        except ValueError as error:
            errors.append(error)
    if errors:
        assert str(errors[0]) == str(errors[1]), "held-out rows are checked like others"
        raise errors[0]


@pytest.mark.parametrize(
    ("like", "change", "facts", "message"),
    [
        (TEXT, {"tokens": [1, 2, 9, 4]}, {}, "tokens has 9, which is not an id with model.vocab_size=9"),
        (TEXT, {"tokens": [1, -1, 3, 4]}, {}, "tokens has -1, "),
        (TEXT, {"targets": [2, 3, 9, -1]}, {}, "targets has 9, "),
        (TEXT, {"tokens": [1, 2, 3]}, {}, r"a row of tokens is int32\[3\] and should be int32\[4\]"),
        (PUZZLE, {"inputs": [1, 9, 3, 4]}, FACTS, "inputs has 9, which is not an id with model.vocab_size=9"),
        (PUZZLE, {"labels": [1, 9, 3, 4]}, FACTS, "labels has 9, "),
        (PUZZLE, {"puzzle_identifiers": 2}, FACTS, "identifiers has 2, which is not an id with model.num_puzzles=2"),
        (PUZZLE, {"labels": 9}, {"vocab_size": 9, "largest_input": 9}, r"row of labels is int32\[\] and should be"),
    ],
)
def test_what_a_users_source_reads_fits_the_model_or_is_named(like, change, facts, message):
    """An id outside the vocabulary would train on another token, or give NaN."""
    with pytest.raises(ValueError, match=rf"^a batch of data\.source=mine \(Own\.read\)[,:] .*{message}"):
        read_by_a_run(Own(like | change, facts), like)


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        (TEXT, {}),
        (TEXT | {"tokens": [1, 2, 3, 99], "mine": [7]}, {}),  # padding, and an array of which the step knows nothing
        (PUZZLE, FACTS),
        (PUZZLE | {"inputs": [1, 2, 3, 99]}, FACTS | {"largest_input": 99}),  # integers of a row with a label
        (PUZZLE | {"inputs": [1, 2, 3, 1 << 30]}, {}),  # bits of numbers
        (PUZZLE | {"labels": 59}, FACTS),  # one of 60 classes for a row of inputs
        (PUZZLE | {"puzzle_identifiers": 2}, FACTS | {"num_identifiers": 400}),  # evaluated on puzzles without rows
        ({"inputs": [1, 2, 3, 4]}, FACTS),  # without labels
    ],
)
def test_what_are_no_ids_may_be_any_numbers(row, facts):
    read_by_a_run(Own(row, facts), {name: row[name] for name in row if name != "mine"})


def test_batches_of_an_evaluation_are_counted_as_batches_of_training(monkeypatch):
    """They come as microbatches, of which a global batch has several."""
    monkeypatch.setattr(evaluation, "batches_of_rows", lambda run, corpus, rows, number, on_lost: [(rows, number)] * 3)
    heldout = types.SimpleNamespace(num_examples=lambda length: 21)
    run = types.SimpleNamespace(config=get_config(), num_microbatches=4, eval_rows=2)
    corpus, told = types.SimpleNamespace(heldout=heldout), []
    assert evaluation.heldout_batches(run, corpus, 3)[0] == (2, 12)
    assert evaluation.heldout_batches(run, corpus)[0] == (2, None)
    list(evaluation.heldout_batches(run, corpus, 3, progress=lambda *done: told.append(done)))
    assert told == [(1, 11), (2, 11), (3, 11)], "of 21 rows there are 11 microbatches"
