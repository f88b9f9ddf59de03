# SPDX-License-Identifier: Apache-2.0
"""Search with a real model, trained for seconds on countdown: what it asks, counts, remembers and shows."""

import json
import re

import numpy as np
import pytest

from core import solving
from core.evaluators import engine_of
from inference.batching import Batch
from input_pipeline.countdown import CountdownWindows
from input_pipeline.tokenization import open_tokenizer
from parallelism.mesh import mesh_context
from reasoning.page import page
from reasoning.solving import Solver
from reasoning.tasks import Countdown
from reasoning.thoughts import Limits, Thought
from reasoning.values import VALUES, Function
from settings import stored_config
from tests.support import ROOT
from trained_run import TrainedRun

PROBLEMS = CountdownWindows(0, "heldout").problems(6, num_numbers=4)
SMALL = {
    "model.num_layers": 2, "model.embed_dim": 64, "model.mlp_dim": 128, "train.global_batch": 32, "train.steps": 120,
    "train.eval_every": 0, "optimizer.warmup_steps": 10, "logging.tensorboard": False, "evaluation.batches": 1,
    "tot.use_tot": True, "tot.problems": 4, "tot.max_thoughts": 2, "tot.thoughts_per_step": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory, warm):
    """Return a run that can write lines, though they are seldom right."""
    folder = tmp_path_factory.mktemp("countdown") / "run"
    keys = [f"--config.{key}={value}" for key, value in SMALL.items()]
    process = warm.run(["train.py", f"--config={ROOT}/configs/countdown.py", f"--workdir={folder}", *keys])
    assert process.returncode == 0, process.stderr
    return folder
