# SPDX-License-Identifier: Apache-2.0
"""Evaluators of a caller: their names, their figures, and one that forgets to return any."""

import contextlib
import json
import math
import types

import jax.numpy as jnp
import numpy as np
import pytest

from cluster import processes
from configs import base
from configs.errors import ConfigError
from core import evaluators
from core.evaluators import EvaluationContext, Evaluator, as_numbers, check_names, lines_of
from core.job import Job


class Gives(Evaluator):
    def __init__(self, name, figures=None, ranks=False):
        self.name, self.figures, self.ranks_checkpoints = name, figures, ranks

    def evaluate(self, context):
        return self.figures


def test_a_name_that_would_mix_with_other_lines_is_refused_before_training():
    check_names([Gives("forks"), Gives("heads")])
    for names in ([""], ["train"], ["event"], ["eval"], ["votes"], ["forks", "forks"], [3]):
        with pytest.raises(ValueError, match="give each evaluator a name of its own"):
            check_names([Gives(name) for name in names])
    with pytest.raises(ValueError, match=r"^Evaluator.name=''"):
        check_names([Evaluator()])


@pytest.mark.parametrize("every", [None, "1", 2.5])
def test_steps_between_evaluations_are_checked_before_training(every):
    evaluator = Gives("forks")
    evaluator.every = np.int64(2)
    check_names([evaluator])
    evaluator.every = every
    with pytest.raises(TypeError, match=f"^Gives.every={every!r} must be a whole number of steps"):
        check_names([evaluator])


@pytest.mark.parametrize("lines", ["line", None, [1]])
def test_lines_that_are_none_are_refused_with_the_name_of_their_evaluator(lines):
    evaluator = Gives("forks")
    assert lines_of(evaluator, None, {}) == []
    evaluator.lines = lambda context, figures: lines
    with pytest.raises(TypeError, match=r"^evaluator forks: lines\(\) returned .*; it must return a list of texts"):
        lines_of(evaluator, None, {})


def test_one_evaluator_ranks_the_checkpoints_which_is_the_held_out_loss_if_there_is_one():
    corpus, config = types.SimpleNamespace(heldout=types.SimpleNamespace(test_puzzles={}), tasks=()), base.get_config()
    ranks, other, also = Gives("forks", ranks=True), Gives("heads"), Gives("tails", ranks=True)
    assert evaluators.of_run(config, None, [], [other, ranks]) == [other, ranks]
    assert evaluators.of_run(config, corpus, [], [other])[0].ranks_checkpoints
    with pytest.raises(ValueError, match=r"^forks and tails rank the checkpoints; give tails ranks_checkpoints=False"):
        evaluators.of_run(config, None, [], [ranks, also])
    with pytest.raises(ValueError, match=r"^eval and forks rank the checkpoints; give forks ranks_checkpoints=False"):
        evaluators.of_run(config, corpus, [], [other, ranks])


def test_arrays_of_one_element_are_numbers():
    figures = {"a": jnp.float32(1.5), "b": np.int64(2), "c": jnp.bfloat16(0.5), "d": math.nan, "e": 3, "f": np.ones(1)}
    numbers = as_numbers(Gives("forks"), figures)
    assert json.loads(json.dumps(numbers | {"d": None})) == {"a": 1.5, "b": 2, "c": 0.5, "d": None, "e": 3, "f": 1.0}
    assert math.isnan(numbers["d"])


@pytest.mark.parametrize(
    ("figures", "ranks", "message"),
    [
        ({"x": np.ones(2)}, False, "figure 'x' is array.*must be one number"),
        ({"x": "high"}, False, "figure 'x' is 'high'; it must be one number"),
        (3.0, True, r"evaluate\(\) returned 3.0; return {name: number}"),
        ({3: 3.0}, False, r"evaluate\(\) returned {3: 3.0}; return {name: number}"),
        ({"x": 1j}, False, "figure 'x' is 1j; it must be one number"),
        ({"x": None}, False, "figure 'x' is None; it must be one number"),
        ({"step": 1.0}, False, "a line of metrics.jsonl has its own 'step'"),
        ({"event": 1.0}, False, "a line of metrics.jsonl has its own 'event'"),
        ({"total_tokens": 1.5}, False, "a line of metrics.jsonl has its own 'total_tokens'"),
        ({"x": 1.0}, True, 'ranks_checkpoints needs a figure "loss"'),
    ],
)
def test_other_figures_are_refused_with_the_name_of_their_evaluator(figures, ranks, message):
    with pytest.raises((TypeError, ValueError), match=f"^evaluator forks: {message}"):
        as_numbers(Gives("forks", ranks=ranks), figures)


def test_no_figures_without_a_stop_is_a_mistake_and_no_interruption():
    """As an interruption, its exit status would have the run started again, to end at the same evaluation."""
    job = types.SimpleNamespace(
        log=types.SimpleNamespace(flush=lambda: None, display=types.SimpleNamespace(evaluated=None)),
        run=None, eval_params=lambda state: {},
        compiled_steps=types.SimpleNamespace(frozen={}), corpus=None, workdir=None,
        lost=types.SimpleNamespace(record=None, gather_reason=lambda: ""),
        clock=types.SimpleNamespace(enter=lambda phase: None, within=lambda phase: contextlib.nullcontext()),
    )  # fmt: skip
    with pytest.raises(TypeError, match="evaluator forks returned None and was not asked to stop"):
        Job.evaluate(job, Gives("forks"), None, 2, lambda: True, is_last=False)

    class Obeys(Evaluator):
        def evaluate(self, context):
            return None if context.stop() else {}

    assert Job.evaluate(job, Obeys(), None, 2, lambda: True, is_last=False)[1] is None


def test_a_run_that_goes_on_after_its_end_ranks_the_checkpoint_of_that_end(tmp_path):
    """The state of the last step was saved before its evaluation, so that its record has no loss."""
    ranks, other = (types.SimpleNamespace(name=name, ranks_checkpoints=name == "eval") for name in ("eval", "tasks"))
    (tmp_path / "metrics.jsonl").write_text('{"kind": "eval", "step": 3, "eval_loss": 2.5}\n')

    def repeated(steps: int, losses: dict) -> list:
        record = {"step": 3, "config": {"train.steps": steps}}
        return evaluators.without_figures([], [ranks, other], tmp_path, record, losses)

    assert repeated(3, {}) == [ranks]
    assert repeated(3, {3: 2.5}) == [] and repeated(9, {}) == [], "ranked already, and a stop between evaluations"


def test_what_an_evaluator_decodes_with_drops_no_token():
    config = base.get_config()
    dropless = types.SimpleNamespace(graph="dropless", config=config)
    run = types.SimpleNamespace(graph="with a capacity", config=config, dropless=lambda: dropless)
    assert EvaluationContext(run, {}, {}, None, None, 0).engine.graph == "dropless"


def test_hosts_that_would_evaluate_other_documents_are_told(monkeypatch, tmp_path):
    """Without this, the host with more batches waited for the others for ever."""
    theirs = {"digest": "another"}
    monkeypatch.setattr(processes, "gather", lambda topic, value: [value, theirs])
    corpus = types.SimpleNamespace(digest="own")
    with pytest.raises(ConfigError, match=r"differ in their corpus: digest is another on process 1, own on process 0"):
        evaluators.evaluate_newest(base.get_config(), tmp_path, tmp_path, corpus)
