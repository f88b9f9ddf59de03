# SPDX-License-Identifier: Apache-2.0
"""Show which activations of a trained model carry what distinguishes two prompts:
python explain.py --workdir=runs/tiny --prompt="the cat sat" --corrupt="the dog sat" --html=heat.html

It prints the strongest activations by patching, attribution and causal tracing, and writes heat maps of all layers,
positions and heads. Both prompts need the same number of tokens. docs/causality.md explains the figures.
"""

from core import command_line

PAGE = "causes.html"
command_line.flags.DEFINE_string("prompt", "", "the clean prompt, whose continuation is explained")
command_line.flags.DEFINE_string("corrupt", "", "a prompt of as many tokens that is continued in another way")
command_line.flags.DEFINE_string("html", "", f"file for the heat maps; default: WORKDIR/{PAGE}")
if __name__ == "__main__":
    COMMAND = command_line.parse(__doc__, use=lambda flags: command_line.READ)

import sys

import jax

from causality import explanation, page
from checkpointing.bucket import path_of
from cluster import processes
from configs.errors import ConfigError, check_text
from core import output_files
from inference.prompts import text_start
from parallelism.mesh import mesh_context
from settings import stored_config
from trained_run import TrainedRun, tokenizer_of


def main(command: command_line.Command) -> None:
    """Print the table, and write the heat maps."""
    flags, config = command_line.FLAGS, command.config
    check(command)
    tokenizer = tokenizer_of(command.address, config)  # report errors before the slow restore of the weights
    clean_T, corrupt_T = explanation.prompt_tokens(
        tokenizer, flags.prompt, flags.corrupt, config.model.max_length, ("--prompt", "--corrupt"),
        text_start(tokenizer, config, is_trained=stored_config.trained_to(path_of(command.address)) is not None),
    )  # fmt: skip
    command_line.join(command)
    trained = TrainedRun(command.address, config, devices=jax.devices())
    with mesh_context(trained.run.mesh):
        found = explanation.explain(trained.run.graph, trained.params, clean_T, corrupt_T, tokenizer.decode)
    if processes.index() == 0:
        print("\n".join(explanation.lines(found)))  # before the page, which a full disk may fail
        text = page.page(found, f"{flags.prompt} | {flags.corrupt}")
        place = output_files.write_of_run("html", text, command, PAGE)
        print(f"{trained.describe()}; heat maps: {place}", file=sys.stderr)
    processes.leave()


def check(command: command_line.Command) -> None:
    """Raise ConfigError for flags that are missing, and for a model that does not continue texts."""
    flags = command_line.FLAGS
    if command.config.train.objective == "recursive":
        raise ConfigError(f"{command.address} is a recursive model, which does not continue prompts; name another run")
    for name in ("prompt", "corrupt"):
        if not flags[name].value:
            raise ConfigError(f"--{name} is not given; --prompt and --corrupt are two texts of as many tokens")
        check_text(f"--{name}", flags[name].value)
    output_files.check_of_run("html", command, PAGE)


if __name__ == "__main__":
    main(COMMAND)
