# SPDX-License-Identifier: Apache-2.0
"""Rollouts of reinforcement learning: answers that the model draws to prompts, their rewards and advantages.

Letters: B rows, T tokens.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from inference.batching import Batch, Request
from inference.choice import Sampling
from inference.engine import Engine
from input_pipeline.errors import DataError
from input_pipeline.packing import IGNORED, empty_rows, put_sequence
from input_pipeline.tokenization import open_tokenizer
from reasoning.answers import Lines, Reward, Turns, answers_of, registered
from reasoning.tasks import TASKS

MOST_ROWS = 128  # of the cache; more answers wait
EPSILON = 1e-4  # added to the deviation of a group


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Draws the batch of a step.

    Attributes:
      source: the value of data.source, whose prompts are answered.
      tokenizer: a value of data.tokenizer.
      group_size: answers to a prompt; it divides the rows of a batch.
      temperature: of the draws.
      divides: whether advantages are divided by the deviation of the group.
      reward: "task" (1 if the answer is right, else 0), "random" (a control: 0 or 1 by chance), or a name of REWARDS.
      vocab_size: ids from here on are never drawn.
    """

    source: str
    tokenizer: str
    group_size: int
    temperature: float
    divides: bool
    reward: str
    vocab_size: int

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
        prompts = prompts_of(tokens_BT, (targets_BT != IGNORED) & (segments_BT == 1), rows // self.group_size)
        asked = [prompt for prompt in prompts for _ in range(self.group_size)]
        seeds = np.asarray(jax.random.bits(key, (rows,)))
        tokenizer = open_tokenizer(self.tokenizer)
        form = answers_of(self.source, tokenizer, self.tokenizer)
        drawn, reward = self._drawn(engine, asked, seeds, form, length), self._reward(seeds)
        texts = [(tokenizer.decode(prompt), form.text(of)) for prompt, (of, _) in zip(asked, drawn, strict=True)]
        records = [{"prompt": prompt, "answer": answer, "reward": reward(prompt, answer)} for prompt, answer in texts]
        rewards_B = np.array([record["reward"] for record in records], np.float32)
        return _arrays(asked, drawn, rewards_B, self._advantages(rewards_B), length), records

    def _drawn(
        self, engine: Engine, asked: Sequence[list[int]], seeds: np.ndarray, form: Lines | Turns, length: int
    ) -> list[tuple[list[int], list[float]]]:
        """Return (tokens, log-probability of each) of an answer to each prompt, with the token that ends it."""
        batch = Batch(engine, num_rows=min(len(asked), MOST_ROWS), vocab_size=self.vocab_size)
        most = min(engine.length, length + 1)
        running = added = [
            batch.add(Request(prompt, most - len(prompt), Sampling(self.temperature, seed=int(seed))))
            for prompt, seed in zip(asked, seeds, strict=True)
        ]
        while running:
            batch.step()
            for one in running:
                if not one.reason and one.tokens and form.is_complete(one.tokens):
                    batch.cancel(one)
            running = [one for one in running if not one.reason]
        return [(one.tokens, one.log_probs) for one in added]

    def _reward(self, seeds: np.ndarray) -> Reward:
        if self.reward == "random":
            draws = iter((seeds & 1).tolist())
            return lambda prompt, answer: next(draws)
        if self.reward == "task":
            return lambda prompt, answer: float(TASKS[self.source]().is_correct(prompt, answer))
        return registered(self.reward)

    def _advantages(self, rewards_B: np.ndarray) -> np.ndarray:
        """Return rewards minus the mean of their group, and divided by its deviation if `divides`: float32 [B]."""
        groups = rewards_B.reshape(-1, self.group_size)
        centered = groups - groups.mean(axis=1, keepdims=True)
        if self.divides:
            centered = centered / (groups.std(axis=1, keepdims=True) + EPSILON)
        return centered.reshape(-1).astype(np.float32)


def prompts_of(tokens_BT: np.ndarray, learned_BT: np.ndarray, count: int) -> list[list[int]]:
    """Return the tokens up to the first target that is learned, of `count` rows; rows without any are left out.

    Raises DataError if no row has one. If there are too few, they are used again.
    """
    rows = np.flatnonzero(learned_BT.any(axis=1))
    found = [tokens_BT[row, : learned_BT[row].argmax() + 1].tolist() for row in rows]
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
