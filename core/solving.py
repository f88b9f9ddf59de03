# SPDX-License-Identifier: Apache-2.0
"""Search with a run's model, as the keys of the section `tot` say."""

from collections.abc import Callable, Iterable

from configs.errors import ConfigError
from inference.batching import Batch
from inference.engine import Engine
from input_pipeline.tokenization import open_tokenizer
from reasoning.solving import Solved, Solver
from reasoning.tasks import TASKS, Task
from reasoning.thoughts import Limits
from reasoning.values import VALUES

ROWS = 40  # of the cache for several problems at once, or those of one problem if there are more


def task_of(config) -> Task:
    """Return the task that the model was trained on; ConfigError if a search cannot read its answers."""
    if config.data.source not in TASKS:
        raise ConfigError(
            f"data.source={config.data.source} has no lines of answers to search; a search needs a model that was "
            f"trained on {', '.join(TASKS)}; if a recipe adds the task, name that recipe by --config"
        )
    return TASKS[config.data.source]()


def check(config, problems: Iterable[str], what: str) -> None:
    """Raise ConfigError for a problem that is not one of the model's task; `what` begins the message."""
    task = task_of(config)
    for problem in problems:
        try:
            task.check(problem)
        except ValueError as error:
            raise ConfigError(f"{what}{problem}: {error}") from None


def solve(
    engine: Engine, config, problems: list[str], seed: int = 0, stop: Callable[[], bool] = lambda: False
) -> tuple[list[Solved] | None, Batch]:
    """Return what `tot.search` finds for each problem, and the batch, which has counted tokens; in the run's mesh.

    `stop` is called after each problem; there are no answers once it returns true.
    """
    tot, task = config.tot, task_of(config)
    limits = Limits(tot.max_thoughts, tot.thoughts_per_step, task.max_depth, tot.temperature)
    tokenizer = open_tokenizer(config.data.tokenizer)
    concurrent = max(1, min(ROWS // rows_of_search(tot), len(problems)))
    batch = Batch(engine, num_rows=concurrent * rows_of_search(tot), vocab_size=tokenizer.vocab_size)
    solver = Solver(batch, tokenizer, task, VALUES[tot.value](task, tokenizer, engine), seed)
    return solver.solve(problems, tot.search, limits, concurrent, stop), batch


def rows_of_search(tot) -> int:
    """Return the rows of the cache for one problem."""
    if tot.search == "greedy":
        return 1
    return tot.max_thoughts * (1 if tot.memory_efficient else tot.thoughts_per_step)
