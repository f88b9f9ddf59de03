# SPDX-License-Identifier: Apache-2.0
"""The messages before the first step about data that is too small for the run, or that holds too much out."""

import contextlib
import re
import types

import numpy as np
import pytest

from cluster import identity, processes
from configs.base import get_config
from configs.errors import ConfigError
from core import joining, start
from core.evaluators import Evaluator
from settings import loading


def corpus(num_tokens: int):
    return types.SimpleNamespace(train=types.SimpleNamespace(num_tokens=num_tokens))


@pytest.mark.parametrize(
    ("keys", "num_tokens", "is_said"),
    [
        ({}, 4_000_000, True), ({"data.path": "mine"}, 4_000_000, False), ({"data.source": "text"}, 4_000_000, False),
        ({}, 400_000_000, False), ({"train.steps": "1000"}, 4_000_000, False),
    ],
)  # fmt: skip
def test_a_large_run_on_the_default_corpus_is_told_what_to_set(keys, num_tokens, is_said):
    config = loading.load("configs/large.py", "v4-8", keys).config
    line = start.repetition(config, corpus(num_tokens))
    assert bool(line) == is_said
    if is_said:
        assert "3,932 M tokens are 983 passes over the 4.0 M tokens" in line and "--config.data.path=FOLDER" in line


def test_a_run_that_was_copied_without_its_checkpoints_says_that_it_begins_again(tmp_path, capfd):
    start.announce_restart(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    start.announce_restart(tmp_path)
    assert capfd.readouterr() == ("", "")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    start.announce_restart(tmp_path)
    said = f"{tmp_path} has metrics of earlier steps, but no checkpoint: the run begins again at step 0"
    assert said in "".join(capfd.readouterr())


def test_a_run_that_goes_on_with_another_batch_and_as_many_steps_says_so():
    """Its length may have been given in epochs; only the steps are stored."""
    config = loading.load("configs/tiny.py", "", {"train.global_batch": "16", "train.steps": "123"}).config
    before = {"train.global_batch": 8, "train.steps": 123}
    assert start.kept_steps(config, {"config": before}).startswith("train.steps stays 123 with the other batch; if epo")
    for change in ({"train.global_batch": 16}, {"train.steps": 100}):
        assert start.kept_steps(config, {"config": before | change}) == ""


@pytest.mark.parametrize(
    ("num_tokens", "num_documents", "validation_path", "said"),
    [
        (100_000_000, 9, "", None), (15_000_000_000, 9, "", "--config.data.holdout_fraction=3e-05"),
        (200_000_000, 9, "heldout/", "a smaller --config.data.validation_path=FILE"),
        (200_000_000, 1, "", "--config.data.validation_path=FILE"),
    ],
)  # fmt: skip
def test_a_run_that_holds_out_very_much_is_told_what_to_set(num_tokens, num_documents, validation_path, said):
    config = loading.load("configs/large.py", "v4-8", {"data.path": "mine"}).config
    config.data.validation_path = validation_path
    held_out = types.SimpleNamespace(
        is_plain_text=True, train=types.SimpleNamespace(parts=["one"]),
        heldout=types.SimpleNamespace(num_tokens=num_tokens, num_documents=num_documents),
    )  # fmt: skip
    line = start.large_heldout(config, held_out)
    assert line.endswith(f"begin the run with {said}") if said else line == ""


def test_batches_of_the_caller_are_not_judged():
    config = loading.load("configs/large.py", "v4-8", {}).config
    assert start.repetition(config, None) == start.large_heldout(config, None) == ""


def test_the_passes_of_a_ramp_are_those_of_its_smaller_batches():
    keys = {"train.steps": "40000", "batch.ramp": "steps", "batch.first": "64", "batch.increase_step": "100000"}
    for of_ramp, passes in (({}, 983), (keys, 655)):
        config = loading.load("configs/large.py", "v4-8", of_ramp).config
        line = start.repetition(config, corpus(4_000_000))
        assert f" {passes} passes " in line


@pytest.mark.parametrize(
    ("largest", "input_dim", "said"),
    [
        (16, 0, ""), (17, 0, "the largest input of the data, 17; use --config.model.levels=18 in a new run"),
        (0, 3, "is not the 3 numbers of an input of data.source=labeled; use --config.model.input_dim=3 in a new run"),
    ],
)  # fmt: skip
def test_inputs_that_the_model_does_not_know_are_refused(largest, input_dim, said):
    """Also where a run is only evaluated, on other data: there the model would compute with them."""
    config = loading.load("configs/digits.py", "", {}).config
    held_out = types.SimpleNamespace(largest_input=largest, input_dim=input_dim)
    corpus = types.SimpleNamespace(train=types.SimpleNamespace(parts=()), heldout=held_out)
    with pytest.raises(ConfigError, match=re.escape(said)) if said else contextlib.nullcontext():
        start.check_inputs(config, corpus)


@pytest.mark.parametrize(
    ("carry", "steps_of_batch", "step", "may"),
    [({}, 1, 3, True), ({"states": np.zeros(2)}, 1, 3, False), ({}, 2, 3, False), ({}, 2, 4, True)],
)
def test_the_batch_size_stays_where_rows_or_answers_go_on(carry, steps_of_batch, step, may):
    objective = types.SimpleNamespace(frozen_models=tuple, steps_of_batch=steps_of_batch)
    run = types.SimpleNamespace(
        config=get_config(), objective=objective, abstract_frozen={}, abstract_state=types.SimpleNamespace(carry=carry)
    )
    assert ("train.global_batch" in start.may_change(run, step)) is may
    assert "train.init_from" not in start.may_change(run, step)
    run.abstract_frozen = {"base": {}}
    assert "train.init_from" in start.may_change(run, step), "a folder may be moved"


def test_an_optimizer_that_begins_with_infinity_is_refused():
    """Each save would find a state that is not finite, and blame the batches before it."""
    start.check_finite(types.SimpleNamespace(optimizer={"moment": np.zeros(2), "count": np.int32(0)}))
    with pytest.raises(ConfigError, match=r"^the state of the optimizer begins with best\.value=inf; a checkpoint has"):
        start.check_finite(types.SimpleNamespace(optimizer={"best": {"value": np.float32("inf")}}))


def test_a_ramp_is_refused_where_rows_carry_something(monkeypatch, tmp_path):
    """The first step of an own objective would fail with an error of jax."""
    config = get_config()
    config.batch.update(ramp="steps", first=2)
    run = types.SimpleNamespace(abstract_state=types.SimpleNamespace(carry={"seen": np.zeros(4)}))
    monkeypatch.setattr(start, "assemble", lambda config: run)
    monkeypatch.setattr(start.preflight, "check_device", lambda run: None)
    with pytest.raises(ConfigError, match=r"^batch\.ramp=steps changes the number of rows, and train\."):
        start.prepare(config, tmp_path, [], reads_corpus=True, is_new=True, vocab_size_typed=True)


class Own(Evaluator):
    name = "own"
    every = 2


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"optimizer.learning_rate": 0.5}, "their configuration: optimizer.learning_rate is 0.5 on process 1, 0.0"),
        ({"data.readers": 2}, ""),
        (
            {"evaluator own": "evaluated every 3 steps"},
            "own is evaluated every 3 steps on process 1, evaluated every 2 ",
        ),
        ({"evaluator other": "evaluated every 1 steps"}, "the arguments of train(): evaluator other is evaluated ever"),
        ({"batches": "given"}, "the arguments of train(): batches is given on process 1, missing on process 0"),
    ],
)
def test_processes_that_are_given_other_arguments_are_told_before_anything_begins(monkeypatch, theirs, said):
    """A program that joins by itself: with another learning rate each host would train its part of the weights so."""

    def gather(topic: str, value: dict) -> list[dict]:
        of_topic = {key: theirs[key] for key in theirs if ("." in key) == ("configuration" in topic)}
        return [value, value | {key: it for key, it in of_topic.items() if key in value or "." not in key}]

    monkeypatch.setattr(processes, "gather", gather)
    with pytest.raises(ConfigError, match=re.escape(said)) if said else contextlib.nullcontext():
        start.check_same_arguments(get_config(), [Own()], reads_corpus=True)


def test_a_program_that_joins_by_itself_compares_code_libraries_and_variables(monkeypatch):
    done = []
    monkeypatch.setattr(processes, "start", lambda *arguments: done.append("joined"))
    monkeypatch.setattr(identity, "check_same", lambda: done.append("compared"))
    monkeypatch.setattr(joining.atexit, "register", lambda work: done.append(work.__name__))
    joining._start.__wrapped__(None)
    assert done == ["joined", "_part", "compared"]
