# SPDX-License-Identifier: Apache-2.0
"""What to change: what would make a step fit, or faster; each change is compiled before it is promised.

Changes are tried in the order of what they are expected to give, for a limited time; what could not be compiled in
it is told apart.
"""

import hashlib
import itertools
import math
import time
from collections.abc import Iterator

from configs.base import batch_shards
from configs.validation import CHOICES, changed
from rehearsal import report, sizing
from rehearsal.compiler import GIB, Compiled, capacity_gib
from rehearsal.estimate import code_digest, estimate, kept

REMAT = CHOICES["model.remat"]  # from what keeps most for the backward pass to what keeps least
WORTH = 0.003  # of the time of a step: a smaller gain is within what the estimate does not know
SHORTEST_SEQUENCE = 512


def advise(compiled: Compiled, figures: dict, display, *, seconds: float) -> dict:
    """Return {"remedies": what would make it fit, "advice": what would make it faster}, kept beside the compilation.

    Args:
      figures: the report on `compiled`.
      seconds: for compiling changes; 0: none is compiled.
    """
    key = hashlib.sha256(f"{capacity_gib(compiled.topology)} {seconds}".encode()).hexdigest()[:12]
    path = compiled.folder / f"advice-{key}-{code_digest('advice', 'sizing')}.json"

    def make() -> dict:
        until = time.monotonic() + seconds
        return {
            "remedies": [] if figures["fits"] else _remedies(compiled, display, until),
            "advice": _faster(compiled, figures, display, until) if figures["fits"] else [],
        }

    return kept(path, make)


def _changed(compiled: Compiled, keys: dict):
    return changed(compiled.config, keys, compiled.topology.chips)


def _predicted_bytes(compiled: Compiled, config) -> float:
    """Return the bytes expected of a changed configuration, by how far the prediction is off for the compiled one."""
    known = compiled.total_bytes / sizing.predict(compiled.config).total
    return known * sizing.predict(config).total


# What would make it fit


def _remedies(compiled: Compiled, display, until: float) -> list[dict]:
    """Return for each kind of change the smallest that fits, in the order of `_levers`."""
    found = []
    for what, changes in _levers(compiled).items():
        rows = [{"keys": keys, "what": what, **_expected(compiled, keys)} for keys in changes]
        first = next((n for n, row in enumerate(rows) if row["fits"]), len(rows) - 1)
        for row in rows[first:]:
            row.update(_tried(compiled, row["keys"], display, until))
            if row["fits"] or not row["verified"]:
                break
        found += [row] if rows else []
    return found


def _tried(compiled: Compiled, keys: dict, display, until: float) -> dict:
    """Return what the compiler says of a change; {} where there is no time left, or it refuses it."""
    if time.monotonic() >= until:
        return {}
    pair = _changed(compiled, keys), compiled.topology
    with display.working(f"compiling {report.options(keys)}") as update:
        for _, result in display.compiler.compile_all([pair], waiting=lambda s: update(f"{s:.0f} s"), until=until):
            if not isinstance(result, Exception):
                total = result.total_bytes / GIB
                gives = compiled.total_bytes / GIB - total
                return {"total_gib": total, "gives_gib": gives, "fits": result.fits, "verified": True}
    return {}


def _levers(compiled: Compiled) -> dict[str, list[dict]]:
    """Return changes of each kind, the smallest first."""
    config, chips = compiled.config, compiled.topology.chips
    train, mesh, now = config.train, config.mesh, config.train.gradient_accumulation or 1
    rows = train.global_batch // batch_shards(mesh)
    microbatches = [{"train.gradient_accumulation": n} for n in range(now + 1, rows + 1) if rows % n == 0]
    remat = [{"model.remat": policy} for policy in REMAT[REMAT.index(config.model.remat) + 1 :]]
    more = [n for n in range(mesh.fsdp + 1, chips + 1) if (mesh.data * mesh.fsdp) % n == 0]
    fsdp = [{"mesh.fsdp": n, "mesh.data": mesh.data * mesh.fsdp // n} for n in more]
    lengths = [train.sequence_length >> n for n in range(1, 8) if train.sequence_length >> n >= SHORTEST_SEQUENCE]
    to_host = config.train.offload == "none" and compiled.topology.accelerator == "tpu"
    levers = {
        "smaller microbatches, the same global batch": microbatches,
        "keeping less for the backward pass": remat,
        "moments in the hosts' memory": [{"train.offload": "optimizer"}] if to_host else [],
        "parameters split further": fsdp,
        "shorter sequences": [{"train.sequence_length": length} for length in lengths],
    }
    return {
        what: [keys for keys in changes if _changed(compiled, keys) is not None] for what, changes in levers.items()
    }


def _expected(compiled: Compiled, keys: dict) -> dict:
    total = _predicted_bytes(compiled, _changed(compiled, keys)) / GIB
    return {
        "total_gib": total, "gives_gib": compiled.total_bytes / GIB - total,
        "fits": total <= capacity_gib(compiled.topology), "verified": False,
    }  # fmt: skip


# What would make it faster


def _faster(compiled: Compiled, figures: dict, display, until: float) -> list[dict]:
    """Return changes with what they give: first those compiled, the best first, then those that were not."""
    ideas = sorted(_ideas(compiled, figures), key=lambda idea: -idea["expected"])
    wanted = [
        idea | {"gain": None, "step_seconds": None, "total_gib": None, "fits": None, "verified": False}
        for idea in ideas
        if idea["expected"] > WORTH and _is_possible(compiled, idea["keys"])
    ]
    refused = _compile(compiled, wanted, figures, display, until)
    both = _best_together([row for row in wanted if _is_worth(row)])
    if both and _is_possible(compiled, both["keys"]):
        wanted.append(both)
        refused += _compile(compiled, [both], figures, display, until)
    worth = sorted((row for row in wanted if _is_worth(row)), key=lambda row: -row["gain"])
    return worth + [row for row in wanted if not row["verified"] and row not in refused]


def _compile(compiled: Compiled, wanted: list[dict], figures: dict, display, until: float) -> list[dict]:
    """Compile changes as long as there is time, and note what each gives; return those that the compiler refuses."""
    if not wanted or time.monotonic() >= until:
        return []
    refused, pairs = [], [(_changed(compiled, row["keys"]), compiled.topology) for row in wanted]
    with display.working(f"compiling up to {len(pairs)} changes that could make it faster") as update:
        for index, result in display.compiler.compile_all(pairs, waiting=lambda s: update(f"{s:.0f} s"), until=until):
            if isinstance(result, Exception):
                refused.append(wanted[index])
            else:
                wanted[index].update(_measured(result, figures))
    return refused


def _is_worth(row: dict) -> bool:
    return bool(row["verified"] and row["fits"] and row["gain"] > WORTH)


def _best_together(worth: list[dict]) -> dict | None:
    """Return the two best changes that are of different keys as one; None where there are no two."""
    ranked = sorted(worth, key=lambda row: -row["gain"])
    pairs = (pair for pair in itertools.combinations(ranked, 2) if not pair[0]["keys"].keys() & pair[1]["keys"].keys())
    first, second = next(pairs, (None, None))
    if first is None:
        return None
    gain = first["gain"] + second["gain"]
    both = {"keys": first["keys"] | second["keys"], "expected": gain, "why": "both of the best changes together"}
    return both | {"gain": None, "step_seconds": None, "total_gib": None, "fits": None, "verified": False}


def _measured(result: Compiled, before: dict) -> dict:
    after = estimate(result)
    tokens = result.config.train.global_batch * result.config.train.sequence_length
    step = after["step_seconds"]
    gain = tokens / step / before["tokens_per_second"] - 1 if step else 0.0
    return {
        "gain": gain, "step_seconds": step, "total_gib": after["hbm_gib"]["total"], "fits": after["fits"],
        "verified": True,
    }  # fmt: skip


def _is_possible(compiled: Compiled, keys: dict) -> bool:
    config = _changed(compiled, keys)
    capacity = capacity_gib(compiled.topology) * GIB
    return config is not None and _predicted_bytes(compiled, config) <= capacity


def _ideas(compiled: Compiled, figures: dict) -> Iterator[dict]:
    """Yield {"keys", "why", "expected": part of the step that it might save}."""
    config, step = compiled.config, figures["step_seconds"]
    exposed = figures["exposed_communication_seconds"] / step
    recomputed = figures["seconds_by_pass"]["recomputed"] / step
    at = REMAT.index(config.model.remat)
    for saved, policy in enumerate(reversed(REMAT[:at])):
        yield {
            "keys": {"model.remat": policy}, "expected": recomputed * (saved + 1) / (len(REMAT) - 1),
            "why": f"{recomputed:.0%} of the step computes again what this keeps",
        }  # fmt: skip
    passes = figures["seconds_by_category"].get("element-wise", 0.0) / step
    for policy in REMAT[at + 1 : at + 2]:
        yield {
            "keys": {"model.remat": policy}, "expected": passes / 10,
            "why": f"{passes:.0%} of the step are passes over memory, of which keeping less may spare some",
        }  # fmt: skip
    now = config.train.gradient_accumulation or 1
    for fewer in [n for n in range(1, now) if now % n == 0][-1:]:
        yield {
            "keys": {"train.gradient_accumulation": fewer}, "expected": 0.05 + exposed / 2,
            "why": "fewer, larger microbatches gather the parameters less often",
        }  # fmt: skip
    chunk = config.train.global_batch * config.train.sequence_length // math.prod(config.mesh.values()) // now
    in_loss = sum(
        r["exposed_seconds"] for r in figures["collectives"] if r["source"].startswith("layers/cross_entropy")
    )
    if in_loss / step > WORTH and config.train.loss_chunk_tokens != chunk:
        yield {
            "keys": {"train.loss_chunk_tokens": chunk}, "expected": 0.9 * in_loss / step,
            "why": f"{in_loss / step:.0%} of the step sums the head's gradient once a chunk; one chunk sums it once",
        }  # fmt: skip
    for mesh in _neighbouring_meshes(config):
        yield {
            "keys": mesh, "expected": exposed / 3,
            "why": f"{exposed:.0%} of the step waits for communication, which another mesh might hide or spare",
        }  # fmt: skip


def _neighbouring_meshes(config) -> list[dict]:
    """Return meshes that differ by a factor of 2 moved from one axis to another."""
    names, found = ("data", "fsdp", "model"), []
    for source, target in itertools.permutations(names, 2):
        sizes = {name: config.mesh[name] for name in names}
        if sizes[source] % 2 == 0:
            moved = sizes | {source: sizes[source] // 2, target: sizes[target] * 2}
            found.append({f"mesh.{name}": size for name, size in moved.items() if size != config.mesh[name]})
    return found
