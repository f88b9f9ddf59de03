# SPDX-License-Identifier: Apache-2.0
"""Rollouts of reinforcement learning: answers that the model draws to prompts, their rewards and advantages.

Letters: B rows, T tokens.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from inference.batching import Batch, Continuation, Request
from inference.choice import Sampling
from inference.engine import Engine
from input_pipeline.packing import IGNORED, empty_rows, put_sequence
from input_pipeline.tokenization import AnyTokenizer, open_tokenizer
from objectives.objective import Sampled
from reasoning.tasks import TASKS, Task

MOST_ROWS = 128  # of the cache; more answers wait
EPSILON = 1e-4  # added to the deviation of a group

Reward = Callable[[str, str], float]


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Draws the batch of a step.

    Attributes:
      task: a key of TASKS, whose answers end with a final line.
      tokenizer: a value of data.tokenizer.
      group_size: answers to a prompt; it divides the rows of a batch.
      temperature: of the draws.
      divides: whether advantages are divided by the deviation of the group.
      reward: "task" (1 if the answer is right, else 0) or "random" (a control: 0 or 1 by chance).
      vocab_size: ids from here on are never drawn.
    """

    task: str
    tokenizer: str
    group_size: int
    temperature: float
    divides: bool
    reward: str
    vocab_size: int

    def sample(self, engine: Engine, batch: dict[str, jax.Array], key: jax.Array) -> Sampled:
        """Return int32 arrays like `batch`: answers to the prompts of its first rows, `group_size` of each."""
        tokens_BT, targets_BT = (process_allgather(batch[name], tiled=True) for name in ("tokens", "targets"))
        rows, length = tokens_BT.shape
        prompts = [prompt_of(tokens_BT[row], targets_BT[row]) for row in range(rows // self.group_size)]
        asked = [prompt for prompt in prompts for _ in range(self.group_size)]
        seeds = np.asarray(jax.random.bits(key, (rows,)))
        tokenizer, task = open_tokenizer(self.tokenizer), TASKS[self.task]()
        answers = self._answers(engine, asked, seeds, tokenizer, task)
        reward, decode = self._reward(task, seeds), tokenizer.decode
        texts = [(decode(prompt), decode(answer)) for prompt, (answer, _) in zip(asked, answers, strict=True)]
        records = [{"prompt": prompt, "answer": answer, "reward": reward(prompt, answer)} for prompt, answer in texts]
        rewards_B = np.array([record["reward"] for record in records], np.float32)
        return Sampled(_arrays(asked, answers, rewards_B, self._advantages(rewards_B), length), records)

    def _answers(
        self, engine: Engine, asked: Sequence[list[int]], seeds: np.ndarray, tokenizer: AnyTokenizer, task: Task
    ) -> list[tuple[list[int], list[float]]]:
        """Return (tokens, log-probability of each) of an answer to each prompt, whose last token is a newline."""
        (line_end,) = tokenizer.encode("\n")
        batch = Batch(engine, num_rows=min(len(asked), MOST_ROWS), vocab_size=self.vocab_size)
        longest = task.max_depth * task.max_line
        requests = [
            Request(prompt, min(longest, engine.length - len(prompt)), Sampling(self.temperature, seed=int(seed)))
            for prompt, seed in zip(asked, seeds, strict=True)
        ]
        added = [batch.add(request) for request in requests]
        running = set(range(len(added)))
        while running:
            batch.step()
            for place in list(running):
                one = added[place]
                if not one.reason and one.tokens and one.tokens[-1] == line_end and _is_complete(one, tokenizer, task):
                    batch.cancel(one)
                if one.reason:
                    running.remove(place)
        return [(one.tokens, one.log_probs) for one in added]

    def _reward(self, task: Task, seeds: np.ndarray) -> Reward:
        if self.reward == "random":
            draws = iter((seeds & 1).tolist())
            return lambda prompt, answer: next(draws)
        return lambda prompt, answer: float(task.is_correct(prompt, answer))

    def _advantages(self, rewards_B: np.ndarray) -> np.ndarray:
        """Return rewards minus the mean of their group, and divided by its deviation if `divides`: float32 [B]."""
        groups = rewards_B.reshape(-1, self.group_size)
        centered = groups - groups.mean(axis=1, keepdims=True)
        if self.divides:
            centered = centered / (groups.std(axis=1, keepdims=True) + EPSILON)
        return centered.reshape(-1).astype(np.float32)


def prompt_of(tokens_T: np.ndarray, targets_T: np.ndarray) -> list[int]:
    """Return the tokens of a row up to the first target that is learned."""
    learned = np.flatnonzero(targets_T != IGNORED)
    return tokens_T[: learned[0] + 1].tolist()


def _is_complete(one: Continuation, tokenizer: AnyTokenizer, task: Task) -> bool:
    lines = tokenizer.decode(one.tokens).removesuffix("\n").split("\n")
    return task.is_final(lines[-1]) or len(lines) >= task.max_depth


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
