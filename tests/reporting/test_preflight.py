# SPDX-License-Identifier: Apache-2.0
"""What is said before step 1 of settings that are allowed and seldom meant."""

import re
import types
from typing import NamedTuple

import pytest

from configs import base, tiny, topologies
from configs.errors import ConfigError, is_too_large
from reporting import preflight
from reporting.sinks import alerts


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


def compiled(on_host: int = 0, unit: int = 1) -> types.SimpleNamespace:
    """Return a program that needs 10 units of memory on a device, or 8 if an argument is in host memory."""
    sizes = {"argument": 5, "temp": 3, "output": 4, "alias": 2, "host_argument": on_host}
    memory = {f"{name}_size_in_bytes": size * unit for name, size in sizes.items()}
    memory |= {"peak_memory_in_bytes": 9 * unit}
    return types.SimpleNamespace(memory_analysis=lambda: types.SimpleNamespace(**memory))


@pytest.mark.parametrize(("on_host", "needed"), [(0, 10), (1, 8)])
def test_donated_arrays_count_once_and_arrays_in_host_memory_do_not_count(on_host, needed):
    assert preflight.compiled_bytes(compiled(on_host)) == needed


def on_a_gpu(monkeypatch, gib: float | None) -> None:
    """Let jax say that it has one GPU whose allocator has this much memory, or does not say how much."""
    stats = None if gib is None else {"bytes_limit": int(gib * 2**30)}
    device = types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    monkeypatch.setattr(preflight.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(preflight.jax, "local_devices", lambda: [device])


@pytest.mark.parametrize(("gib", "line"), [(59.7, " 10.00 GiB of 60 GiB a device"), (None, " 10.00 GiB a device")])
def test_the_memory_of_a_step_stands_beside_that_of_a_gpu(monkeypatch, gib, line):
    on_a_gpu(monkeypatch, gib)
    assert preflight._memory_line(a_run(), compiled(unit=2**30)).endswith(line)


def test_a_step_that_no_gpu_has_room_for_is_refused_with_advice(monkeypatch):
    """Else it would fail at the first step, in the words of an allocator."""
    on_a_gpu(monkeypatch, 9)
    said = r"needs 10\.0 GiB, but JAX gives arrays 9 GiB of a device; try .*accumulation=2 or .*MEM_FRACTION"
    with pytest.raises(preflight.StepTooLarge, match=said) as refused:
        preflight._memory_line(a_run(), compiled(unit=2**30))
    assert alerts.event_of(str(refused.value)) == "out_of_memory", "also if another process has said it, in a line"


class State(NamedTuple):
    """A state without arrays."""

    params: tuple = ()


def a_run() -> types.SimpleNamespace:
    """Return what is read of a run about its device: its configuration, one device, and a state."""
    config = tiny.get_config()
    config.mesh.update(data=1, fsdp=1)
    return types.SimpleNamespace(
        config=config, num_microbatches=1, mesh=types.SimpleNamespace(size=1), abstract_frozen=None,
        abstract_state=State(),
    )  # fmt: skip


OFF = "--xla_gpu_exclude_nondeterministic_ops=true --xla_gpu_exclude_nondeterministic_ops=0"  # the last counts


@pytest.mark.parametrize("flags", ["", "--xla_gpu_deterministic_ops=False", OFF])
def test_on_a_gpu_that_adds_in_any_order_steps_are_not_computed_twice(monkeypatch, flags):
    """Else a sound device would be called faulty, as one H100 was."""
    on_a_gpu(monkeypatch, 80)
    monkeypatch.setenv("XLA_FLAGS", flags)
    run = a_run()
    preflight.check_device(run)
    run.config.train.recheck_every = 2
    with pytest.raises(ConfigError, match=r"train\.recheck_every=2 .* to XLA_FLAGS") as refused:
        preflight.check_device(run)
    advised = re.search(r"add (\S+) to XLA_FLAGS", str(refused.value))[1]
    for ordered in (advised, "--xla_gpu_deterministic_ops"):
        monkeypatch.setenv("XLA_FLAGS", f"{flags} {ordered}")
        preflight.check_device(run)


def test_simulated_devices_have_no_rates_of_the_chip_that_they_stand_for():
    """Else a profile on a laptop would show the MFU and the energy of a TPU."""
    assert preflight.known_topology(topologies.get("v4-8")) is None
    assert preflight.known_topology(topologies.get("cpu-8")).name == "cpu-8"


@pytest.mark.parametrize(
    ("message", "is_device"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 35.14G of 30.75G hbm.", True),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 18.45M of 16.00M vmem.", False),
        ("RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom: too much", False),
        ("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 131072", False),
        ("INTERNAL: out of memory", False),
    ],
)
def test_a_kernel_that_does_not_fit_a_core_is_no_lack_of_device_memory(message, is_device):
    assert is_too_large(message) is is_device
