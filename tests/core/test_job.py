# SPDX-License-Identifier: Apache-2.0
"""Which states a run saves, which losses rank its checkpoints, and in which shape it ends."""

import contextlib
import math
import types

import jax.numpy as jnp
import pytest

from configs import base
from core.evaluators import Evaluator
from core.job import Job
from reporting.step_log import Diverged
from training.state import TrainState


def saved(weight: float = 1.0, moment: float = 1.0, *, last_finite: bool, step: int, ends: bool) -> list[str]:
    """Return what a run of 9 steps does with the state of a step."""
    config, done = base.get_config(), []
    config.train.steps = 9
    state = TrainState(
        step=jnp.int32(step), examples=jnp.uint32(8), params={"w": jnp.array([1.0, weight])},
        optimizer={"w": jnp.array([moment])}, carry={}, extra={},
    )  # fmt: skip
    job = types.SimpleNamespace(
        config=config, corpus=None, topology=None, checkpoint_refs={}, run=None,
        log=types.SimpleNamespace(flush=lambda: None, last_finite=last_finite, record=dict),
        clock=types.SimpleNamespace(within=lambda phase: contextlib.nullcontext()),
        stages=types.SimpleNamespace(increases=0), rewrite_missing_files=lambda: None,
        batch_sampler=types.SimpleNamespace(saving=lambda *_: None),
        checkpoints=types.SimpleNamespace(
            losses={}, store=types.SimpleNamespace(steps=list), save=lambda *_: done.append("saved"),
            save_and_wait=lambda *_: done.append("saved and waited"), postpone=lambda *_: done.append("postponed"),
        ),
    )  # fmt: skip
    Job.save(job, state, step, ends=ends)
    return done


def test_a_state_after_a_step_that_was_not_finite_waits_unless_the_run_ends():
    assert saved(last_finite=True, step=4, ends=False) == ["saved"]
    assert saved(last_finite=False, step=4, ends=False) == ["postponed"]
    assert saved(last_finite=False, step=4, ends=True) == ["saved and waited"], "as at a preemption"
    with pytest.raises(Diverged, match="the loss or the gradient of the last step is not finite"):
        saved(last_finite=False, step=9, ends=True)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("wrong", [{"weight": jnp.nan}, {"moment": jnp.inf}], ids=str)
def test_a_state_with_a_number_that_is_not_finite_is_never_saved(wrong, ends):
    """A run that resumes from it could only diverge, and the checkpoint before it may be deleted."""
    with pytest.raises(Diverged, match="the parameters or moments are not finite"):
        saved(**wrong, last_finite=True, step=4, ends=ends)


@pytest.mark.parametrize("loss", [2.5, math.nan])
def test_an_unknown_loss_ranks_no_checkpoint(loss):
    class Ranks(Evaluator):
        name, ranks_checkpoints = "mine", True

        def evaluate(self, context):
            return {"loss": loss}

    job = types.SimpleNamespace(
        log=types.SimpleNamespace(
            flush=lambda: None, display=types.SimpleNamespace(evaluated=None),
            writer=types.SimpleNamespace(write=lambda *_, **__: None),
        ),
        run=None, eval_params=lambda state: {}, evaluations={}, checkpoints=types.SimpleNamespace(losses={1: 3.0}),
        compiled_steps=types.SimpleNamespace(frozen={}), corpus=None, workdir=None,
        lost=types.SimpleNamespace(record=None, gather_reason=lambda: ""),
        clock=types.SimpleNamespace(enter=lambda phase: None, within=lambda phase: contextlib.nullcontext()),
    )  # fmt: skip
    Job.evaluate(job, Ranks(), None, 2, lambda: False, is_last=False)
    assert job.checkpoints.losses == {1: 3.0} | ({2: 2.5} if loss == 2.5 else {})


def test_a_finished_run_is_evaluated_in_the_shape_that_its_readers_have():
    seen, quiet = [], types.SimpleNamespace(lines=lambda lines: None)
    stages = types.SimpleNamespace(complete="complete, not {}".format)
    job = types.SimpleNamespace(
        config=base.get_config(), corpus=None, shape="the last", stages=stages, run_of=seen.append, evaluators=[],
        checkpoints=types.SimpleNamespace(address="runs/a"),
        log=types.SimpleNamespace(
            average_tokens_per_second=lambda: 1.0, total_tokens=2, display=quiet,
            goodput=types.SimpleNamespace(line=lambda: "goodput"),
        ),
    )  # fmt: skip
    assert Job.close(job, None)[-1].startswith("checkpoint: runs/a/checkpoints/")
    assert seen == ["complete, not the last"]
