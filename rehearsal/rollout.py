# SPDX-License-Identifier: Apache-2.0
"""The rehearsal of a rollout: the answers that an objective draws before a step, or before each of its batches.

A rollout decodes with a copy of the weights, see core/sampling.py. It is rehearsed as a server is. Its time is an upper
bound: all prompts and all answers have the most tokens that fit in a row.
"""

import math

from rehearsal import decoding
from rehearsal.compiler import GIB, Compiled
from rehearsal.report import cost, verdict
from settings.decoding import for_decoding
from settings.ramp import known_steps


def rehearse(loaded, compiled: Compiled, figures: dict, display) -> dict:
    """Return what the rollouts of a compiled step add to its report; {} if it draws no answers, or off a TPU."""
    topology, decoded = compiled.topology, compiled.facts["decoded"]
    if not decoded or topology.accelerator != "tpu":
        return {}
    config = for_decoding(compiled.config, topology.chips)
    rows, length = decoded[0], min(decoded[1], config.model.max_length)
    found = decoding.rehearse(loaded, config, topology, rows, length, display)
    return added(compiled, figures, found)


def added(compiled: Compiled, figures: dict, found: dict) -> dict:
    """Return the keys of both phases, given the report on a step and that of a server which decodes its answers."""
    facts, config = compiled.facts, compiled.config
    hbm = _memory(sum(facts["state"].values()) + facts["frozen"], found["hbm_gib"], compiled.topology.capacity_gib)
    rollout = {"fits": found["fits"] and hbm["total"] <= hbm["capacity"], "hbm_gib": hbm, "seconds": None}
    rollout |= {name: found[name] for name in ("rows", "length", "mesh", "prefill", "decode")}
    rollout["steps"] = facts["steps_of_batch"]
    step = None
    if found["decode"]:
        rounds = math.ceil(config.train.global_batch / found["rows"])
        rollout["seconds"] = rounds * (found["prefill"]["seconds"] + found["length"] * found["decode"]["step_seconds"])
        step = figures["step_seconds"] and figures["step_seconds"] + rollout["seconds"] / rollout["steps"]
    whole = {"step_seconds": step, "tokens_per_second": step and figures["tokens_per_step"] / step}
    return {
        "fits": figures["fits"] and rollout["fits"],
        "update": {"fits": figures["fits"], "seconds": figures["step_seconds"]},
        "rollout": rollout,
        "update_and_rollout_seconds": step,
    } | cost(whole, known_steps(config), compiled.topology)  # fmt: skip


def row(report: dict) -> dict:
    """Return the columns of a row of `rehearsal.report.row` that a rollout changes, from the report of both phases."""
    step = report["update_and_rollout_seconds"]
    gib = max(report["hbm_gib"]["total"], report["rollout"]["hbm_gib"]["total"])
    changed = verdict(report["fits"], gib, step, step and report["tokens_per_step"] / step, report)
    return changed | {"MFU": None, "update alone": False}


def _memory(state: float, decoding_gib: dict, capacity: float) -> dict:
    """Return GiB of a chip while answers are drawn; for a moment, there are two copies of the weights."""
    drawing = {name: decoding_gib[name] for name in ("weights", "cache", "temporary")}
    drawing["temporary"] = max(drawing["temporary"], drawing["weights"] - drawing["cache"])
    parts = {"training_state": state / GIB} | drawing
    return parts | {"total": sum(parts.values()), "capacity": capacity}
