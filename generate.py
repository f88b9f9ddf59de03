# SPDX-License-Identifier: Apache-2.0
"""Sample from a trained model: python generate.py --workdir=runs/tiny --prompt="def " --max_tokens=64

Several --prompt make a batch. --temperature=0 takes the likeliest token each time.
"""

import command_line

command_line.flags.DEFINE_multi_string("prompt", [""], "text to continue; may be given several times")
command_line.flags.DEFINE_integer("max_tokens", 64, "longest continuation in tokens", lower_bound=1)
command_line.flags.DEFINE_float("temperature", 0.7, "0 is greedy; 1 draws from the model as it is", lower_bound=0)
command_line.flags.DEFINE_integer("top_k", 0, "draw from the k likeliest tokens only; 0: all", lower_bound=0)
command_line.flags.DEFINE_float("top_p", 1.0, "draw from the likeliest with this total probability", 0.0, 1.0)
command_line.flags.DEFINE_integer("seed", 0, "of the draws")
if __name__ == "__main__":
    COMMAND = command_line.parse(__doc__, stored=lambda flags: True, one_device=True)

import math

import jax

import assembly
from configs.base import ConfigError
from input_pipeline import tokenization
from parallelism.mesh import mesh_context
from reasoning.sampling import continue_texts
from training.checkpoints import Checkpoints


def main(command: command_line.Command) -> None:
    """Print each prompt with its continuation; runs on one device."""
    flags, config = command_line.FLAGS, command.config
    check_prompts(flags)
    if config.data.source == "synthetic":
        raise ConfigError(f"{command.address} was not trained on text, so there is no tokenizer to write with")
    tokenizer = tokenization.open_tokenizer(config.data.tokenizer)
    run = assembly.assemble(config, devices=jax.devices()[:1])
    with mesh_context(run.mesh), Checkpoints(command.address) as checkpoints:
        params = checkpoints.restore_evaluated(checkpoints.newest_or_error(), run.abstract_state)
        texts = continue_texts(
            run, params, tokenizer, flags.prompt, max_tokens=flags.max_tokens, temperature=flags.temperature,
            top_k=flags.top_k, top_p=flags.top_p, seed=flags.seed,
        )  # fmt: skip
    print("\n---\n".join(prompt + text for prompt, text in zip(flags.prompt, texts, strict=True)))


def check_prompts(flags) -> None:
    """Raise ConfigError for a prompt that is no text, or a temperature that is no number."""
    if math.isnan(flags.temperature):
        raise ConfigError("--temperature=nan must be 0 or greater")
    for prompt in flags.prompt:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"--prompt={prompt!r} is not UTF-8") from None


if __name__ == "__main__":
    main(COMMAND)
