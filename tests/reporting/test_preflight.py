# SPDX-License-Identifier: Apache-2.0
"""What is said before step 1 of settings that are allowed and seldom meant."""

import types

import pytest

from configs import base, topologies
from reporting import preflight


@pytest.mark.parametrize(
    ("changes", "steps", "words"),
    [
        ({"warmup_steps": 30}, 20, ["the 20 steps end within optimizer.warmup_steps=30"]),
        ({"warmup_steps": 20}, 20, []),
        ({"ema_decay": 0.999}, 200, ["82% of the averaged parameters"]),
        ({"ema_decay": 0.999}, 5000, []),
        ({"ema_decay": 0.999, "warmup_steps": 300}, 200, ["optimizer.warmup_steps=300", "initial values after 200"]),
    ],
)
def test_a_setting_that_does_not_suit_the_length_of_the_run_is_noted(changes, steps, words):
    config = base.get_config()
    config.optimizer.update({"warmup_steps": 0} | changes)
    config.train.steps = steps
    notes = preflight.notes(config, num_microbatches=1)
    assert len(notes) == len(words) and all(word in note for word, note in zip(words, notes, strict=True))


def test_a_loss_that_depends_on_the_microbatches_is_noted():
    config = base.get_config()
    config.train.balance_loss, config.model.expert_capacity = 0.01, 1.5
    assert not preflight.notes(config, num_microbatches=1)
    balance, capacity = preflight.notes(config, num_microbatches=4)
    assert "train.balance_loss=0.01 applies to each of the 4 microbatches separately" in balance
    assert "model.expert_capacity=1.5 applies to each of the 4 microbatches" in capacity


def test_checkpoints_that_no_loss_ranks_are_noted():
    """Step 300 is saved and evaluated, and no step up to 200."""
    config = base.get_config()
    config.checkpoint.keep_best = 3
    config.train.save_every, config.train.eval_every = 100, 150
    found = []
    for config.train.steps in (301, 200):
        found.append(preflight.ranking_notes(config))
    config.train.eval_every = 0
    for config.checkpoint.keep_best in (3, 1):
        found.append(preflight.ranking_notes(config))
    assert [len(notes) for notes in found] == [0, 1, 1, 0]
    assert "no earlier one is saved and evaluated with train.save_every=100 and train.eval_every=150" in found[1][0]


def test_a_share_of_tasks_that_whole_rows_do_not_give_is_noted():
    """A device has four rows, and two in each of two microbatches; other objectives have no tasks."""
    config = base.get_config()
    config.train.objective, config.train.global_batch, config.mesh.fsdp = "meta_language_modeling", 16, 4
    assert not preflight.notes(config, num_microbatches=1)
    (note,) = preflight.notes(config, num_microbatches=2)
    assert note.startswith("Note: 1 of the 2 rows of a device's microbatch are tasks, 50% in place of meta.share=0.25")
    config.train.objective = "language_modeling"
    assert not preflight.notes(config, num_microbatches=2)


@pytest.mark.parametrize(("on_host", "needed"), [(0, 10), (1, 8)])
def test_donated_arrays_count_once_and_arrays_in_host_memory_do_not_count(on_host, needed):
    sizes = {"argument": 5, "temp": 3, "output": 4, "alias": 2, "host_argument": on_host}
    memory = {f"{name}_size_in_bytes": size for name, size in sizes.items()} | {"peak_memory_in_bytes": 9}
    compiled = types.SimpleNamespace(memory_analysis=lambda: types.SimpleNamespace(**memory))
    assert preflight.compiled_bytes(compiled) == needed


def test_simulated_devices_have_no_rates_of_the_chip_that_they_stand_for():
    """Else a profile on a laptop would show the MFU and the energy of a TPU."""
    assert preflight.known_topology(topologies.get("v4-8")) is None
    assert preflight.known_topology(topologies.get("cpu-8")).name == "cpu-8"
