# SPDX-License-Identifier: Apache-2.0
"""What would make a run faster or safer, judged by what was measured: each rule names its evidence, keys and gain.

A rule is a function (measured) -> Advice or None in RULES. A gain is the share of a step's time that the change saves
at best; None where it is not about time, or not known.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from configs.base import KEYS, batch_shards
from input_pipeline.batches import faster_reading
from rehearsal.sections import options
from settings.architecture import attends, divisors, head_dim

REMAT = KEYS["model.remat"].choices  # from the policy that keeps all to the one that recomputes all
SLOW_INPUT, LONG_REMAT, BUSY, UNEVEN, FREE_MEMORY = 0.05, 0.05, 0.85, 0.10, 0.6
LOW_RATE, SMALL_BATCH = 0.3, 8192  # share of the peak; tokens of a device in a microbatch
GROWTH, EXPLOSION, SPIKE = 0.05, 10.0, 1.2  # relative
FEWEST_LINES = 8  # of metrics, for a trend
SYNCS = 0.05  # share of the host's time between steps that is neither data nor waiting


class Measured(NamedTuple):
    """What the rules see.

    Attributes:
      profile: the content of profile.json.
      config: of the run, resolved.
      topology: its preset, or None.
      lines: the `train` lines of metrics.jsonl, in order.
      root: where checkpoints go.
    """

    profile: dict
    config: object
    topology: object
    lines: Sequence[dict] = ()
    root: str = ""

    def share(self, phase: str) -> float:
        """Return the share of the host's time in a phase."""
        seconds = self.profile["host_seconds_by_phase"]
        return seconds.get(phase, 0.0) / max(sum(seconds.values()), 1e-12)

    @property
    def capacity_gib(self) -> float | None:
        """Memory of a device, if it is known."""
        return self.topology.capacity_gib if self.topology and self.topology.hbm_gib else None


class Advice(NamedTuple):
    """A change that is worth trying.

    Attributes:
      rule: its name.
      evidence: the figures that led to it.
      keys: {key: value} to set; {} where no key helps.
      remedy: what to do instead, without keys.
      gain: at most this share of a step's time; None where it is not about time, or not known.
      changes_training: whether another model, batch or optimizer is trained then.
    """

    rule: str
    evidence: str
    keys: dict
    remedy: str = ""
    gain: float | None = None
    changes_training: bool = False

    def line(self) -> str:
        """Return the advice as a line of text."""
        what = options(self.keys) if self.keys else self.remedy
        gain = "" if self.gain is None else f" (saves up to {self.gain:.0%} of a step)"
        other = "; this changes what is trained" if self.changes_training else ""
        return f"{self.rule}: {self.evidence}. Try {what}{gain}{other}"


def advise(measured: Measured) -> list[Advice]:
    """Return the advice of all rules, the largest gain first."""
    found = [advice for rule in RULES if (advice := rule(measured))]
    return sorted(found, key=lambda advice: -(advice.gain or 0.0))


def slow_input(measured: Measured) -> Advice | None:
    """The host waits for batches."""
    share = measured.profile["data_wait_share"]
    if share < SLOW_INPUT:
        return None
    keys = faster_reading(measured.config.data)
    return Advice("slow input", f"{share:.0%} of the time is spent waiting for batches", keys, gain=share)


def tiny_batch(measured: Measured) -> Advice | None:
    """Few tokens a device, and products far from the peak."""
    profile, train = measured.profile, measured.config.train
    if not (profile["peak_flops"] and profile["flops_per_second"] and profile["platform"] != "cpu"):
        return None
    rows = profile.get("rows") or train.global_batch
    shards = batch_shards(measured.config.mesh) * measured.config.mesh.context
    tokens = rows * train.sequence_length / shards / max(1, train.gradient_accumulation)
    rate = profile["flops_per_second"] / profile["peak_flops"]
    if tokens >= SMALL_BATCH or rate >= LOW_RATE:
        return None
    evidence = f"{tokens:,.0f} tokens of a device at once, at {rate:.0%} of its peak"
    keys = {"train.global_batch": 2 * train.global_batch}
    return Advice("tiny batch", evidence, keys, gain=0.5 * (1 - rate), changes_training=True)


def recompilation(measured: Measured) -> Advice | None:
    """The step was compiled again while it was traced."""
    if not (share := measured.share("compile")):
        return None
    remedy = "batches of one shape: without batch.ramp, or with fewer stages"
    return Advice("recompilation", f"{share:.0%} of the traced time was compilation", {}, remedy, gain=share)


def replicated_optimizer(measured: Measured) -> Advice | None:
    """Every device keeps the whole optimizer state, although several share the batch."""
    mesh, memory = measured.config.mesh, measured.profile["memory_gib"]
    share = memory.get("optimizer", 0.0) / memory["total"] if memory["total"] else 0.0
    if mesh.data < 2 or mesh.fsdp > 1 or share < 0.2:
        return None
    evidence = f"each of {mesh.data} devices keeps all {memory['optimizer']:.2f} GiB of the optimizer state"
    return Advice("replicated optimizer", evidence, {"mesh.data": 1, "mesh.fsdp": mesh.data})


def unbalanced(measured: Measured) -> Advice | None:
    """One device or host is slower than the others."""
    worst = max(
        (found for name in ("device_imbalance", "host_imbalance") if (found := measured.profile[name])),
        key=lambda found: found["excess"], default=None,
    )  # fmt: skip
    if not worst or worst["excess"] < UNEVEN:
        return None
    evidence = f"{worst['slowest']} takes {worst['excess']:.0%} longer than the mean"
    gain = worst["excess"] / (1 + worst["excess"])
    if measured.config.model.num_experts:
        keys = {"train.balance_loss": 2 * measured.config.train.balance_loss or 0.01}
        return Advice("unbalanced devices", evidence, keys, gain=gain, changes_training=True)
    remedy = "another host in its place, or a mesh that gives each device as much"
    return Advice("unbalanced devices", evidence, {}, remedy, gain)


def missing_donation(measured: Measured) -> Advice | None:
    """The new state does not take the place of the old one."""
    memory = measured.profile["memory_gib"]
    state = memory.get("parameters", 0.0) + memory.get("optimizer", 0.0)
    copied = measured.profile.get("not_donated_gib")
    if not copied or copied < 0.1 * state:
        return None
    evidence = f"{copied:.2f} GiB of the old state stay in memory next to the new one"
    return Advice("missing donation", evidence, {}, "donate_argnames='state' for the function that is jitted")


def host_synchronisation(measured: Measured) -> Advice | None:
    """The devices wait because the host does other work between steps."""
    every, idle = measured.config.train.log_every, measured.profile["idle_share"]
    share = measured.profile.get("callback_share") or 0.0
    if share < SYNCS or (idle is not None and idle < SYNCS):
        return None
    evidence = f"the host spends {share:.0%} of the time on callbacks and metrics, while the devices wait"
    if every > 1:
        return Advice("host synchronisation", evidence, {}, "callbacks that do not read numbers at each step", share)
    return Advice("host synchronisation", evidence, {"train.log_every": 20}, gain=share)


def excess_remat(measured: Measured) -> Advice | None:
    """Activations are computed twice, although there is memory for them."""
    by_file, memory = measured.profile["by_file"], measured.profile["memory_gib"]
    share = sum(row["share"] for row in by_file or () if row["part"] == "recomputed")
    capacity, remat = measured.capacity_gib, measured.config.model.remat
    less = REMAT[: REMAT.index(remat)]
    if share < LONG_REMAT or not less or (capacity and memory["total"] > FREE_MEMORY * capacity):
        return None
    evidence = f"{share:.0%} of the time recomputes activations, and a device uses {memory['total']:.2f} GiB"
    return Advice("excess remat", evidence, {"model.remat": less[0]}, gain=share)


def much_accumulation(measured: Measured) -> Advice | None:
    """More microbatches than memory asks for."""
    count, memory = measured.config.train.gradient_accumulation, measured.profile["memory_gib"]
    capacity = measured.capacity_gib
    if count < 2 or not memory["total"] or (capacity and memory["total"] > FREE_MEMORY * capacity):
        return None
    exposed, mean = measured.profile["exposed_collective_seconds"] or 0.0, measured.profile["host_step_seconds"]
    evidence = f"{count} microbatches, with {memory['total']:.2f} GiB of a device in use"
    fewer = divisors(count)[-2]
    keys = {"train.gradient_accumulation": fewer}
    return Advice("much accumulation", evidence, keys, gain=exposed / mean * (1 - fewer / count))


def memory_spike(measured: Measured) -> Advice | None:
    """More memory was in use than the step needs."""
    peak, total = measured.profile["device_peak_gib"], measured.profile["memory_gib"]["total"]
    batches = measured.config.evaluation.batches
    if not (peak and total) or peak["most"] < SPIKE * total or batches == 1:
        return None
    evidence = f"{peak['most']:.2f} GiB were in use at the most, and the step needs {total:.2f}"
    return Advice("memory spike", evidence, {"evaluation.batches": batches // 2})


def uneven_memory(measured: Measured) -> Advice | None:
    """Some devices hold more than others."""
    peak = measured.profile["device_peak_gib"]
    if not peak or peak["most"] < (1 + UNEVEN) * peak["least"]:
        return None
    evidence = f"one device has had {peak['most']:.2f} GiB in use, another {peak['least']:.2f}"
    return Advice("uneven memory", evidence, {}, "a mesh whose axes divide the sizes of the model")


def growing_host_memory(measured: Measured) -> Advice | None:
    """The memory of the process rises from line to line."""
    used = [line["host_memory_gib"] for line in measured.lines if line.get("host_memory_gib")][1:]
    if len(used) < FEWEST_LINES or measured.config.data.prefetch == 1:
        return None
    third = len(used) // 3
    early, late = statistics.median(used[:third]), statistics.median(used[-third:])
    rises = sum(after > before for before, after in itertools.pairwise(used)) > 0.8 * (len(used) - 1)
    if not rises or late < (1 + GROWTH) * early:
        return None
    evidence = f"the host's memory rose from {early:.2f} to {late:.2f} GiB"
    return Advice("growing host memory", evidence, {"data.prefetch": 1})


def idle_devices(measured: Measured) -> Advice | None:
    """The devices execute nothing for a part of the time, for a reason that no other rule names."""
    idle = measured.profile["idle_share"]
    if idle is None or 1 - idle >= BUSY or slow_input(measured) or host_synchronisation(measured):
        return None
    evidence = f"devices are busy {1 - idle:.0%} of the time, where {BUSY:.0%} are usual"
    return Advice("idle devices", evidence, {}, "longer steps, such as a larger train.global_batch", gain=idle)


def exploding_gradient(measured: Measured) -> Advice | None:
    """The norm of the gradient rises far above its usual size."""
    norms = [line["gradient_norm"] for line in measured.lines if line.get("gradient_norm")]  # 0: nothing to learn from
    if len(norms) < FEWEST_LINES or max(norms[-3:]) < EXPLOSION * (usual := statistics.median(norms[:-3])):
        return None
    evidence = f"a gradient norm of {max(norms[-3:]):.3g} follows a median of {usual:.3g}"
    keys = {"optimizer.learning_rate": measured.config.optimizer.learning_rate / 2}
    return Advice("exploding gradient", evidence, keys, changes_training=True)


def checkpoints_at_risk(measured: Measured) -> Advice | None:
    """The checkpoints of a pod are on a disk that ends with it."""
    if not (measured.topology and measured.topology.accelerator == "tpu" and measured.root) or "://" in measured.root:
        return None
    evidence = f"checkpoints are in {measured.root}, on a disk of this machine"
    return Advice("checkpoints at risk", evidence, {}, "--workdir=gs://BUCKET/FOLDER")


def small_heads(measured: Measured) -> Advice | None:
    """Heads that fill half of a TPU's matrix unit."""
    model = measured.config.model
    size = head_dim(model)
    is_tpu = measured.profile["platform"] == "tpu"
    if not is_tpu or not attends(model) or size >= 128 or model.embed_dim < 256 or model.num_heads * size % 128:
        return None
    heads = model.num_heads * size // 128
    groups = math.gcd(heads, model.num_kv_heads * size // 128 or 1)
    rows = measured.profile["by_file"] or ()
    share = sum(row["share"] for row in rows if row["file"] == "layers/attention/attention.py") / 2
    keys = {"model.num_heads": heads, "model.num_kv_heads": groups, "model.head_dim": 128}
    evidence = f"heads of {size} fill {size / 128:.0%} of the 128 columns of a matrix unit"
    return Advice("small heads", evidence, keys, gain=share if rows else None, changes_training=True)


RULES: tuple[Callable[[Measured], Advice | None], ...] = (
    slow_input, tiny_batch, recompilation, replicated_optimizer, unbalanced, missing_donation, host_synchronisation,
    excess_remat, much_accumulation, memory_spike, uneven_memory, growing_host_memory, idle_devices,
    exploding_gradient, checkpoints_at_risk, small_heads,
)  # fmt: skip
