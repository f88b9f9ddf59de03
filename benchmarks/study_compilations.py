# SPDX-License-Identifier: Apache-2.0
"""Does every configuration of the study of the recursive model compile? All 67 with small sizes, on this machine.

Sizes are divided, so that what a group varies stays different; the cycles, the kind of layers, the optimizer and
everything else is that of the configuration.
"""

import time

import support

import jax

from core import assembly
from settings.keys import from_flat
from settings.validation import validate
from studies.cost import planning
from studies import suites

DIVIDED = {  # sizes of the study by what they are divided by
    "model.embed_dim": 16, "model.mlp_dim": 16, "model.puzzle_dim": 16, "train.global_batch": 768,
}  # fmt: skip


def members() -> list[suites.Member]:
    """Return the configurations that are not refused, each different one once."""
    study, groups = suites.find("trm")
    counted = [name for name in groups if study.groups[name].counted]
    found = {member.digest: member for member in suites.members(study, counted) if not member.refusal}
    return list(found.values())


def compiled(member: suites.Member) -> jax.stages.Compiled:
    """Return the training step of a configuration with small sizes, compiled for one device."""
    small = {key: max(1, member.values[key] // divisor) for key, divisor in DIVIDED.items()}
    config = from_flat(member.values | small | {"train.steps": planning.steps_of(member.values), "train.epochs": 0.0})
    validate(config, 1)
    return assembly.assemble(config, devices=jax.devices()[:1]).compile()


def main() -> None:
    """Compile all of them."""
    began, count = time.perf_counter(), 0
    for member in members():
        compiled(member)
        count += 1
        print(f"{member.title}: {time.perf_counter() - began:.0f} s", flush=True)
    support.finish("study_compilations", {"compiled": count, "seconds": time.perf_counter() - began})


if __name__ == "__main__":
    main()
