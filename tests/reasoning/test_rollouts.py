# SPDX-License-Identifier: Apache-2.0
"""Rollouts with a real model: groups, rewards, advantages, and a run that resumes in the middle."""

import dataclasses
import functools
import json
import re
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from checkpointing.checkpoints import CheckpointError
from cluster.hub import RunError
from cluster.interruption import Interrupted
from configs.errors import ConfigError
from core.between_steps.faults import parse_faults
from inference.engine import Engine
from input_pipeline.errors import DataError
from input_pipeline.packing import IGNORED
from input_pipeline.tasks.countdown import CountdownRollouts, is_correct
from input_pipeline.tokenization import open_tokenizer
from reasoning import answers, rollouts
from settings import loading, validation
from tests import groups
from tests.input_pipeline.chat.conftest import CHATML, made_tokenizer
from tests.support import on_one_device

SMALL = {
    "model.dtype": "float32", "model.num_layers": "1", "model.embed_dim": "32", "model.mlp_dim": "64",
    "train.global_batch": "8", "grpo.group_size": "4", "train.steps": "4", "train.save_every": "2",
    "train.log_every": "1", "train.eval_every": "0", "evaluation.batches": "1", "logging.tensorboard": "false",
    "logging.report": "false",
    "tot.use_tot": "false",
}  # fmt: skip
SAMPLER = rollouts.Sampler("countdown_rollouts", "", "numbers", 4, 1.0, True, "task")


def small(**changes):
    typed = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    loaded = loading.load("configs/countdown_grpo.py", "", typed)
    loaded.config.mesh.fsdp = 1
    validation.validate(loaded.config, 1, loaded)
    return loaded.config


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def trained_lines(folder):
    return [line for line in lines_of(folder / "metrics.jsonl") if line["kind"] == "train"]


def records(folder):
    """Return the lines of rollouts.jsonl without their time."""
    return [line | {"time": None} for line in lines_of(folder / "rollouts.jsonl")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run, `whole`, and one that resumed after its second step."""
    folder = tmp_path_factory.mktemp("runs")
    with on_one_device():
        config = small(grpo__reward="random", grpo__temperature="0.8")
        whole = train.train(config.copy_and_resolve_references(), folder / "whole")
        shutil.copytree(folder / "whole", folder / "resumed")
        shutil.rmtree(folder / "resumed" / "checkpoints" / "4")
        resumed = train.train(config, folder / "resumed")
    assert resumed.step == 4 and resumed.metrics == whole.metrics, "bit for bit"
    return folder


def test_a_run_trains_on_what_the_live_model_draws(runs):
    """The generator's log-probabilities, at its temperature, are the trainer's to 1e-5: nothing is clipped."""
    trained = trained_lines(runs / "whole")
    assert [line["step"] for line in trained] == [1, 2, 3, 4]
    for line in trained:
        assert line["mismatch"] < 1e-5 and line["clipped"] == 0 and 0 <= line["reward"] <= 1
        assert 0 < line["rollout_seconds"] < line["step_seconds"]
    assert any(0 < line["reward"] < 1 for line in trained) and any(line["gradient_norm"] > 1e-3 for line in trained)


def test_a_file_has_each_answer_and_a_restart_repeats_its_lines(runs):
    whole, resumed = (records(runs / name) for name in ("whole", "resumed"))
    assert whole == resumed[: len(whole)] and resumed[len(whole) :] == [one for one in whole if one["step"] > 2]
    assert [one["step"] for one in whole] == [step for step in (1, 2, 3, 4) for _ in range(8)]
    for line in trained_lines(runs / "whole"):
        mine = [one for one in whole if one["step"] == line["step"]]
        assert np.mean([one["reward"] for one in mine]) == pytest.approx(line["reward"])
        assert len({one["prompt"] for one in mine}) == 2, "two groups of four answers"
        assert all(one["prompt"].endswith(":") and one["answer"] for one in mine)


@pytest.mark.slow
def test_several_updates_train_on_the_same_answers_also_after_a_resume_between_them(tmp_path):
    """The second update is corrected by the ratio of probabilities. An interrupted run has its answers in a file."""
    config = small(grpo__updates="2", train__save_every="3", grpo__reward="random", optimizer__warmup_steps="0")
    with on_one_device():
        whole = train.train(config, tmp_path / "whole")
        shutil.copytree(tmp_path / "whole", tmp_path / "lost")
        shutil.rmtree(tmp_path / "lost" / "checkpoints" / "4")
        shutil.copytree(tmp_path / "lost", tmp_path / "resumed")
        assert train.train(config.copy_and_resolve_references(), tmp_path / "resumed").metrics == whole.metrics
        fewer = config.copy_and_resolve_references()
        fewer.train.global_batch = 4
        stored = (tmp_path / "lost" / "config.json").read_bytes()
        with pytest.raises(CheckpointError, match=r"was trained to step 3 with train\.global_batch=8, now 4\. Use the"):
            train.train(fewer, tmp_path / "lost")  # step 4 trains on the answers of step 3
        assert (tmp_path / "lost" / "config.json").read_bytes() == stored
        (tmp_path / "lost" / "rollouts" / "3.npz").unlink()
        with pytest.raises(RunError, match=r"rollouts/3\.npz cannot be read, and step 4 trains on the answers"):
            train.train(config.copy_and_resolve_references(), tmp_path / "lost")
    assert [one["step"] for one in records(tmp_path / "whole")] == [1] * 8 + [3] * 8
    assert [file.name for file in (tmp_path / "whole" / "rollouts").iterdir()] == ["3.npz"]
    first, second, *_ = trained_lines(tmp_path / "whole")
    assert first["reward"] == second["reward"] and first["mismatch"] < 1e-5 < second["mismatch"]


@pytest.mark.slow
def test_a_run_is_guarded_and_survives_a_preemption(tmp_path):
    """A gradient that is not a number changes nothing, and the answers after a resume are those of the whole run."""
    with on_one_device():

        def trained(name, faults):
            return train.train(small(grpo__reward="random"), tmp_path / name, faults=parse_faults(faults))

        whole = trained("whole", "nan@2")
        with pytest.raises(Interrupted):
            trained("preempted", "nan@2,sigterm@3")
        assert trained("preempted", "nan@2,sigterm@3").metrics == whole.metrics
    assert records(tmp_path / "preempted") == records(tmp_path / "whole")
    assert [line["skipped"] for line in trained_lines(tmp_path / "whole")] == [0, 1, 0, 0]


JUDGED = """
import random
from configs import countdown_grpo
from reasoning.answers import reward

@reward
def judged(prompt, answer):
    return random.random()

def get_config():
    config = countdown_grpo.get_config()
    config.grpo.reward = "judged"
    return config
"""


@pytest.mark.slow
def test_two_processes_draw_the_same_answers_on_the_mesh_of_both(tmp_path):
    """Their rewards are the same too, also those of a judge who is not: only one of the processes asks it."""
    (tmp_path / "judged.py").write_text(JUDGED)
    typed = [f"--config.{name}={value}" for name, value in (SMALL | {"train.steps": "2"}).items()]
    command = ["train.py", f"--config={tmp_path / 'judged.py'}", f"--workdir={tmp_path / 'run'}", "--topology=v4-8"]
    ended = groups.finish(groups.start([*command, *typed], count=2, devices=4, cache=tmp_path))
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert len(records(tmp_path / "run")) == 16
    for line in trained_lines(tmp_path / "run"):
        assert line["mismatch"] < 1e-5 and line["clipped"] == 0
        rewards = [one["reward"] for one in records(tmp_path / "run") if one["step"] == line["step"]]
        assert line["reward"] == pytest.approx(np.mean(rewards), rel=1e-5)  # of float32


def test_advantages_are_relative_to_the_group():
    rewards = np.array([1, 0, 0, 0, 1, 1, 1, 1], np.float32)
    advantages = SAMPLER._advantages(rewards)
    np.testing.assert_allclose(advantages[:4], np.array([3, -1, -1, -1]) / np.sqrt(3), rtol=1e-3)  # EPSILON
    assert (advantages[4:] == 0).all(), "a group whose answers are equally good teaches nothing"
    mean = dataclasses.replace(SAMPLER, divides=False)._advantages(rewards)
    np.testing.assert_allclose(mean, [0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0])


@pytest.mark.parametrize("reward", [0.1, 0.9, 100.1, -3.3])
@pytest.mark.parametrize("size", [3, 20, 24, 199])
def test_a_group_of_equal_rewards_has_advantages_of_exactly_0(size, reward):
    """In float32 the mean of equal rewards is not always the reward, and the deviation magnifies the difference."""
    for divides in (True, False):
        sampler = dataclasses.replace(SAMPLER, group_size=size, divides=divides)
        assert not sampler._advantages(np.full(2 * size, reward, np.float32)).any()


def test_rows_are_prompts_with_answers_and_their_log_probabilities():
    asked, answers = [[1, 2, 3], [4]], [([5, 6], [-0.5, -0.25]), ([7, 8, 9, 10, 11], [-1.0, -2.0, -3.0, -4.0, -5.0])]
    batch = rollouts._arrays(asked, answers, np.array([1, 0], np.float32), np.array([0.5, -0.5], np.float32), 4)
    assert batch["tokens"].tolist() == [[1, 2, 3, 5], [4, 7, 8, 9]]
    assert batch["targets"].tolist() == [[IGNORED, IGNORED, 5, 6], [7, 8, 9, 10]], "the second answer is cut off"
    assert batch["positions"].tolist() == [[0, 1, 2, 3]] * 2 and (batch["segments"] == 1).all()
    assert batch["old_log_probs"].view(np.float32).tolist() == [[0, 0, -0.5, -0.25], [-1, -2, -3, -4]]
    assert batch["rewards"].view(np.float32).tolist() == [1, 0]


def test_an_answer_may_fill_its_row_to_the_last_target(monkeypatch):
    """A row of eight inputs has nine tokens with its last target, three of them the prompt's."""
    asked = []
    monkeypatch.setattr(rollouts, "Batch", lambda *how, **more: None)
    monkeypatch.setattr(
        rollouts, "_drawn", lambda batch, requests, form: asked.extend(requests) or [([5], [0.0])] * len(requests)
    )
    monkeypatch.setattr(rollouts, "process_allgather", lambda array, tiled: array)
    monkeypatch.setattr(rollouts, "open_tokenizer", lambda name: types.SimpleNamespace(decode=str, vocab_size=9))
    monkeypatch.setattr(rollouts, "answers_of", lambda *how: types.SimpleNamespace(text=str))
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8)
    targets = np.where(np.arange(8) < 2, IGNORED, tokens)
    batch = {"tokens": tokens, "targets": targets, "segments": np.ones_like(tokens)}
    sampler = dataclasses.replace(SAMPLER, group_size=2, reward="random")
    sampler.sample(Engine(None, {}, 64), batch, jax.random.key(0))
    assert [(len(one.prompt), one.max_tokens) for one in asked] == [(3, 6)] * 2


def test_prompts_are_the_problems_of_the_data():
    rows = CountdownRollouts(0, "train").read(np.arange(20), 80)
    for tokens, targets in zip(rows["tokens"], rows["targets"], strict=True):
        ((_, prompt, reference),) = rollouts.prompts_of(tokens[None], targets[None], (targets > 0)[None], 1, 81)
        decode = open_tokenizer("numbers").decode
        text = decode(prompt)
        assert is_correct(text, decode(reference))
        assert text.endswith(":") and text.count("=") == 1


RECIPE = """
from configs import tiny
from reasoning.answers import reward

@reward
def share_of_e(prompt, answer):
    assert prompt.count("Say e") == 1, prompt
    return answer.count("e") / max(1, len(answer))

def get_config():
    config = tiny.get_config()
    config.train.objective = "grpo"
    config.grpo.group_size = 4
    config.grpo.reward = "share_of_e"
    return config
"""


def test_two_recipes_do_not_share_the_name_of_a_reward(tmp_path, monkeypatch):
    """The first configuration would learn from the reward of the second; a file that is read again replaces its own."""
    monkeypatch.setattr(answers, "REWARDS", {})
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(RECIPE)
    for _ in range(2):
        loading.load(tmp_path / "a.py", "", {})
    with pytest.raises(ConfigError, match=r"share_of_e is a function of .*/a\.py and of .*/b\.py; rename one of them"):
        loading.load(tmp_path / "b.py", "", {})
    for cell in ("<cell 1>", "<cell 2>"):
        exec(compile(RECIPE.replace("share_of_e", "of_cell"), cell, "exec"), {"__name__": "__main__"})
    (tmp_path / "of_others.py").write_text(RECIPE.replace("share_of_e", "of_module"))
    (tmp_path / "c.py").write_text(f"import of_others\n{RECIPE.replace('share_of_e', 'of_module')}")
    monkeypatch.syspath_prepend(tmp_path)
    loading.load(tmp_path / "c.py", "", {})  # it builds on a module with another reward of that name
    assert answers.REWARDS["of_module"].__code__.co_filename == str(tmp_path / "c.py")


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """A folder with conversations, a recipe with a reward, and a model that was trained on them."""
    folder = tmp_path_factory.mktemp("chat")
    asked = [{"role": "user", "content": "Say e."}]
    told = [[*asked, {"role": "assistant", "content": "e" * count}] for count in range(1, 9)]
    lines = [json.dumps({"messages": messages}) for messages in told * 5]
    (folder / "chat.jsonl").write_text("\n".join(lines))
    (folder / "recipe.py").write_text(RECIPE)
    with on_one_device():
        yield folder, lambda recipe, name, **typed: train.train(of_chat(recipe, folder, **typed), folder / name)


def of_chat(recipe, folder, **changes):
    keys = {name: value for name, value in SMALL.items() if not name.startswith(("tot.", "grpo."))} | {
        "data.source": "chat", "data.path": str(folder / "chat.jsonl"), "data.tokenizer": "byte",
        "train.sequence_length": "48", "train.steps": "2", "data.holdout_fraction": "0.2",
        "evaluation.sample_tokens": "0", "model.vocab_size": "258", "model.max_length": "48",
    }  # fmt: skip
    loaded = loading.load(str(recipe), "", keys | {key.replace("__", "."): value for key, value in changes.items()})
    loaded.config.mesh.fsdp = 1
    validation.validate(loaded.config, 1, loaded)
    return loaded.config


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "2"])
def test_a_function_of_the_recipe_rewards_answers_to_conversations_also_with_adapters(chatting, rank):
    folder, trained = chatting
    if not (folder / "base").exists():
        trained("configs/tiny.py", "base")
    trained(folder / "recipe.py", f"rank{rank}", lora__rank=rank, train__init_from=str(folder / "base"))
    found = records(folder / f"rank{rank}")
    assert len(found) == 16 and any(one["reward"] > 0 for one in found)
    for one in found:
        assert one["reward"] == one["answer"].count("e") / max(1, len(one["answer"]))
    for line in trained_lines(folder / f"rank{rank}"):
        assert line["mismatch"] < 1e-5 and line["gradient_norm"] > 0


def test_an_answer_may_be_rewarded_for_the_last_line_of_that_in_the_data():
    sampler = dataclasses.replace(SAMPLER, reward="reference")
    texts = [(0, "1+2?", "Easy.\n 3\n", "It is\n3"), (0, "1+2?", "3\n4", "3"), (0, "1+2?", "", "3")]
    form = answers.answers_of("chat", "", open_tokenizer("byte"), "byte")
    assert sampler._rewards(form, [rollouts.Texts(*one) for one in texts], np.zeros(3, int)) == [1, 0, 0]
    form = answers.answers_of("countdown_rollouts", "", open_tokenizer("numbers"), "numbers")
    reference = "3*2=6;6 8\n?y6+8=14;14\n?y"  # what the model draws ends with its last line
    texts = [(0, "2 3 8=14:", answer, reference) for answer in ("2*3=6;6 8\n?y6+8=14;14\n", "6+8=14;14\n", "x\n?y\n")]
    assert sampler._rewards(form, [rollouts.Texts(*one) for one in texts], np.zeros(3, int)) == [1, 1, 0]


def test_an_answer_in_the_data_is_compared_without_the_marks_of_the_chat_template(tmp_path):
    """What the model draws ends with the mark; the data have a newline after it."""
    name = made_tokenizer(CHATML, tmp_path)
    tokenizer = open_tokenizer(name)
    form = answers.answers_of("chat", "", tokenizer, name)
    drawn, stored = (tokenizer.encode(text) for text in ("3<|im_end|>", "It is\n3<|im_end|>\n"))
    assert form.is_complete(drawn) and (form.text(drawn), form.text(stored)) == ("3", "It is\n3")


@pytest.mark.parametrize("returned", [None, float("nan"), float("inf"), "1", 1e300, 3.4e38])
def test_a_reward_is_a_finite_number(monkeypatch, returned):
    monkeypatch.setitem(answers.REWARDS, "mine", lambda prompt, answer: returned)
    sampler = dataclasses.replace(SAMPLER, reward="mine")
    line = f"grpo.reward=mine returned {returned!r}; a reward must be a finite number from -1e+30 to 1e+30"
    with pytest.raises(DataError, match=re.escape(line)):
        sampler._rewards(None, [rollouts.Texts(0, "1+2?", "3", "3")], np.zeros(1, int))


@pytest.mark.parametrize("returned", [1, True, np.True_, np.float64(1), np.array(1.0), jax.numpy.float32(1)])
def test_a_reward_may_be_any_number_of_python_numpy_or_jax(monkeypatch, returned):
    monkeypatch.setitem(answers.REWARDS, "mine", lambda prompt, answer: returned)
    sampler = dataclasses.replace(SAMPLER, reward="mine")
    assert sampler._rewards(None, [rollouts.Texts(0, "1+2?", "3", "3")], np.zeros(1, int)) == [1.0]


def test_rewards_of_any_size_that_is_taken_have_finite_advantages():
    edge = rollouts.MOST_REWARD
    for divides in (False, True):
        sampler = dataclasses.replace(SAMPLER, divides=divides)
        found = sampler._advantages(np.array([edge, -edge, edge, edge, -edge, -edge, -edge, edge], np.float32))
        assert found.dtype == np.float32 and np.isfinite(found).all() and np.isfinite(found.sum())


class Callable:
    """Not a function, and without a name."""

    def __call__(self, prompt, answer):
        return 1.0


@pytest.mark.parametrize("given", [Callable, Callable(), functools.partial(Callable.__call__, None), len, "task"])
def test_a_reward_is_a_function(given):
    with pytest.raises(ConfigError, match=r"^@reward takes a function \(prompt, answer\) -> number, not "):
        answers.reward(given)


def test_a_reward_may_be_a_function_that_another_wraps(monkeypatch):
    monkeypatch.setattr(answers, "REWARDS", {})

    @functools.cache
    def cached(prompt, answer):
        return 1.0

    for function in (cached, Callable().__call__):
        assert answers.reward(function) is function
    assert list(answers.REWARDS) == ["cached", "__call__"]


def test_a_function_cannot_take_the_name_of_a_reward_of_ours():
    def random(prompt, answer):
        return 1.0

    with pytest.raises(ConfigError, match="random is the name of a reward of Torus; rename the function"):
        answers.reward(random)


def test_a_prompt_is_that_of_the_first_answer_of_a_row():
    tokens = np.array([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]])
    learned = np.array([[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0]], bool)
    assert rollouts.prompts_of(tokens, tokens + 1, learned, 2, most=7) == [(0, [1, 2], [3, 4])] * 2
    assert rollouts.prompts_of(tokens, tokens + 1, learned, 1, most=3) == [(0, [1, 2], [3, 4])]
    for rows, most in ((learned[1:], 7), (learned, 2)):  # without a target, and without room for an answer
        with pytest.raises(DataError, match="no row of a batch has an answer"):
            rollouts.prompts_of(tokens, tokens, rows, 1, most)


@pytest.mark.slow
def test_a_reward_that_no_recipe_registers_is_refused(chatting):
    folder, trained = chatting
    with pytest.raises(ConfigError, match=r"^grpo\.reward=lenght is not task, reference, random, or a function"):
        trained(folder / "recipe.py", "typo", grpo__reward="lenght")


@pytest.mark.parametrize("changes, said", [
    ({"grpo__group_size": "3"}, r"train\.global_batch=8 is not a multiple of grpo\.group_size=3; use "),
    ({"data__source": "countdown"}, r"needs data\.source=countdown_rollouts, reasoning_gym_rollouts or chat, not"),
    ({"data__source": "chat"}, r"grpo\.reward=task knows the right answers of data\.source=countdown_rollouts and "),
    ({"grpo__kl": "0.1"}, r"grpo\.kl=0\.1 needs train\.init_from"),
])  # fmt: skip
def test_keys_that_cannot_work_are_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        small(**changes)


def test_only_the_first_conversation_of_a_row_is_asked(monkeypatch):
    """Padding has targets of 0, which are no answer."""
    seen = []

    def prompts_of(tokens_BT, targets_BT, learned_BT, *_):
        seen.append(learned_BT.tolist())
        raise StopIteration

    monkeypatch.setattr(rollouts, "prompts_of", prompts_of)
    rows = {"tokens": [1, 2, 3, 4, 5, 0], "targets": [-1, 3, 4, -1, 6, 0], "segments": [1, 1, 1, 2, 2, 0]}
    batch = {name: jnp.array([row] * 4) for name, row in rows.items()}
    with pytest.raises(StopIteration):
        SAMPLER.sample(types.SimpleNamespace(length=64), batch, jax.random.key(0))
    assert seen == [[[False, True, True, False, False, False]] * 4]
