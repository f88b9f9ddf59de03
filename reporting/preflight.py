# SPDX-License-Identifier: Apache-2.0
"""Report before step 1 the memory and the expected time of a run; refuse a run that cannot fit."""

import functools
import math
import os
import re
from collections.abc import Callable

import jax

from configs import topologies
from configs.base import batch_shards
from configs.errors import ConfigError, is_too_large
from reporting import throughput
from reporting.display import counted, duration
from settings import layouts, meta_learning
from settings.architecture import divisors, recompute_flags

ORDERED_SUMS = "exclude_nondeterministic_ops", "deterministic_ops"  # options of XLA for GPUs; the second has the first
MORE_OF_A_GPU = "export XLA_CLIENT_MEM_FRACTION=.95"  # the default is .75
LARGE_INITIAL_PART = 0.1  # of an average of the parameters at the end of a run
_measured_peak = functools.cache(throughput.measured_matmul_peak)  # a process that trains several runs measures once
# Shares of the peak, for the estimate before step 1. AMX speeds up only products: `tiny` measured 11 and 17 %.
USUAL_EFFICIENCY = {"cpu": 0.5, "cpu with AMX": 0.17, "gpu": 0.4, "tpu": 0.5}


class StepTooLarge(ConfigError):
    """A step that needs more memory than the machine has."""


def check_device(run) -> None:
    """Raise ConfigError if the device cannot hold the state of a run, or cannot repeat its steps to be checked."""
    _check_state_fits(run)
    _check_steps_repeat(run.config)


def _check_steps_repeat(config) -> None:
    """Raise ConfigError if steps are computed twice on a GPU that may add in any order: no device would be at fault."""
    if not config.train.recheck_every or jax.default_backend() != "gpu":
        return
    given = dict(re.findall(r"--xla_gpu_(\w+)=?(\S*)", os.environ.get("XLA_FLAGS", "")))  # the last of a name
    if not any(given.get(name, "false").lower() in ("", "1", "true") for name in ORDERED_SUMS):
        raise ConfigError(
            f"train.recheck_every={config.train.recheck_every} compares bits, but on a GPU XLA may add in any order; "
            "add --xla_gpu_exclude_nondeterministic_ops=true to XLA_FLAGS, or set --config.train.recheck_every=0"
        )


def _check_state_fits(run) -> None:
    """Raise ConfigError if a CPU machine's memory cannot hold the state, gradients and frozen weights of a run."""
    leaves = jax.tree.leaves((run.abstract_state, run.abstract_state.params, run.abstract_frozen))
    of_device = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    needed, available = of_device * run.mesh.size / throughput.GIB, throughput.host_memory_gib()[1]
    if jax.default_backend() == "cpu" and needed > available:
        raise ConfigError(
            f"{run.models.num_parameters:,} parameters need {needed:.0f} GiB for weights, gradients and the state of "
            f"{run.config.optimizer.name}, but this machine has {available:.0f} GiB; simulate the run scaled down "
            f"(--topology=v4-32), or use a smaller recipe"
        )


def compiled_bytes(compiled) -> int:
    """Return the memory of a compiled program per device: arguments, temporaries, and outputs that are not aliased.

    If arguments are in host memory, this is the peak minus these arguments. Their copies add to the temporaries, so the
    sum would exceed the compiler's limit for programs that it accepts.
    """
    memory = compiled.memory_analysis()
    if memory.host_argument_size_in_bytes:
        return memory.peak_memory_in_bytes - memory.host_argument_size_in_bytes
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    return total - memory.alias_size_in_bytes


def compiled_gib(compiled) -> float:
    """Return `compiled_bytes` in GiB."""
    return compiled_bytes(compiled) / throughput.GIB


def needed_gib(compile_step: Callable) -> float:
    """Compile and return `compiled_gib`; infinity if the compiler runs out of memory."""
    try:
        return compiled_gib(compile_step())
    except jax.errors.JaxRuntimeError as error:
        if not is_too_large(str(error)):
            raise
        return math.inf


def known_topology(topology):
    """Return the preset of a run, else that of one attached chip; None if neither is known.

    A run may simulate the devices of its preset on a CPU, which has none of their rates.
    """
    is_attached = topology and topology.accelerator == jax.default_backend()
    return topology if is_attached else topologies.one_chip(jax.devices()[0].device_kind)


def peak_flops(topology, num_devices: int) -> tuple[float | None, str]:
    """Return FLOP/s of all devices together and the source of the figure; None for simulated devices."""
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and num_devices > 1:
        return None, ""
    known = known_topology(topology)
    if known and known.peak_flops and not on_cpu:
        return known.peak_flops * num_devices, f"{known.name}'s peak"
    whose = "this CPU's" if on_cpu else "the"
    return _measured_peak() * num_devices, f"{whose} measured matmul peak"


def report(run, compiled, num_steps: int, peak: tuple[float, str], is_new: bool) -> list[str]:
    """Return the lines before the first step; `is_new` if the run has no checkpoint and no imported weights.

    Raises StepTooLarge if the devices have too little memory.
    """
    models, active = run.models, run.models.num_active(run.config.model)
    shards, microbatches, rows = batch_shards(run.config.mesh), run.num_microbatches, run.config.train.global_batch
    lines = [
        f"Batch: {rows} sequences of {run.config.train.sequence_length} tokens = {rows // (shards * microbatches)} a "
        f"microbatch * {microbatches} accumulated * {counted(shards, 'shard')}",
        f"Parameters: {models.num_parameters:,}"
        + (f", {active:,} of them for a token" if active < models.num_parameters else "")
        + (f", {models.num_trained:,} of them trained" if models.num_trained < models.num_parameters else ""),
        _memory_line(run, compiled),
    ]
    backend, (flops, whose) = jax.default_backend(), peak
    if flops is not None:
        efficiency = USUAL_EFFICIENCY["cpu with AMX" if backend == "cpu" and throughput.has_amx() else backend]
        seconds = run.flops_per_step / (flops * efficiency)
        without = "without the time to draw answers, " if run.objective.decoded() else ""
        lines.append(
            f"Expected: {duration(seconds)} a step, {duration(seconds * num_steps)} for {num_steps:,} steps "
            f"(an estimate, {without}at {efficiency:.0%} of {whose}, {flops / 1e12:.3g} TFLOP/s)"
        )
    of_new = [*run.objective.notes(run.config), *([] if run.slow else ranking_notes(run.config))] if is_new else []
    return lines + notes(run.config, microbatches) + of_new


def _memory_line(run, compiled) -> str:
    """Return what the step needs of the memory that is there; StepTooLarge if it does not fit."""
    backend, needed = jax.default_backend(), compiled_gib(compiled)
    if backend == "cpu":
        needed, available, whose = needed * run.mesh.size, throughput.host_memory_gib()[1], ""
    else:
        available, whose = throughput.device_capacity_gib(), " a device"
    if needed > available and backend != "tpu":  # the TPU compiler itself refuses such a step
        has, more = f"this machine has {available:.0f}", ""
        if backend == "gpu":
            has, more = f"JAX gives arrays {available:.0f} GiB of a device", f", or {MORE_OF_A_GPU}"
        raise StepTooLarge(f"the step needs {needed:.1f} GiB, but {has}; try {_less_memory(run)}{more}")
    of = f" of {available:.0f} GiB" if available < math.inf else ""
    return f"Memory: {needed:.2f} GiB{of}{whose}"


def _less_memory(run) -> str:
    """Return what to type so that the step of a run needs less memory."""
    rows = run.config.train.global_batch // batch_shards(run.config.mesh)
    more = [count for count in divisors(rows) if count > run.num_microbatches]
    ways = [f"--config.train.gradient_accumulation={min(more)}"] if more else []
    return " or ".join(ways + recompute_flags(run.config.model)) or "a smaller train.sequence_length or model"


def ranking_notes(config) -> list[str]:
    """Return a note if `checkpoint.keep_best` has no losses to compare: no step before the last is saved and evaluated.

    A run with slow steps saves each.
    """
    best, train = config.checkpoint.keep_best, config.train
    if best <= 1 or 0 < math.lcm(train.save_every, train.eval_every) < train.steps:
        return []
    return [
        f"Note: checkpoint.keep_best={best} has only the last step to rank: no earlier one is saved and evaluated with "
        f"train.save_every={train.save_every} and train.eval_every={train.eval_every}"
    ]


def notes(config, num_microbatches: int) -> list[str]:
    """Return a note for each setting that is allowed but may surprise."""
    lines, optimizer, steps = [], config.optimizer, config.train.steps
    if optimizer.warmup_steps > steps:
        lines.append(
            f"Note: the {steps} steps end within optimizer.warmup_steps={optimizer.warmup_steps}, before the learning "
            "rate reaches its peak"
        )
    late = [step for step, _ in layouts.changes(config.layout.changes) if step >= steps]
    if late:
        lines.append(f"Note: the {steps} steps end before the change of layout.changes after step {late[0]}")
    initial = optimizer.ema_decay**steps
    if optimizer.ema_decay and initial > LARGE_INITIAL_PART:
        lines.append(
            f"Note: {initial:.0%} of the averaged parameters, which are evaluated, will still be their initial values "
            f"after {steps} steps; optimizer.ema_decay={optimizer.ema_decay} is for longer runs"
        )
    if note := meta_learning.share_note(config, num_microbatches):
        lines.append(note)
    for key in ("train.balance_loss", "model.expert_capacity") if num_microbatches > 1 else ():
        section, name = key.split(".")
        if value := config[section][name]:
            lines.append(
                f"Note: {key}={value} applies to each of the {num_microbatches} microbatches separately, so the result "
                "depends on train.gradient_accumulation"
            )
    return lines
