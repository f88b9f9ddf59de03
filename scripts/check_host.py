# SPDX-License-Identifier: Apache-2.0
"""Check that this host can train: `pod.py validate` runs this script on all hosts, with train.py's own arguments.

Prepares the corpus, trains three steps with train.py's loop on real batches, restores the checkpoint and trains a
fourth step. Prints one line: CHECKED and a JSON object. `pod.py validate` removes the workdir.

With --ahead it uses no device, because a run holds them: it prepares the corpus, and with --rehearse it also compiles
the step ahead of time for the slice of --topology.
"""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from core import command_line
from cluster import startup
from core.command_line import FLAGS, flags

flags.DEFINE_bool("ahead", False, "check only what needs no device")
flags.DEFINE_bool("rehearse", False, "with --ahead: also compile the step ahead of time")

if __name__ == "__main__":
    if "--ahead" in sys.argv:
        os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported
        startup.choose_libraries()
        LOADED = command_line.parse_configuration(__doc__, use=lambda flags: command_line.IGNORE)
    else:
        COMMAND = command_line.parse(__doc__)
    command_line.ending.continues(False)

import importlib.metadata
import json
import re
import socket

import jax

import train
from input_pipeline import batches as pipeline
from cluster import identity, processes
from configs.errors import ConfigError
from core.callbacks import Callback
from input_pipeline.cache import cache_folder
from profiling.recording import rates
from rehearsal import checklist
from rehearsal.layouts import ways
from rehearsal.compilation import state_bytes
from rehearsal.compiler import Compiler, check_compiler
from reporting import preflight
from reporting.metrics import read_lines
from reporting.throughput import GIB
from training.compiled_steps import shape_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS = 3
SMALL_KEYS = ("step", "loss", "step_seconds", "tokens_per_second", "mfu", "goodput")


def not_as_locked() -> list[str]:
    """Return the libraries whose version is not in the lock files, with both versions."""
    locked: dict[str, set[str]] = {}
    for file in sorted(ROOT.glob("requirements*.lock")):
        for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", file.read_text(), re.MULTILINE):
            locked.setdefault(name.lower(), set()).add(version)
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    return [
        f"{name} {installed[name]} (locked: {', '.join(sorted(locked[name]))})"
        for name in identity.LIBRARIES
        if name in installed and name in locked and installed[name] not in locked[name]
    ]


class Checklist(Callback):
    """Judges the points of rehearsal/checklist.py by the step that process 0 runs; `points` has them in the end."""

    def __init__(self, config):
        """`config`: as it was given, without the changes for a few steps."""
        self.config, self.points = config, []

    def wrap(self, train_step, job):
        """Return the step, which notes its shape."""

        def noted(state, batch):
            self.shape = shape_of(batch, job.compiled_steps.cycles)
            return train_step(state, batch)

        return noted

    def on_end(self, job, *, has_failed):
        """Judge the program that has run."""
        if has_failed or processes.index():
            return
        compiled, state = job.compiled_steps.get(self.shape), state_bytes(job.run)
        known = preflight.known_topology(job.topology)
        capacity = known and known.capacity_gib
        self.points = checklist.judge(checklist.see(
            self.config, compiled.as_text(), given=rates(job), mesh=dict(job.run.mesh.shape),
            accelerator=jax.default_backend(), state_bytes=sum(size for name, size in state.items() if name != "batch"),
            parameter_bytes=state["parameters"], total_bytes=preflight.compiled_bytes(compiled),
            capacity_bytes=capacity and capacity * GIB,
        ))  # fmt: skip


def ahead() -> dict:
    """Prepare the corpus and compile the step, without a device; return the results."""
    corpus = train.prepare_corpus(LOADED.config, "model.vocab_size" in LOADED.typed)
    return {
        "versions": identity.versions(),
        "not_as_locked": not_as_locked(),
        "corpus": corpus.digest,
        "corpus_tokens": corpus.train.num_tokens,
        "rehearsed": rehearsed() if FLAGS.rehearse else None,
    }


def rehearsed() -> dict | None:
    """Return the figures of the step on the slice of --topology, or {"error": text}; None without a TPU slice."""
    topology = LOADED.topology
    if topology is None or topology.accelerator != "tpu":
        return None
    try:
        check_compiler(topology)
    except ConfigError as error:
        return {"error": str(error)}
    compiler = Compiler(cache_folder(LOADED.config.data.cache_dir) / "rehearsals")
    config = LOADED.config.copy_and_resolve_references()
    return ways.rehearse({"step": config}, topology, compiler, print)["step"]


def main() -> dict:
    """Run the checks and the training steps; return the results."""
    config, workdir = COMMAND.config, COMMAND.workdir
    command_line.join(COMMAND)
    command_line.log_to(workdir)
    corpus = train.prepare_corpus(config, "model.vocab_size" in COMMAND.loaded.typed)
    judged = Checklist(config.copy_and_resolve_references())
    config.train.update(tokens=0, epochs=0.0, log_every=1, save_every=0, eval_every=0)
    config.causality.update(prompt="", corrupt="")  # these steps evaluate nothing
    for steps in (STEPS, STEPS + 1):  # the second run resumes from the checkpoint of the first
        config.train.steps = steps
        batches = _batches(config, corpus, steps)
        train.train(
            config, workdir, batches, bucket=COMMAND.bucket, topology=COMMAND.loaded.topology, callbacks=[judged]
        )
    metrics = workdir / "metrics.jsonl"  # for a run in a bucket, only process 0 has it
    lines = read_lines(metrics) if metrics.exists() else []
    trained = [line for line in lines if line["kind"] == "train"]
    return {
        "process": processes.index(),
        "num_processes": processes.count(),
        "host": socket.gethostname(),
        "versions": identity.versions(),
        "not_as_locked": not_as_locked(),
        "local_devices": jax.local_device_count(),
        "num_devices": jax.device_count(),
        "device_kind": jax.devices()[0].device_kind,
        "simulated": COMMAND.scaled_down is not None,
        "mesh": {axis: size for axis, size in config.mesh.items() if size != 1},
        "corpus": corpus.digest,
        "corpus_tokens": corpus.train.num_tokens,
        "trained": [{key: line[key] for key in SMALL_KEYS} for line in trained],
        "starts": [line["step"] for line in lines if line.get("event") == "start"],
        "heartbeat": (workdir / "workers" / f"{processes.index()}.json").exists(),
        "points": [p._asdict() | {"verdict": checklist.WORDS[p.holds]} for p in judged.points],
        "log": processes.log_file(workdir).is_file(),
    }


def _batches(config, corpus, steps: int):
    """Return the global batches of the steps up to `steps` that are not trained yet."""
    done = STEPS if steps > STEPS else 0
    rows = range(config.train.global_batch)
    return pipeline.training_batches(
        corpus.train, seed=config.train.seed, sequence_length=config.train.sequence_length,
        global_batch=config.train.global_batch, rows=rows, first_example=done * config.train.global_batch,
        num_steps=steps - done, readers=1, prefetch=1,
    )  # fmt: skip


if __name__ == "__main__":
    print("CHECKED " + json.dumps(ahead() if FLAGS.ahead else main()), flush=True)
    processes.leave()
