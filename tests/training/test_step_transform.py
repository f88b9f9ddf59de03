# SPDX-License-Identifier: Apache-2.0
"""Step transforms whose memory a checkpoint could not hold are refused before the run allocates anything."""

import types

import jax
import jax.numpy as jnp
import pytest

from configs.base import get_config, keys_of
from configs.key import RESUME
from core.start import may_change
from objectives.objective import FrozenModel
from training.step_transform import StepTransform, check, check_storable, of_config, ordered
from training.transforms import average


def test_the_average_is_of_what_every_other_transform_leaves():
    """A method that changes the parameters after the average would be missing from what is evaluated."""
    config = get_config()
    config.optimizer.ema_decay = 0.9
    config.plasticity.update(method="shrink_perturb", every=2)
    names = [transform.name for transform in ordered([*of_config(config, None, None), named("callers")])]
    assert names[-1] == "average" and {"plasticity", "callers"} < set(names)


def named(name):
    transform = StepTransform()
    transform.name = name
    return transform


def test_names_are_identifiers_and_differ():
    check([named("average"), named("guard"), named("reset_units")])
    for names in (["guard", "guard"], ["params"], ["optimizer"], ["step"], ["extra"], ["a/b"], ["a.b"], [""]):
        with pytest.raises(ValueError, match="must be an identifier, and differ"):
            check([named(name) for name in names])


def abstract(memory):
    return jax.eval_shape(lambda: memory)


def test_a_memory_of_many_kinds_can_be_held():
    memory = {
        "a": (jnp.zeros(2, bool), {"b": jnp.int8(0)}),
        "c": {0: jnp.zeros(3)},
        "key": jax.random.key_data(jax.random.key(0)),
    }
    check_storable("memory of a step transform", {"mine": abstract(memory)})


@pytest.mark.parametrize(
    ("memory", "problem"),
    [
        ({"a/b": jnp.zeros(2)}, "mine.a/b has a slash"),
        ({"a.b": jnp.zeros(2), "a": {"b": jnp.zeros(2)}}, "mine.a.b has the same name"),
        ({"a": jnp.zeros((0, 3))}, "mine.a has no elements"),
        ({"a": jax.random.key(0)}, "mine.a is a random key"),
    ],
)
def test_a_memory_that_a_checkpoint_cannot_hold_is_refused(memory, problem):
    """The run would else fail when it saves, or only when it resumes."""
    with pytest.raises(ValueError, match=f"^memory of a step transform: {problem}.*a checkpoint cannot hold it"):
        check_storable("memory of a step transform", {"mine": abstract(memory)})


def test_rows_that_carry_something_keep_the_batch_size_and_frozen_models_may_move():
    models = {"teacher": "distillation.teacher", "reference": "train.init_from"}
    frozen_models = [FrozenModel(*model) for model in models.items()]
    objective = types.SimpleNamespace(frozen_models=lambda: frozen_models, steps_of_batch=3)

    def keys(carry, frozen, step=6):
        state = types.SimpleNamespace(carry=carry)
        run = types.SimpleNamespace(
            abstract_state=state, abstract_frozen=frozen, objective=objective, config=get_config()
        )
        return may_change(run, step)

    assert keys({}, {}) == keys_of(RESUME)
    assert keys({}, {"teacher": {}}) == keys_of(RESUME) | {"distillation.teacher"}
    assert keys({}, {"reference": {}}) == keys_of(RESUME) | {"train.init_from"}
    assert keys({"seen": jnp.zeros(8)}, {}) == keys_of(RESUME) - {"train.global_batch"}
    assert keys({}, {}, step=7) == keys_of(RESUME) - {"train.global_batch"}, "the next step is on the same batch"
    assert keys({}, {"base": {}}) == keys_of(RESUME) | {"train.init_from"}


def test_an_average_over_100_000_steps_is_the_mean_of_the_weights():
    """0.9999 and 1 - 0.9999 do not add up to 1 in float32. Over 120,000 steps the sum of two factors lost 0.03 %."""
    decay, steps = 0.9999, 120_000

    def body(step, mean):
        changes = jnp.cos(0.7 * step + jnp.arange(16.0))
        return average._mix(1 + 0.1 * changes, mean, decay)

    mean = jax.jit(lambda: jax.lax.fori_loop(0, steps, body, jnp.ones(16)))()
    assert float(mean.mean()) == pytest.approx(1, abs=3e-5)  # of the additions; the two factors lose 2.9e-4
