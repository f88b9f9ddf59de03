# SPDX-License-Identifier: Apache-2.0
"""How faults are written, and that each is injected once, at its step."""

import time

import jax.numpy as jnp
import numpy as np
import pytest

from configs.errors import ConfigError
from core.between_steps import faults
from reporting.clock import Clock
from training.state import TrainState


def test_the_example_of_the_help_is_read_as_it_says():
    read = faults.parse_faults(faults.EXAMPLE)
    assert [(fault.kind, fault.step) for fault in read] == [
        ("sigterm", 120), ("kill", 300), ("hang", 400), ("full_disk", 450), ("flip", 500), ("nan", 550), ("slow", 600),
    ]  # fmt: skip
    assert (read[1].process, read[2].phase, read[6].process, read[6].factor) == (1, "data", 2, 3.0)
    assert faults.parse_faults("") == []


@pytest.mark.parametrize(
    "wrong", ["nan", "nan@0", "nan@x", "kil:1@3", "hang@4", "hang:lunch@4", "slow@5", "slow:2@5", "nan@3;kill@4", "@5"]
)
def test_what_is_no_fault_is_told_with_an_example(wrong):
    with pytest.raises(ConfigError, match="is not a fault; an example is sigterm@120"):
        faults.parse_faults(wrong)


def started(text: str, workdir) -> tuple[faults.Faults, Clock]:
    (workdir / "workers").mkdir(exist_ok=True)
    clock = Clock(time.monotonic())
    return faults.Faults(faults.parse_faults(text), workdir, clock, None), clock


def one_state() -> TrainState:
    return TrainState(jnp.int32(0), jnp.uint32(0), {"w": jnp.ones((4, 3))}, (), {})


def test_a_bit_of_one_parameter_flips_once_even_if_the_run_starts_again(tmp_path):
    def train_step(state, batch):
        return state, {}

    for seen in (1, 0):
        striking, clock = started("flip@2", tmp_path)
        step, changed = striking.wrap(train_step, None), 0
        for number in (1, 2, 3):
            clock.enter("step", number)
            state, _ = step(one_state(), None)
            difference = np.asarray(state.params["w"]).view(np.uint32) ^ np.ones((4, 3), np.float32).view(np.uint32)
            changed += sum(int(bits).bit_count() for bits in difference.ravel())
        assert changed == seen


def test_a_full_disk_lasts_for_its_steps_and_then_files_grow_again(tmp_path):
    _, clock = started("full_disk:2@3", tmp_path)
    clock.enter("step", 3)
    with pytest.raises(OSError), (tmp_path / "file").open("w") as file:
        file.write("more")
    clock.enter("step", 5)
    with pytest.raises(OSError), (tmp_path / "file").open("w") as file:
        file.write("more")
    clock.enter("step", 6)
    assert (tmp_path / "file").write_text("more") == 4


def test_a_spoiled_gradient_is_no_number():
    gradients = faults.NaNGradients().change_gradients({"w": jnp.ones(3)}, None)
    assert np.isnan(gradients["w"]).all()
