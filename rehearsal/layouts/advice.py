# SPDX-License-Identifier: Apache-2.0
"""Finds configuration changes that make a step fit or faster, and verifies each by compiling it.

Changes are compiled in the order of their expected gain, for a limited time. The others are marked as not verified.
A change is a dictionary: `keys`, `what` or `why`, `total_gib` (its memory), `gives_gib` (the memory that it saves),
`fits`, `expected` and `gain` (relative, in tokens a second), `step_seconds` and `verified`. Until a change is verified,
its memory is predicted, and its time and gain are unknown.
"""

import dataclasses
import hashlib
import itertools
import math
import time
from collections.abc import Iterator

from configs.base import KEYS, batch_shards
from rehearsal.compiler import GIB, Compiled
from rehearsal.estimate import code_digest, estimate, kept
from rehearsal.layouts import sizing
from rehearsal.sections import options
from settings.architecture import divisors, has_remat
from settings.validation import changed

REMAT = KEYS["model.remat"].choices
WORTH = 0.003  # of the time of a step; a smaller gain is within the error of the estimate
SHORTEST_SEQUENCE = 512


def advise(compiled: Compiled, figures: dict, display, *, seconds: float) -> dict:
    """Return {"remedies": changes that make it fit, "advice": changes that make it faster}, cached as a file.

    Args:
      figures: the report on `compiled`.
      seconds: the time limit for compiling changes; with 0 none is compiled.
    """
    key = hashlib.sha256(f"{compiled.topology.capacity_gib} {seconds}".encode()).hexdigest()[:12]
    path = compiled.folder / f"advice-{key}-{code_digest('layouts/advice', 'layouts/sizing')}.json"

    def make() -> dict:
        study = Study(compiled, figures, display, time.monotonic() + seconds)
        fits = figures["fits"]
        return {"remedies": [] if fits else study.remedies(), "advice": study.faster() if fits else []}

    return kept(path, make)


@dataclasses.dataclass(frozen=True)
class Study:
    """A compiled step, its figures, and the time (time.monotonic()) until which its changes are compiled."""

    compiled: Compiled
    figures: dict
    display: object
    until: float

    def remedies(self) -> list[dict]:
        """Return the smallest change of each kind that fits, in the order of `_levers`."""
        found = []
        for what, changes in _levers(self.compiled).items():
            rows = self._predicted([{"keys": keys, "what": what} for keys in changes])
            first = next((n for n, row in enumerate(rows) if row["fits"]), len(rows) - 1)
            for row in rows[first:]:
                self._compile([row])
                if row["fits"] or not row["verified"]:
                    break
            found += [row] if rows else []
        return found

    def faster(self) -> list[dict]:
        """Return changes with their gains: first the compiled ones, the best first, then those not compiled."""
        ideas = sorted(_ideas(self.compiled.config, self.figures), key=lambda idea: -idea[1])
        worth = [idea for idea in ideas if idea[1] > WORTH]
        rows = [{"keys": keys, "expected": saved / (1 - saved), "why": why} for keys, saved, why in worth]
        tried = self._compile([row for row in self._predicted(rows) if row["fits"]])
        tried += self._compile([row for row in self._predicted(_best_together(tried)) if row["fits"]])
        faster = sorted(filter(_is_worth, tried), key=lambda row: -row["gain"])
        return faster + [row for row in tried if not row["verified"]]

    def _changed(self, keys: dict):
        return changed(self.compiled.config, keys, self.compiled.topology.chips)

    def _predicted(self, rows: list[dict]) -> list[dict]:
        """Return the valid changes with their predicted memory, scaled by the prediction's error on this step."""
        now, found = self.compiled.total_bytes / GIB, []
        off = now / sizing.predict(self.compiled.config)
        for row in rows:
            if config := self._changed(row["keys"]):
                total = off * sizing.predict(config)
                fits = total <= self.compiled.topology.capacity_gib
                memory = {"total_gib": total, "gives_gib": now - total, "fits": fits}
                found.append(row | memory | {"gain": None, "step_seconds": None, "verified": False})
        return found

    def _compile(self, rows: list[dict]) -> list[dict]:
        """Compile changes while there is time and note their gains; return those that the compiler did not refuse."""
        if not rows or time.monotonic() >= self.until:
            return rows
        pairs, refused = [(self._changed(row["keys"]), self.compiled.topology) for row in rows], []
        what = f"compiling up to {len(rows)} changes" if len(rows) > 1 else f"compiling {options(rows[0]['keys'])}"
        for index, result in self.display.compile_all(pairs, what, self.until):
            if isinstance(result, Exception):
                refused.append(index)
            else:
                rows[index].update(self._measured(result))
        return [row for index, row in enumerate(rows) if index not in refused]

    def _measured(self, result: Compiled) -> dict:
        total = result.total_bytes / GIB
        row = {"total_gib": total, "gives_gib": self.compiled.total_bytes / GIB - total, "fits": result.fits}
        rate = estimate(result)["tokens_per_second"] if self.figures["fits"] else None
        tokens = result.config.train.global_batch * result.config.train.sequence_length
        gain = rate / self.figures["tokens_per_second"] - 1 if rate else 0.0
        return row | {"gain": gain, "step_seconds": tokens / rate if rate else None, "verified": True}


def _levers(compiled: Compiled) -> dict[str, list[dict]]:
    """Return changes of each kind, the smallest first."""
    config = compiled.config
    train, mesh, now = config.train, config.mesh, config.train.gradient_accumulation or 1
    rows = train.global_batch // batch_shards(mesh)
    policies = _remat_policies(config)
    remat = policies[policies.index(config.model.remat) + 1 :]
    more = [n for n in divisors(mesh.data * mesh.fsdp) if n > mesh.fsdp]
    lengths = [train.sequence_length >> n for n in range(1, 8) if train.sequence_length >> n >= SHORTEST_SEQUENCE]
    to_host = train.offload == "none" and compiled.topology.accelerator == "tpu"
    return {
        "smaller microbatches, the same global batch": [
            {"train.gradient_accumulation": n} for n in divisors(rows) if n > now
        ],
        "fewer activations saved for the backward pass": [{"model.remat": policy} for policy in remat],
        "moments in the hosts' memory": [{"train.offload": "optimizer"}] if to_host else [],
        "parameters sharded further": [{"mesh.fsdp": n, "mesh.data": mesh.data * mesh.fsdp // n} for n in more],
        "shorter sequences": [{"train.sequence_length": length} for length in lengths],
    }


def _remat_policies(config) -> list[str]:
    """Return the policies of rematerialisation that the model may have, from the largest predicted memory down."""
    if not has_remat(config.model):
        return [config.model.remat]
    copy = config.copy_and_resolve_references()

    def predicted(policy: str) -> float:
        copy.model.remat = policy
        return sizing.predict(copy)

    return sorted(REMAT, key=predicted, reverse=True)


def _is_worth(row: dict) -> bool:
    return bool(row["verified"] and row["fits"] and row["gain"] > WORTH)


def _best_together(rows: list[dict]) -> list[dict]:
    """Return the two best changes without a common key as one change; [] if there are no two."""
    ranked = sorted(filter(_is_worth, rows), key=lambda row: -row["gain"])
    for first, second in itertools.combinations(ranked, 2):
        if not first["keys"].keys() & second["keys"].keys():
            gain = first["gain"] + second["gain"]
            keys = first["keys"] | second["keys"]
            return [{"keys": keys, "expected": gain, "why": "both of the best changes together"}]
    return []


def _ideas(config, figures: dict) -> Iterator[tuple[dict, float, str]]:
    """Yield (keys, fraction of the step that they might save, why)."""
    step = figures["step_seconds"]
    exposed = figures["exposed_communication_seconds"] / step
    recomputed = figures["seconds_by_pass"]["recomputed"] / step
    policies = _remat_policies(config)
    at = policies.index(config.model.remat)
    for saved, policy in enumerate(reversed(policies[:at])):
        part = recomputed * (saved + 1) / (len(REMAT) - 1)
        yield {"model.remat": policy}, part, f"{recomputed:.0%} of the step recomputes activations; this saves more"
    passes = figures["seconds_by_category"].get("element-wise", 0.0) / step
    for policy in policies[at + 1 : at + 2]:
        why = f"{passes:.0%} of the step is memory traffic, which saving fewer activations may reduce"
        yield {"model.remat": policy}, passes / 10, why
    now = config.train.gradient_accumulation or 1
    for fewer in divisors(now)[-2:-1]:
        why = "fewer, larger microbatches all-gather the parameters less often"
        yield {"train.gradient_accumulation": fewer}, 0.05 + exposed / 2, why
    chunk = config.train.global_batch * config.train.sequence_length // math.prod(config.mesh.values()) // now
    in_loss = [r["exposed_seconds"] for r in figures["collectives"] if r["source"].startswith("layers/cross_entropy")]
    part = sum(in_loss) / step
    if part > WORTH and config.train.loss_chunk_tokens != chunk:
        why = f"{part:.0%} of the step all-reduces the head's gradient, once for each chunk of the loss"
        yield {"train.loss_chunk_tokens": chunk}, 0.9 * part, why
    for mesh in _neighbouring_meshes(config):
        why = f"{exposed:.0%} of the step waits for communication, which another mesh may hide or reduce"
        yield mesh, exposed / 3, why


def _neighbouring_meshes(config) -> list[dict]:
    """Return meshes that differ by a factor of 2 moved from one axis to another."""
    names, found = ("data", "fsdp", "model"), []
    for source, target in itertools.permutations(names, 2):
        sizes = {name: config.mesh[name] for name in names}
        if sizes[source] % 2 == 0:
            moved = sizes | {source: sizes[source] // 2, target: sizes[target] * 2}
            found.append({f"mesh.{name}": size for name, size in moved.items() if size != config.mesh[name]})
    return found
