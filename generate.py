# SPDX-License-Identifier: Apache-2.0
"""Sample from a trained model: python generate.py --workdir=runs/tiny --prompt="def " --max_tokens=64

Several --prompt make a batch. --temperature=0 takes the most likely token each time. --message="Hello" asks a model
that was trained on conversations for an answer; each --message is a separate conversation. --stream prints the text of
one prompt or message while it is decoded. A recursive model solves a puzzle instead:
python generate.py --workdir=runs/sudoku --puzzle=puzzle.txt [--html=steps.html]
--trajectories=16 --supervision_steps=16 lets it try 16 times, and chooses one answer, see docs/puzzles.md.
--search=bfs searches for an answer to each --prompt, a problem of the task that the model learned, see
docs/reasoning.md: python generate.py --workdir=runs/countdown --search=bfs --prompt="3 4 8 12=27:" [--html=tree.html]
"""

from configs.reasoning_keys import KEYS
from core import command_line

command_line.flags.DEFINE_multi_string("prompt", [""], "text to continue; may be given several times")
command_line.flags.DEFINE_multi_string(
    "message", [], "what a user says to a model of conversations, for an answer; may be given several times"
)
command_line.flags.DEFINE_integer(
    "max_tokens", None, "longest continuation in tokens; default: as many as fit, at most 64", lower_bound=1
)
command_line.flags.DEFINE_float("temperature", 0.7, "0 is greedy; 1 draws from the model as it is", 0.0, 1e30)
command_line.flags.DEFINE_integer("top_k", 0, "draw from the k likeliest tokens only; 0: all", 0, 2**31 - 1)
command_line.flags.DEFINE_float("top_p", 1.0, "draw from the likeliest with this total probability", 0.0, 1.0)
command_line.flags.DEFINE_integer("seed", 0, "of the draws", lower_bound=-(2**63), upper_bound=2**63 - 1)
command_line.flags.DEFINE_bool("stream", False, "print the text of one prompt or message while it is decoded")
command_line.flags.DEFINE_string("puzzle", "", "text file with a Sudoku or a maze to solve, see puzzles/puzzle_file.py")
command_line.flags.DEFINE_string("html", "", "file for a page that shows how the puzzle or the problems were solved")
command_line.flags.DEFINE_enum(
    "search", None, KEYS["tot.search"].choices, "how to search for answers to problems; replaces the key tot.search"
)
command_line.flags.DEFINE_integer(
    "supervision_steps", 0, "of a puzzle; replaces the key inference.supervision_steps", 0, 10_000
)
command_line.flags.DEFINE_integer(
    "trajectories",
    0,
    "answers to a puzzle; one of them is chosen; replaces the key inference.trajectories",
    0,
    100_000,
)
if __name__ == "__main__":
    COMMAND = command_line.parse(__doc__, use=lambda flags: command_line.READ, one_device=True)

import math
import pathlib
import sys

from configs.errors import ConfigError, check_text
from core import output_files, solving as searching
from objectives import breadth
from objectives.breadth import Breadth
from files.paths import expanded
from parallelism.mesh import mesh_context
from puzzles import pictures, puzzle_file, solving
from reasoning import page as tree_page
from inference.sampling import check_answers
from configs.errors import visible
from trained_run import TrainedRun, tokenizer_of

SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "seed")
NOT_OF_SEARCH = ("message", "stream", *(name for name in SAMPLING if name != "seed"))
OF_TEXT = ("prompt", "search", *NOT_OF_SEARCH)
OF_PUZZLES = ("puzzle", "supervision_steps", "trajectories")


def main(command: command_line.Command) -> None:
    """Print continuations, answers or the solution of a puzzle; runs on one device."""
    flags, config = command_line.FLAGS, command.config
    check_kind(flags, config, command.address)
    if (of_search := [key for key in command.loaded.typed if key.startswith("tot.")]) and not flags.search:
        raise ConfigError(f"--config.{of_search[0]} is read by a search alone; add --search=bfs, or another one")
    if config.train.objective == "recursive":
        solve_puzzle(flags, config, command.address)
    elif flags.search:
        search_answers(flags, config, command.address)
    else:
        continue_prompts(flags, config, command.address)


def continue_prompts(flags, config, address) -> None:
    """Print each prompt with its continuation, or the answer to each message; print the checkpoint to stderr."""
    check_prompts(flags)
    tokenizer = tokenizer_of(address, config)  # report errors before the slow restore of the weights
    if flags.message:
        check_answers(config, tokenizer, address)
    trained = TrainedRun(address, config)
    print(trained.describe(), file=sys.stderr)
    how = {name: flags[name].value for name in SAMPLING}
    shown = visible if sys.stdout.isatty() else str
    if flags.stream:
        for part in trained.stream(flags.prompt[0], message=next(iter(flags.message), None), **how):
            print(shown(part), end="", flush=True)
        print()
        return
    texts = trained.answer(flags.message, **how) if flags.message else trained.generate(flags.prompt, **how)
    print(shown("\n---\n".join(texts)))


def search_answers(flags, config, address) -> None:
    """Print the best answer to each problem, or that there is none; draw the trees if --html is given."""
    output_files.check("html")
    searching.check(config, flags.prompt, "--prompt=")  # before the slow restore of the weights
    with config.unlocked():
        config.tot.search = flags.search
    trained = TrainedRun(address, config)
    print(trained.describe(), file=sys.stderr)
    found = trained.solve(flags.prompt, flags.seed)
    task = searching.task_of(config)
    shown = visible if sys.stdout.isatty() else str
    print("\n---\n".join(f"{shown(one.problem)}\n{shown(answer_lines(one, task))}" for one in found), end="")
    if flags.html:
        output_files.write("html", tree_page.page(found, f"{flags.search}, by step {trained.step} of {address}"))


def answer_lines(found, task) -> str:
    """Return the lines of the best answer, and whether it is right."""
    if not found.answer:
        return "no complete answer\n"
    is_right = task.is_correct(found.problem, found.answer)
    return f"{found.answer}{'a right answer' if is_right else 'NOT a right answer'}\n"


def solve_puzzle(flags, config, address) -> None:
    """Print the model's answer to a puzzle at each supervision step, and draw the steps if --html is given."""
    output_files.check("html")
    puzzle = puzzle_file.read(expanded(flags.puzzle))
    solving.check_fits(puzzle, config)
    trained = TrainedRun(address, config)
    print(trained.describe(), file=sys.stderr)
    how, run = breadth_of(flags, config), trained.run
    with mesh_context(run.mesh):
        if how.trajectories == 1:
            given = run.objective, run.graph, trained.params, puzzle.tokens, how.steps
            answers, chosen = solving.solve(*given, seed=flags.seed), []
        else:
            choice = config.inference.choice
            found = solving.solve_broadly(
                run.objective, run.graph, trained.params, puzzle.tokens, how, choice, flags.seed
            )
            answers, chosen = found.answers, solving.report_choice(puzzle, found, choice)
    print("\n".join([*solving.report(puzzle, answers), *chosen]))
    if flags.html:
        size, (cells, halts) = puzzle.tokens.shape, zip(*answers, strict=True)
        board = pictures.Board(
            puzzle.kind, size, puzzle.tokens, cells, halts,
            wrong=[solving.mistakes(puzzle, answer.reshape(size)) for answer in cells],
            verdict=solving.verdict(puzzle, cells[-1].reshape(size)),
        )  # fmt: skip
        page = pictures.page([board], f"{pathlib.Path(flags.puzzle).name}, by step {trained.step} of {address}")
        output_files.write("html", page)


def breadth_of(flags, config) -> Breadth:
    """Return how a puzzle is explored, by the flags or else the keys."""
    how = breadth.of_config(config)
    return how._replace(steps=flags.supervision_steps or how.steps, trajectories=flags.trajectories or how.trajectories)


def check_kind(flags, config, address) -> None:
    """Raise ConfigError for flags that belong to another kind of model than the run's."""
    solves = config.train.objective == "recursive"
    given = [name for name in (OF_TEXT if solves else OF_PUZZLES) if flags[name].present]
    if given and solves:
        raise ConfigError(f"--{given[0]}: {address} is a recursive model, which solves puzzles; give it --puzzle=FILE")
    if given:
        raise ConfigError(
            f"--{given[0]}: {address} is not a recursive model, which solves puzzles; a language model takes --prompt"
        )
    if flags.html and not solves and not flags.search:
        raise ConfigError("--html shows how a puzzle or problems were solved; it needs --search, or a recursive model")
    unread = [name for name in NOT_OF_SEARCH if flags[name].present]
    if flags.search and unread:
        raise ConfigError(
            f"--{unread[0]}: --search does not read it; its keys are --config.tot.*, see docs/reasoning.md"
        )
    if solves and not flags.puzzle:
        raise ConfigError(f"{address} is a recursive model; give it a puzzle, --puzzle=FILE")


def check_prompts(flags) -> None:
    """Raise ConfigError for text that is not UTF-8, for prompts together with messages, or for a NaN."""
    for name in ("temperature", "top_p"):
        if math.isnan(flags[name].value):  # absl accepts NaN in every range
            raise ConfigError(f"--{name}=nan is not a number")
    if flags.message and flags["prompt"].present:
        raise ConfigError("--prompt is a text to continue, and --message is one to answer; give one of them")
    if flags.stream and len(flags.message or flags.prompt) > 1:
        raise ConfigError("--stream prints one text while it is decoded; give it one --prompt or one --message")
    for name, text in [*(("message", text) for text in flags.message), *(("prompt", text) for text in flags.prompt)]:
        check_text(f"--{name}", text)


if __name__ == "__main__":
    main(COMMAND)
