# SPDX-License-Identifier: Apache-2.0
"""Which updates are taken: none that is not a number, none that spikes, all others."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from training.step_transform import StepChange
from training.transforms import guard

judge = jax.jit(guard.judge, static_argnames="deviations")


def after(values, deviations=0.0):
    """Return (which were good, what is remembered) after some (loss, gradient norm)."""
    memory, good = guard.Guard(None).init({}), []
    for loss, norm in values:
        taken, memory = judge(memory, jnp.float32(loss), jnp.float32(norm), deviations)
        good.append(bool(taken))
    return good, memory


@pytest.mark.parametrize("bad", [(np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (1.0, np.inf)])
def test_what_is_not_finite_is_not_taken_and_leaves_no_trace_in_what_is_usual(bad):
    usual = [(2.0, 1.0), (2.1, 1.1), (1.9, 0.9)]
    good, memory = after([*usual, bad, bad])
    assert good == [True] * 3 + [False] * 2
    assert (int(memory["skipped"]), int(memory["in_a_row"]), int(memory["seen"])) == (2, 2, 3)
    _, without = after(usual)
    for name in ("mean", "variance"):
        np.testing.assert_array_equal(memory[name], without[name])
    assert int(after([*usual, bad, usual[0]])[1]["in_a_row"]) == 0


def test_the_running_mean_and_variance_are_those_of_what_was_seen():
    rng = np.random.default_rng(0)
    number = guard.FIRST_STEPS + int(1 / (1 - guard.DECAY))  # until then all count alike
    losses, norms = 3 + 0.5 * rng.standard_normal(number), np.exp(0.2 * rng.standard_normal(number))
    _, memory = after(zip(losses, norms, strict=True))
    values = np.stack([losses, np.log(norms)])[:, guard.FIRST_STEPS :]
    np.testing.assert_allclose(memory["mean"], values.mean(axis=1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(memory["variance"], values.var(axis=1), rtol=1e-3)


def test_steps_without_a_gradient_are_taken_and_are_not_usual():
    """Such as those of groups of answers with equal rewards."""
    usual = [(2.0 + 0.1 * (step % 3), 1.0 + 0.1 * (step % 2)) for step in range(150)]
    good, memory = after([*usual, (2.0, 0.0), (2.0, 0.0)], deviations=6.0)
    assert all(good)
    _, without = after(usual, deviations=6.0)
    for name in ("mean", "variance", "seen"):
        np.testing.assert_array_equal(memory[name], without[name])


@pytest.mark.parametrize("spike", [(9.0, 1.0), (3.0, 50.0)])
def test_a_spike_of_loss_or_gradient_is_not_taken_once_it_is_known_what_is_usual(spike):
    rng = np.random.default_rng(0)
    usual = [(3 + 0.1 * rng.standard_normal(), np.exp(0.1 * rng.standard_normal())) for _ in range(150)]
    assert all(after(usual, deviations=6.0)[0])
    assert after([*usual, spike], deviations=6.0)[0][-1] is False
    assert after([*usual, spike])[0][-1] is True, "without deviations nothing finite is a spike"
    assert after([*usual[: guard.LEARNING_STEPS - 1], spike], deviations=6.0)[0][-1] is True, "too early to know"
    assert after([*usual[: guard.LEARNING_STEPS], spike], deviations=6.0)[0][-1] is False, "early enough"
    assert after([*usual, (1.0, 0.01)], deviations=6.0)[0][-1] is True, "a low loss is none"


def test_the_rate_that_is_reported_is_that_of_the_updates_that_were_taken():
    """The schedule of the optimizer does not advance with a skipped one."""
    one = guard.Guard(lambda step: 10.0 * step)
    context = types.SimpleNamespace(
        state=types.SimpleNamespace(step=jnp.int32(7)), gradient_norm=jnp.float32(1), scalars={"loss": jnp.float32(2)}
    )
    change = StepChange(None, None, jnp.bool_(True))
    _, _, figures = one.update(context, change, one.init({}) | {"skipped": jnp.int32(2)})
    assert figures["learning_rate"] == 50
