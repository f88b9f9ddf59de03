# SPDX-License-Identifier: Apache-2.0
"""Rollouts of reinforcement learning: answers that the model draws to prompts, their rewards and advantages.

Letters: B rows, T tokens.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from cluster import processes
from inference.batching import Batch, Request
from inference.choice import Sampling
from inference.engine import Engine
from input_pipeline.errors import DataError
from input_pipeline.packing import IGNORED, empty_rows, put_sequence
from input_pipeline.tokenization import open_tokenizer
from layers.attention.decode_kernels import TILE
from reasoning.answers import REWARD_NAMES, Lines, Turns, answers_of, registered

MOST_ROWS = 128  # of the cache; more answers wait
MOST_REWARD = 1e30  # differences and sums of rewards are float32 numbers too
EPSILON = 1e-4  # added to the deviation of a group


class Texts(NamedTuple):
    """An answer with the number of its question (0 where the data has none), the prompt, and the data's answer."""

    number: int
    prompt: str
    answer: str
    reference: str


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Draws the batch of a step.

    Attributes:
      source, path: the values of data.source and data.path, whose prompts are answered.
      tokenizer: a value of data.tokenizer.
      group_size: answers to a prompt; it divides the rows of a batch.
      temperature: of the draws.
      divides: whether advantages are divided by the deviation of the group.
      reward: "task" (the score of the task, such as 1 for a right answer and 0 for others), "reference" (1 if its last
        line is that of the answer in the data), "random" (a control: 0 or 1 by chance), or a name of REWARDS.
    """

    source: str
    path: str
    tokenizer: str
    group_size: int
    temperature: float
    divides: bool
    reward: str

    def check_reward(self) -> None:
        """Raise ConfigError if the reward is a function that no recipe registered."""
        if self.reward not in REWARD_NAMES:
            registered(self.reward)

    def sample(
        self, engine: Engine, batch: dict[str, jax.Array], key: jax.Array
    ) -> tuple[dict[str, np.ndarray], list[dict]]:
        """Return the batch of objectives/grpo.py: `group_size` answers to each of the first prompts of `batch`.

        Also returns the prompt, answer and reward of each row.
        """
        tokens_BT, targets_BT, segments_BT = (
            process_allgather(batch[name], tiled=True) for name in ("tokens", "targets", "segments")
        )
        rows, length = tokens_BT.shape
        learned_BT = (targets_BT != IGNORED) & (segments_BT == 1)
        numbers_B = process_allgather(batch["numbers"], tiled=True) if "numbers" in batch else np.zeros(rows, np.int32)
        most = min(engine.length, length + 1)  # tokens of a prompt with its answer
        chosen = prompts_of(tokens_BT, targets_BT, learned_BT, rows // self.group_size, most)
        prompts = [prompt for prompt in chosen for _ in range(self.group_size)]
        asked, seeds = [prompt for _, prompt, _ in prompts], np.asarray(jax.random.bits(key, (rows,)))
        tokenizer = open_tokenizer(self.tokenizer)
        form = answers_of(self.source, self.path, tokenizer, self.tokenizer)
        policy = Sampling(self.temperature, reported_temperature=self.temperature)
        requests = [
            Request(prompt, most - len(prompt), dataclasses.replace(policy, seed=int(seed)))
            for prompt, seed in zip(asked, seeds, strict=True)
        ]
        short = dataclasses.replace(engine, length=min(engine.length, tokens_of_row(length)))  # of the cache
        drawn = _drawn(Batch(short, num_rows=min(rows, MOST_ROWS), vocab_size=tokenizer.vocab_size), requests, form)
        texts = [
            Texts(int(numbers_B[row]), tokenizer.decode(prompt), form.text(answer), form.text(reference))
            for (row, prompt, reference), (answer, _) in zip(prompts, drawn, strict=True)
        ]
        rewards = self._rewards(form, texts, seeds)
        records = [
            {"prompt": one.prompt, "answer": one.answer, "reward": reward}
            for one, reward in zip(texts, rewards, strict=True)
        ]
        rewards_B = np.array(rewards, np.float32)
        return _arrays(asked, drawn, rewards_B, self._advantages(rewards_B), length), records

    def _rewards(self, form: Lines | Turns, texts: Sequence[Texts], seeds: np.ndarray) -> list[float]:
        """Return the reward of each answer."""
        if self.reward == "random":
            return [float(seed & 1) for seed in seeds]
        if self.reward == "reference":
            return [float(form.last_line(one.answer) == form.last_line(one.reference)) for one in texts]
        if self.reward == "task":
            return [form.score(one.number, one.prompt, one.answer) for one in texts]
        rewards, problem = processes.shared("rewards", lambda: _called(self.reward, texts))
        if problem:
            raise DataError(problem)
        return rewards

    def _advantages(self, rewards_B: np.ndarray) -> np.ndarray:
        """Return rewards minus the mean of their group, and divided by its deviation if `divides`: float32 [B]."""
        groups = rewards_B.astype(np.float64).reshape(-1, self.group_size)  # the mean of equal rewards is exact
        centered = groups - groups.mean(axis=1, keepdims=True)
        if self.divides:
            centered = centered / (groups.std(axis=1, keepdims=True) + EPSILON)
        return centered.reshape(-1).astype(np.float32)


def _called(name: str, texts: Sequence[Texts]) -> tuple[list[float], str]:
    """Return what a function of a recipe returns for each answer, and what is wrong with it; "" if it is right.

    Process 0 alone calls it: functions that ask a service or draw at random would return other rewards in another one.
    """
    function = registered(name)
    try:
        return [_finite(function(one.prompt, one.answer), name) for one in texts], ""
    except DataError as error:
        return [], str(error)


def _finite(number: object, name: str) -> float:
    """Return what a function of a recipe returned as a reward; DataError if that is no number up to MOST_REWARD."""
    try:
        value = math.nan if isinstance(number, str | bytes) else float(number)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not abs(value) <= MOST_REWARD:  # also not if it is NaN
        raise DataError(
            f"grpo.reward={name} returned {number!r:.60}; a reward must be a finite number from {-MOST_REWARD:g} to "
            f"{MOST_REWARD:g}"
        )
    return value


def check_probabilities(rewards: Iterable[float]) -> None:
    """Raise DataError unless all rewards are from 0 to 1; training then saves and ends."""
    if wrong := [one for one in rewards if not 0 <= np.float32(one) <= 1]:
        raise DataError(f"train.objective=value_head predicts rewards from 0 to 1; grpo.reward gave {wrong[0]:g}")


def _drawn(batch: Batch, requests: Sequence[Request], form: Lines | Turns) -> list[tuple[list[int], list[float]]]:
    """Return (tokens, log-probability of each) of an answer to each prompt, with the token that ends it."""
    running = added = [batch.add(request) for request in requests]
    while running:
        batch.step()
        for one in running:
            if not one.reason and one.tokens and form.is_complete(one.tokens):
                batch.cancel(one)
        running = [one for one in running if not one.reason]
    return [(one.tokens, one.log_probs) for one in added]


def tokens_of_row(length: int) -> int:
    """Return the tokens of a row of the cache, for rows of `length` inputs: whole tiles, as the decode kernel needs."""
    return -(-(length + 1) // TILE) * TILE


def prompts_of(
    tokens_BT: np.ndarray, targets_BT: np.ndarray, learned_BT: np.ndarray, count: int, most: int
) -> list[tuple[int, list[int], list[int]]]:
    """Return (row, tokens up to the first target that is learned, targets of that answer) of `count` rows.

    Rows without such a target among their first `most` tokens are left out. If there are too few others, they are used
    again. Raises DataError if there is none.
    """
    found = []
    for row in np.flatnonzero(learned_BT[:, : most - 1].any(axis=1)):
        first = learned_BT[row].argmax()
        count_of_answer = np.append(learned_BT[row, first:], False).argmin()
        answer = targets_BT[row, first:][:count_of_answer]
        found.append((int(row), tokens_BT[row, : first + 1].tolist(), answer.tolist()))
    if not found:
        raise DataError("no row of a batch has an answer, so there is no prompt; train.sequence_length is too short")
    return list(itertools.islice(itertools.cycle(found), count))


def _arrays(
    asked: Sequence[list[int]], answers: Sequence[tuple[list[int], list[float]]], rewards_B: np.ndarray,
    advantages_B: np.ndarray, length: int,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Return the batch: a row for each answer, cut off at `length` inputs."""
    batch = empty_rows(len(asked), length)
    old_BT = np.zeros((len(asked), length), np.float32)
    for row, (prompt, (tokens, log_probs)) in enumerate(zip(asked, answers, strict=True)):
        whole, first = [*prompt, *tokens][: length + 1], len(prompt) - 1
        end = put_sequence(batch, row, 0, 1, whole, np.arange(len(whole)) > first)
        old_BT[row, first:end] = log_probs[: end - first]
    floats = {"advantages": advantages_B, "rewards": rewards_B, "old_log_probs": old_BT}
    return batch | {name: array.astype(np.float32).view(np.int32) for name, array in floats.items()}
