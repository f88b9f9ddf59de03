# SPDX-License-Identifier: Apache-2.0
"""Score a trained model on your own questions: python score.py --workdir=runs/tiny --questions=my_questions.jsonl

A file of questions has a JSON object per line: a multiple-choice question, a prompt with its exact answer, or a text
whose perplexity is measured. --core=FOLDER computes CORE from a copy of its data, and --tasks=hellaswag,arc_easy runs
tasks of lm-evaluation-harness (an extra). docs/scoring.md describes all three.
"""

from core import command_line

command_line.flags.DEFINE_multi_string("questions", [], "file with a JSON object per line; may be given several times")
command_line.flags.DEFINE_string("core", "", "folder with core.yaml, eval_meta_data.csv and eval_data, for CORE")
command_line.flags.DEFINE_list("tasks", [], "tasks of lm-evaluation-harness, separated by commas")
command_line.flags.DEFINE_string(
    "include_path", "", "folder with your own task definitions for --tasks; Python files that they name are run"
)
command_line.flags.DEFINE_string(
    "results", "", "file with the result of each item, which is replaced; default: WORKDIR/scores.jsonl"
)
command_line.flags.DEFINE_integer("limit", 0, "score only the first items of each task; 0: all", lower_bound=0)
if __name__ == "__main__":
    COMMAND = command_line.parse(__doc__, use=lambda flags: command_line.READ)

import functools
import importlib.util
import json
import sys
from collections.abc import Callable

import jax

from cluster import processes
from configs.errors import ConfigError
from core import output_files
from core.scored_model import check_same_on_hosts, scored_model
from files.paths import expanded
from parallelism.mesh import mesh_context
from scoring import core_metric, figures, questions, tasks
from trained_run import TrainedRun, tokenizer_of

RESULTS = "scores.jsonl"
INSTALL = "make setup EXTRAS=lm-eval"
Scores = tuple[list[dict], dict[str, dict[str, figures.Figure]]]  # the result of each item, {task: {metric: figure}}


def main(command: command_line.Command) -> None:
    """Print a table of all metrics, and write the result of each item."""
    config, suites = command.config, check(command)
    command_line.join(command)
    progress = figures.Progress(quiet=processes.index() != 0)
    trained = TrainedRun(command.address, config, jax.devices())
    model = scored_model(trained.run, trained.params, trained.tokenizer, progress, is_trained=trained.step > 0)
    results, by_task = [], []
    with mesh_context(model.mesh):
        for suite in suites:
            of_items, of_tasks = suite(model)
            results, by_task = results + of_items, by_task + list(of_tasks.items())
    progress.end()
    if processes.index() == 0:
        print("\n".join(figures.table(by_task)))  # before the file, which a full disk may fail
        text = "".join(json.dumps(result, ensure_ascii=False) + "\n" for result in results)
        place = output_files.write_of_run("results", text, command, RESULTS)
        at = f" at step {trained.step:,}" if trained.step else ", imported weights"
        print(f"{command.address}{at}; each item: {place}", file=sys.stderr)
    processes.leave()


def check(command: command_line.Command) -> list[Callable[..., Scores]]:
    """Return what scores a model on what the flags ask for; report mistakes before the slow restore of the weights."""
    flags, config = command_line.FLAGS, command.config
    if "" in flags.questions:
        raise ConfigError("--questions= has no value; name a file, or omit the flag")
    if not (flags.questions or flags.core or flags.tasks):
        raise ConfigError("nothing to score; give --questions=FILE.jsonl, --core=FOLDER or --tasks=NAME")
    if config.train.objective == "recursive":
        raise ConfigError(
            f"{command.address} is a recursive model, which has no log-likelihoods of texts; score it with train.py "
            "--evaluate_only"
        )
    if flags.include_path and not flags.tasks:
        raise ConfigError("--include_path has definitions for --tasks; name the tasks, or omit it")
    if flags.include_path and not expanded(flags.include_path).is_dir():
        raise ConfigError(f"--include_path={flags.include_path} is not a folder; name one with task definitions")
    output_files.check_of_run("results", command, RESULTS)
    if flags.results and expanded(flags.results).resolve() in [expanded(file).resolve() for file in flags.questions]:
        raise ConfigError(f"--results={flags.results} is a file of --questions, and would replace it; name another")
    tokenizer, found = tokenizer_of(command.address, config), []
    if flags.questions:
        items = questions.read_files(flags.questions, "--questions", flags.limit)
        tasks.check_lengths(items, tokenizer, config.model.max_length, "--questions")
        found.append(scored_by("--questions", items, tasks.score, tasks.figures_of))
    if flags.core:
        core_tasks = core_metric.read_folder(expanded(flags.core), flags.limit)
        figures_of = functools.partial(core_metric.figures_of, core_tasks)
        found.append(scored_by("--core", core_tasks, core_metric.score, figures_of))
    if flags.tasks:
        found.append(of_harness(flags.tasks, flags.include_path, flags.limit))
    return found


def scored_by(flag: str, items: list, score: Callable, figures_of: Callable) -> Callable[..., Scores]:
    """Return what scores a model on the items of a flag."""

    def scored(model) -> Scores:
        check_same_on_hosts(items, f"the items of {flag}")
        results = score(model, items)
        return results, figures_of(results)

    return scored


def of_harness(names: list[str], include_path: str, limit: int) -> Callable[..., Scores]:
    """Return what scores a model on tasks of lm-evaluation-harness; ConfigError if it or a task cannot be used."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"--tasks needs lm-evaluation-harness, which is not installed here; run {INSTALL}")
    from scoring import harness

    manager = harness.task_manager(names, include_path and str(expanded(include_path)))
    if include_path:  # those of the package are known to work
        harness.check(names, manager)
    read = harness.read(names, manager)
    return lambda model: harness.score(model, read, manager, limit)


if __name__ == "__main__":
    main(COMMAND)
