# SPDX-License-Identifier: Apache-2.0
"""Score a trained model on your own questions: python score.py --workdir=runs/tiny --questions=my_questions.jsonl

A file of questions has a JSON object per line: a multiple-choice question, a prompt with its exact answer, or a text
whose perplexity is measured; see docs/scoring.md. Several --questions are several tasks.
"""

from core import command_line

command_line.flags.DEFINE_multi_string("questions", [], "file with a JSON object per line; may be given several times")
command_line.flags.DEFINE_string("results", "", "file for the result of each item; default: WORKDIR/scores.jsonl")
command_line.flags.DEFINE_integer("limit", 0, "score only the first items of each task; 0: all", lower_bound=0)
if __name__ == "__main__":
    COMMAND = command_line.parse(__doc__, use=lambda flags: command_line.READ)

import pathlib
import sys

import jax

from cluster import processes
from configs.errors import ConfigError
from core.scored_model import restored_model
from parallelism.mesh import mesh_context
from scoring import figures, questions, tasks
from settings import validation
from trained_run import tokenizer_of

RESULTS = "scores.jsonl"


def main(command: command_line.Command) -> None:
    """Print a table of all metrics, and write the result of each item."""
    config, items = command.config, check(command)
    command_line.join(command)
    if command.num_devices is None:
        validation.validate(config, jax.device_count(), command.loaded)
    progress = figures.Progress() if processes.index() == 0 else lambda *batches: None
    model, step = restored_model(config, command.address, tokenizer_of(command.address, config), progress)
    with mesh_context(model.mesh):
        results = tasks.score(model, items)
    if processes.index() == 0:
        path = results_file(command)
        figures.write_results(path, results)
        print("\n".join(figures.table(tasks.figures_of(results))))
        print(f"{command.address} at step {step:,}; each item: {path}", file=sys.stderr)
    processes.leave()


def check(command: command_line.Command) -> list[questions.Item]:
    """Return the items of --questions; report every mistake before the slow restore of the weights."""
    flags, config = command_line.FLAGS, command.config
    if not flags.questions:
        raise ConfigError("nothing to score; give --questions=FILE.jsonl")
    if config.train.objective == "recursive":
        raise ConfigError(
            f"{command.address} is a recursive model, which has no log-likelihoods of texts; score it with train.py "
            "--evaluate_only"
        )
    command_line.check_file_to_write("results")
    tokenizer_of(command.address, config)
    return questions.read_files(flags.questions, "--questions", flags.limit)


def results_file(command: command_line.Command) -> pathlib.Path:
    """Return the file for the result of each item."""
    given = command_line.FLAGS.results
    return pathlib.Path(given).expanduser() if given else command.workdir / RESULTS


if __name__ == "__main__":
    main(COMMAND)
