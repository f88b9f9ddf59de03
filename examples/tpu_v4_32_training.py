# SPDX-License-Identifier: Apache-2.0
"""Train a 7B model on the 16 chips of a v4-32, on a mesh of three axes: data=4, model=2, fsdp=2.

    python -m examples.tpu_v4_32_training --synthetic --steps=5

On all hosts of a pod, with one folder that all hosts share:

    python pod.py launch -- python -m examples.tpu_v4_32_training --synthetic --workdir=gs://BUCKET/example

Without a TPU the mesh is simulated, and the model is scaled down. TPU_MESH_CONFIG="4,4,2" selects another mesh, for the
32 chips of a v4-64. --synthetic trains on one batch repeatedly, so that its loss must fall; without it the corpus of
--config.data is read. At the end the model is evaluated on rows that it was not trained on. Every host writes
/tmp/training.log, as well as its log in the run's folder.
"""

import itertools
import math
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # if it is run as a file

from configs.errors import ConfigError
from core import command_line
from migration import valkyrie

command_line.flags.DEFINE_bool("synthetic", False, "train on one generated batch instead of a corpus")
command_line.flags.DEFINE_integer("steps", 100, "optimizer updates", 1)
if __name__ == "__main__":
    if not os.environ.get("TPU_MESH_CONFIG"):
        os.environ["TPU_MESH_CONFIG"] = "4,2,2"  # in the order data, model, fsdp
    MESH = os.environ["TPU_MESH_CONFIG"].replace(",", "x")
    valkyrie.simulate_without_tpu()
    command_line.FLAGS.set_default("config", "configs/llama2_7b.py")
    command_line.FLAGS.set_default("workdir", f"runs/tpu_v4_32_training-{MESH}")
    COMMAND = command_line.parse(__doc__)

import jax
import jax.numpy as jnp

import train
from input_pipeline import corpus as corpora
from input_pipeline.synthetic import MarkovWindows
from cluster import processes
from core import start
from core.evaluation import heldout_batches
from core.evaluators import Evaluator
from objectives.language_modeling import loss_mask
from reporting.metrics import read_lines

NUM_BATCHES = 4  # of an evaluation


def repeated_batch(config):
    """Return an endless iterator of one whole global batch; every process takes its own rows of it."""
    rows, length = config.train.global_batch, config.train.sequence_length
    windows = MarkovWindows(config.model.vocab_size, seed=0, num_tokens=rows * length, stream="example")
    return itertools.repeat(windows.read(range(rows), length))


def synthetic_corpus(config) -> corpora.Corpus:
    """Return the corpus of data.source=synthetic: other rows of the random process that `repeated_batch` reads."""
    data = config.data.copy_and_resolve_references()
    data.update(source="synthetic", path="", mixture="", stream="", validation_path="")
    return corpora.prepare(data, vocab_size=config.model.vocab_size, vocab_size_typed=True)


class Accuracy(Evaluator):
    """Loss, accuracy and perplexity of the next token on held-out rows of the corpus, or of the synthetic one."""

    name = "accuracy"

    def evaluate(self, context):
        """Return the figures, and the milliseconds that they took without compilation."""
        run = context.run

        def sums(params, batch):
            model = run.model(params)
            stream_BTD, _ = model(batch["tokens"], batch["positions"], batch["segments"])
            right_BT = jnp.argmax(model.logits(stream_BTD), axis=-1) == batch["targets"]
            return *run.objective.evaluate(model, batch)["loss"], (right_BT * loss_mask(batch)).sum()

        corpus = context.corpus or synthetic_corpus(run.config)
        batches = list(heldout_batches(run, corpus, NUM_BATCHES))
        compiled = jax.jit(sums).lower(context.params, batches[0]).compile()
        begun, total = time.perf_counter(), [0.0, 0.0, 0.0]
        for batch in batches:
            if context.stop():
                return None
            total = [old + float(new) for old, new in zip(total, compiled(context.params, batch), strict=True)]
        loss, weight, right = total
        return {
            "eval_loss": loss / weight, "accuracy": right / weight, "perplexity": math.exp(loss / weight),
            "eval_time_ms": 1000 * (time.perf_counter() - begun), "parameters": run.models.num_parameters,
        }  # fmt: skip

    def lines(self, context, figures):
        """Return the figures in one line."""
        return [
            "eval_loss={eval_loss:.4f} accuracy={accuracy:.4f} perplexity={perplexity:.2f} "
            "eval_time_ms={eval_time_ms:.1f} parameters={parameters:,}".format(**figures)
        ]


def main(command: command_line.Command) -> None:
    """Join the other hosts, train, evaluate, and print the measurements."""
    config, flags, typed = command.config, command_line.FLAGS, command.loaded.typed
    if length := [key for key in ("train.steps", "train.tokens", "train.epochs") if key in typed]:
        raise ConfigError(f"--config.{length[0]} is not read by this command; use --steps=N")
    own = {
        "train.steps": flags.steps, "train.tokens": 0, "train.epochs": 0.0, "train.log_every": 1, "train.eval_every": 0,
        "optimizer.warmup_steps": min(config.optimizer.warmup_steps, flags.steps // 10),
    }  # fmt: skip
    config.update_from_flattened_dict({key: value for key, value in own.items() if key not in typed})
    command_line.join(command)
    command_line.log_to(command.workdir)
    valkyrie.log_to_tmp()
    first = processes.index() == 0
    print("\n".join([*(command.banner() if first else []), *start.device_lines(config)]), flush=True)
    batches = repeated_batch(config) if flags.synthetic else None
    train.train(
        config, command.workdir, batches, evaluators=[Accuracy()], bucket=command.bucket,
        topology=command.loaded.topology,
    )  # fmt: skip
    if first:
        print_measured(command.workdir)
    processes.leave()


def print_measured(workdir) -> None:
    """Print a line for each step of the run's metrics.jsonl."""
    for line in read_lines(workdir / "metrics.jsonl"):
        if line["kind"] == "train":
            names = ("loss", "step_seconds", "tokens_per_second")
            loss, seconds, speed = (math.nan if line.get(name) is None else line[name] for name in names)
            print(
                f"step={line['step']} loss={loss:.4f} step_time_ms={1000 * seconds:.1f} tokens_per_second={speed:,.0f}"
            )


if __name__ == "__main__":
    main(COMMAND)
