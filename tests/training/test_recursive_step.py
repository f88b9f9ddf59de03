# SPDX-License-Identifier: Apache-2.0
"""Optimizers, average and learning rate of the recursive model against what was recorded of the published code, and
one step of it on meshes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import base
from tests.support import assert_close, relative_error
from tests.trm_cases import recorded
from tests.trm_step import MAX_STEPS, stepped
from training import optimizers, schedules
from training.step_transform import StepChange
from training.transforms.average import Average


def aux(part: str) -> dict[str, np.ndarray]:
    """Return what was recorded of one part."""
    return {key.removeprefix(f"{part}/"): array for key, array in recorded("aux").items() if key.startswith(f"{part}/")}


def optimizer_of(config, axes: dict, schedule) -> optax.GradientTransformationExtraArgs:
    weights = optimizers.Weights(axes)
    return optimizers.make(getattr(optimizers, config.name)(config, weights), config, schedule, weights)


def test_adam_atan2_is_that_recorded():
    """Six steps, with gradients of all magnitudes and of 0, at a rate of its own each, weights decaying throughout."""
    of, config = aux("adam_atan2"), base.get_config().optimizer
    beta1, beta2, decay = of["beta1_beta2_wd"].tolist()
    config.update(
        name="adam_atan2", beta1=beta1, beta2=beta2, weight_decay=decay, decayed="all", clip_norm=0.0, learning_rate=1.0
    )
    rates = jnp.asarray(of["lr"], jnp.float32)
    optimizer = optimizer_of(config, {("bias",): ("embed",)}, lambda step: rates[step])
    params = {"bias": jnp.asarray(of["param_init"], jnp.float32)}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient, wanted in zip(of["grads"], of["param_after"], strict=True):
        updates, state = update({"bias": jnp.asarray(gradient, jnp.float32)}, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params["bias"], wanted, rtol=1e-5, atol=1e-6)
    moments = next(leaf for leaf in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(leaf))
    for kept, wanted in ((moments.mu, of["m_final"]), (moments.nu, of["v_final"])):
        np.testing.assert_allclose(kept["bias"], wanted, rtol=1e-5, atol=1e-12)


def is_adam(node) -> bool:
    return isinstance(node, optax.ScaleByAdamState)


TREE = {("puzzles", "table"): ("puzzles", "embed"), ("initial", "high"): ("constant",), ("head",): ("embed", "vocab")}


def test_rows_of_the_table_move_as_recorded_and_others_stay_to_the_last_bit():
    """Some rows come twice and their gradients cancel; the tree also has an ordinary weight and a constant."""
    of, config = aux("signsgd"), base.get_config().optimizer
    rate, decay = of["lr_wd"].tolist()
    config.update(name="adam_atan2", learning_rate=0.5, table_learning_rate=2 * rate, table_weight_decay=decay)
    config.weight_decay = 3 * decay  # of the other weights alone
    optimizer = optimizer_of(config, TREE, lambda step: 0.25)  # half of the peak, for the table as for weights
    rng, before = np.random.default_rng(0), of["table_before"]
    params = {
        "puzzles": {"table": before}, "initial": {"high": np.ones(3, np.float32)},
        "head": rng.standard_normal((3, 4)).astype(np.float32),
    }  # fmt: skip
    table = np.zeros_like(before)
    np.add.at(table, of["ids"], of["per_example_grads"])
    gradients = {"puzzles": {"table": table}, "initial": {"high": np.ones(3)}, "head": np.ones((3, 4))}
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params, used_rows=of["ids"])
    after = optax.apply_updates(params, updates)
    np.testing.assert_allclose(after["puzzles"]["table"], of["table_after"], rtol=1e-6, atol=1e-8)
    unused = np.setdiff1d(np.arange(len(before)), of["ids"])
    np.testing.assert_array_equal(np.asarray(after["puzzles"]["table"])[unused], before[unused])
    np.testing.assert_array_equal(after["initial"]["high"], params["initial"]["high"])
    assert relative_error(after["head"], params["head"]) > 1e-2 and len(unused) > 0


def test_the_average_is_that_recorded_and_of_tables_and_constants_what_they_are():
    of, config = aux("ema"), base.get_config().optimizer
    config.ema_decay = float(of["mu"])
    transform = Average(optimizers.Weights(TREE), config.ema_decay)

    @jax.jit
    def average(params, averages):
        return transform.update(None, StepChange(params, (), True), averages)[1]

    def tree(array):
        array = jnp.asarray(array, jnp.float32)
        return {"puzzles": {"table": array}, "initial": {"high": array}, "head": array}

    first, *later = of["params_t0_to_t5"]
    averages = tree(first)
    for values, wanted in zip(later, of["shadow_t1_to_t5"], strict=True):
        averages = average(tree(values), averages)
        np.testing.assert_allclose(averages["head"], wanted, rtol=1e-6, atol=1e-7)
        for followed in (averages["puzzles"]["table"], averages["initial"]["high"]):
            np.testing.assert_array_equal(followed, np.float32(values))


def test_the_learning_rate_is_that_recorded():
    """Steps are counted from 1 there, from 0 here; the first differ by float32's rounding of the peak."""
    of = aux("lr")
    for (step, peak, warmup, total, fraction), wanted in zip(
        of["step_base_warmup_total_minratio"].tolist(), of["value"], strict=True
    ):
        config = base.get_config().optimizer
        config.update(learning_rate=peak, warmup_steps=int(warmup), final_fraction=fraction)
        found = schedules.cosine_from_one(config, int(total))(int(step) - 1)
        assert float(found) == pytest.approx(wanted, rel=1e-5, abs=1e-7 * peak), (step, warmup, total)


def assert_same_step(actual: tuple, expected: tuple) -> None:
    """Loss, gradients, weights, moments and carry, which holds the draws of who explores."""
    (state, scalars, gradients), (of_one, scalars_of_one, gradients_of_one) = actual, expected
    assert_close((scalars, gradients), (scalars_of_one, gradients_of_one))
    assert_close(state.carry, of_one.carry)
    for part in ("halted", "steps", "draws", "inputs", "labels", "puzzle_identifiers"):
        np.testing.assert_array_equal(state.carry[part], of_one.carry[part])
    assert_close((state.params, state.extra["average"]), (of_one.params, of_one.extra["average"]))


def test_a_step_on_a_mesh_is_that_of_one_device():
    assert_same_step(stepped(2, data=2, fsdp=4), stepped())


def test_that_step_has_slots_of_every_kind():
    """Else a mesh that got one of them wrong would not be found out."""
    state, scalars, gradients = stepped()
    carry = state.carry
    assert {1, 2, MAX_STEPS} <= set(carry["steps"].tolist()) and 0 < carry["halted"].sum() < len(carry["halted"])
    wanted = carry["steps"] >= MAX_STEPS
    assert (carry["halted"] & ~wanted).any() and scalars["skipped"] == 0
    assert all(np.abs(leaf).max() > 0 for name, part in gradients.items() if name != "initial"
               for leaf in jax.tree.leaves(part))  # fmt: skip
    identifiers = carry["puzzle_identifiers"].tolist()
    assert len(set(identifiers)) < len(identifiers)


@pytest.mark.slow
def test_a_step_of_the_form_that_mixes_by_an_mlp_is_that_of_one_device():
    """On a mesh of one axis, without microbatches, where the other has both. To 1e-4: its norm over positions
    amplifies rounding, fivefold a supervision step; carry and table as they are.
    """
    (state, scalars, gradients), (of_one, scalars_of_one, gradients_of_one) = (
        stepped(1, "mlp", fsdp=8), stepped(1, "mlp")
    )  # fmt: skip
    np.testing.assert_allclose(scalars["loss"], scalars_of_one["loss"], rtol=1e-4)
    errors = jax.tree.map(relative_error, gradients, gradients_of_one)
    assert max(jax.tree.leaves(errors)) < 1e-4, errors
    for part in ("halted", "steps", "draws", "inputs", "labels", "puzzle_identifiers"):
        np.testing.assert_array_equal(state.carry[part], of_one.carry[part])
