# SPDX-License-Identifier: Apache-2.0
"""What a study takes: steps, hours and cost of each configuration, from recorded rehearsals and not from guesses."""

import dataclasses
import functools
import json
import math

from configs import topologies
from configs.base import keys_of
from configs.key import MACHINE, UNCOMPILED
from rehearsal import record
from reporting.display import aligned
from settings.keys import flat
from studies.outcome import HOUR
from studies.suites import Member, Study

PUZZLES = ("sudoku", "maze")  # sources whose number of examples in a pass is data.puzzle_count
UNKNOWN = "not known: rehearse first"
# Numbers that a compiled step reads and whose value does not change what it computes with.
FREE = {
    "train.steps", "train.tokens", "train.epochs", "train.seed", "supervision.exploration", "supervision.max_steps",
    "optimizer.learning_rate", "optimizer.warmup_steps", "optimizer.final_fraction", "optimizer.weight_decay",
    "optimizer.table_learning_rate", "optimizer.table_weight_decay", "optimizer.beta1", "optimizer.beta2",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a configuration takes; None where it is not known.

    Attributes:
      steps: number of updates.
      hours: of the whole slice.
      cost: in dollars.
    """

    steps: int | None
    hours: float | None
    cost: float | None


def estimate_of(member: Member, topology: str) -> Estimate:
    """Return the estimate for a configuration on a hardware preset; "": only the steps are known."""
    steps = steps_of(member.values)
    seconds = step_seconds(member, topology) if topology else None
    hours = None if steps is None or seconds is None else steps * seconds / HOUR
    preset = topologies.get(topology) if topology else None
    price = preset.price_per_chip_hour if preset else None
    return Estimate(steps, hours, None if hours is None or price is None else hours * preset.chips * price)


def steps_of(values: dict[str, object]) -> int | None:
    """Return the number of updates; None if only the data say how many there are."""
    if values["train.steps"]:
        return values["train.steps"]
    if values["train.tokens"]:
        return math.ceil(values["train.tokens"] / (values["train.global_batch"] * values["train.sequence_length"]))
    if values["data.source"] in PUZZLES:
        return math.floor(values["train.epochs"] * values["data.puzzle_count"] / values["train.global_batch"])
    return None


def step_seconds(member: Member, topology: str) -> float | None:
    """Return the recorded seconds of a step that computes the same on the same slice; None if there is no record."""
    wanted = _compiled(member.values)
    for case, seconds in _recorded(topology):
        if case == wanted:
            return seconds
    return None


@functools.cache
def _recorded(topology: str) -> list[tuple[dict[str, object], float]]:
    cases = [case for case in record.cases() if case.topology == topology and case.path.is_file()]
    return [
        (_compiled(flat(case.load().config)), json.loads(case.path.read_text())["figures"]["step_seconds"])
        for case in cases
    ]


def _compiled(values: dict[str, object]) -> dict[str, object]:
    """Return the keys that decide what a step computes; a decay of an average matters only by being there."""
    left_out = keys_of(UNCOMPILED) | keys_of(MACHINE) | FREE
    kept = {key: value for key, value in values.items() if key not in left_out}
    mesh = {key: value for key, value in values.items() if key.startswith(("mesh.", "layout."))}
    dtype = {"model.dtype": "bfloat16"} if kept["model.dtype"] == "auto" else {}  # records are of TPUs
    return kept | mesh | dtype | {"optimizer.ema_decay": kept["optimizer.ema_decay"] > 0}


def table(study: Study, members: list[Member], topology: str) -> list[str]:
    """Return the lines of a plan: what each configuration varies and takes, what is refused, and the sums."""
    owners, rows, sums = {}, [("configuration", "steps", "hours", "cost", "what differs")], []
    for member in members:
        changes = ", ".join(f"{key}={value}" for key, value in changed(study, member).items()) or "nothing"
        if member.refusal:
            rows.append((member.title, "-", "-", "-", f"refused: {member.refusal}"))
            continue
        if owner := owners.get(member.digest):
            rows.append((member.title, "-", "-", "-", f"equals {owner}, whose trial it shares"))
            continue
        owners[member.digest] = member.title
        sums.append(estimate := estimate_of(member, topology))
        rows.append((member.title, *_words(estimate), changes))
    known = [one for one in sums if one.hours is not None]
    lines = [*aligned(rows), f"{len(members)} configurations, {len(owners)} trials"]
    if not topology:
        return [*lines, "hours and cost: name a slice with --topology"]
    hours, unknown = sum(one.hours for one in known), len(sums) - len(known)
    cost = f", ${sum(one.cost or 0 for one in known):,.2f}" if any(one.cost for one in known) else ""
    lines.append(f"training of {len(known)} trials on {topology}, one after the other: {hours:,.2f} h{cost}")
    return [*lines, *([f"{unknown} trials: {UNKNOWN}, with rehearse.py --topology={topology}"] if unknown else [])]


def changed(study: Study, member: Member) -> dict[str, object]:
    """Return the keys by which a configuration differs from its base."""
    return getattr(study.groups[member.group], study.base.size)[plain_name(member)]


def plain_name(member: Member) -> str:
    """Return the name of a configuration without its seed."""
    return member.name.removesuffix(f"-seed{member.seed}") if member.seed else member.name


def _words(estimate: Estimate) -> tuple[str, str, str]:
    steps = "-" if estimate.steps is None else f"{estimate.steps:,}"
    hours = "not known" if estimate.hours is None else f"{estimate.hours:.2f}"
    return steps, hours, "not known" if estimate.cost is None else f"${estimate.cost:,.2f}"
