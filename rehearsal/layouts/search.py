# SPDX-License-Identifier: Apache-2.0
"""Finds the fastest layout that fits, or the largest model, with few compilations.

Every candidate gets a predicted memory and time. Candidates that cannot fit are never compiled. The most promising of
the others are compiled in rounds. The results of a round correct the predictions of the rest, by one factor for each
mesh, remat policy and microbatch. All compilations are cached, so an interrupted search resumes.
"""

import dataclasses
import itertools
import math
import shlex
from collections import defaultdict
from collections.abc import Callable

from configs.base import KEYS, batch_shards
from configs.errors import ConfigError
from rehearsal import assumptions, report
from rehearsal.compiler import GIB
from rehearsal.layouts import sizing
from rehearsal.sections import options
from reporting.display import duration
from settings.architecture import divisors, has_remat, head_dim
from settings.keys import flat
from settings.validation import changed

RECOMPUTED = {  # fraction of the model's FLOPs
    "none": 0.0, "dots": 0.03, "mlp": 0.06, "hidden": 0.09, "up": 0.12, "attention": 0.22, "query": 0.26,
    "attended": 0.28, "full": 0.33,
}  # fmt: skip
MAX_COMPILATIONS = 36
ROUND = 4
MARGIN = 1.5  # a candidate predicted to be this much slower than the best found is not worth a compilation
UNTRIED = 0.9  # an optimistic factor on the predicted time of a mesh that was never compiled
MEMORY_MARGIN = 1.08  # the factor by which predicted memory may be too high
CORRECTED_MARGIN = 1.02  # the same, once the results of a round have corrected it
USUAL_EFFICIENCY = 0.7  # of matrix products, as a fraction of the peak
LENGTHS = (512, 1024, 2048)
TRIES = 5  # compilations for each size of --search=model
TOO_LARGE = 1.02  # a factor on a prediction that was corrected by a size that did not fit


@dataclasses.dataclass
class Candidate:
    """A layout: its changes, its predicted memory and time, and its result."""

    keys: dict
    config: object
    features: tuple
    predicted_seconds: float  # for a token of one chip
    predicted_bytes: float
    row: dict = dataclasses.field(default_factory=dict)  # from report.row, once it is compiled

    @property
    def seconds(self) -> float:
        """Seconds for a token, estimated from its program; infinite if it does not fit or is not compiled."""
        return 1 / self.row["Tokens/s"] if self.row.get("verdict") == "fits" else math.inf


def fastest(loaded, topology, display, *, any_batch: bool) -> dict:
    """Return a table of the layouts that no other beats in both speed and memory, and the command of the fastest.

    With `any_batch` the global batch may change too. Raises ConfigError if no layout fits.
    """
    candidates = layouts(loaded, topology, any_batch=any_batch)
    tried: list[Candidate] = []
    while len(tried) < MAX_COMPILATIONS:
        chosen = _most_promising(candidates, tried, topology)[: min(ROUND, MAX_COMPILATIONS - len(tried))]
        if not chosen:
            break
        _compile(chosen, topology, display, _progress(len(tried), display.compiler))
        tried += chosen
    return _table(loaded, topology, candidates, tried)


def _progress(tried: int, compiler) -> str:
    """Return the progress of the search and the longest time that it may take."""
    left = (MAX_COMPILATIONS - tried) * sum(compiler.spent) / max(1, len(compiler.spent)) / compiler.processes
    return f"{tried} of at most {MAX_COMPILATIONS} tried" + (f", at most {duration(left)} left" if left else "")


def layouts(loaded, topology, *, any_batch: bool) -> list[Candidate]:
    """Return every valid combination of a mesh, a microbatch and a remat policy.

    The mesh is over data, fsdp and model, and over expert if the model has experts.
    """
    found = []
    held = {key: value for key, value in flat(loaded.config).items() if key in loaded.typed}  # typed keys are fixed
    if not held.get("train.gradient_accumulation"):
        held.pop("train.gradient_accumulation", None)  # 0 is automatic
    model = loaded.config.model
    policies = KEYS["model.remat"].choices if has_remat(model) else (model.remat,)
    for mesh in _meshes(loaded.config, topology.chips):
        shards = topology.chips // mesh["mesh.model"] // loaded.config.mesh.context
        for batch in _batches(loaded.config, shards, any_batch):
            tried = [mesh | batch | {"model.remat": remat} for remat in policies]
            holding = (keys for keys in tried if all(held.get(key, value) == value for key, value in keys.items()))
            found += [_candidate(loaded, topology, keys) for keys in holding]
    return [candidate for candidate in found if candidate]


def _meshes(config, chips: int) -> list[dict]:
    """Return the meshes of `chips` with the configuration's axes dcn_data and context."""
    has_experts = config.model.num_experts > 0
    free = chips // (config.mesh.dcn_data * config.mesh.context * (1 if has_experts else config.mesh.expert))
    found = []
    for model, expert in itertools.product(divisors(free), divisors(math.gcd(free, max(1, config.model.num_experts)))):
        rest, unused = divmod(free, model * expert)
        for fsdp in divisors(rest) if not unused else ():
            mesh = {"mesh.data": rest // fsdp, "mesh.fsdp": fsdp, "mesh.model": model}
            found.append(mesh | ({"mesh.expert": expert} if has_experts else {}))
    return found


def _batches(config, shards: int, any_batch: bool) -> list[dict]:
    if any_batch:
        powers = (2**n for n in range(8))
        return [{"train.global_batch": rows * shards, "train.gradient_accumulation": 1} for rows in powers]
    rows = config.train.global_batch // shards
    return [{"train.gradient_accumulation": n} for n in divisors(rows)] if rows else []


def _candidate(loaded, topology, keys: dict) -> Candidate | None:
    config = changed(loaded.config, keys, topology.chips)
    if config is None:
        return None
    mesh = tuple(value for key, value in keys.items() if key.startswith("mesh."))
    rows = config.train.global_batch // (batch_shards(config.mesh) * config.train.gradient_accumulation)
    features = (("mesh", mesh), ("remat", keys["model.remat"]), ("rows", rows))
    return Candidate(keys, config, features, _predicted_seconds(config, topology), sizing.predict(config))


def _predicted_seconds(config, topology) -> float:
    """Return predicted seconds for a token: products, passes over the optimizer state, exposed communication.

    Experts are gathered over fsdp alone, all other weights over fsdp and expert; tokens are exchanged over expert.
    """
    given, mesh, train, model = assumptions.of_topology(topology), config.mesh, config.train, config.model
    tokens = train.global_batch * train.sequence_length / topology.chips
    number, microbatches = sizing.num_parameters(config), train.gradient_accumulation
    experts = sizing.expert_parameters(model)
    used = number - experts * (1 - model.experts_per_token / model.num_experts) if experts else number
    heads = model.num_heads * head_dim(model)
    flops = tokens * (6 * used + 6 * model.num_layers * heads * train.sequence_length)
    products = flops * (1 + RECOMPUTED[model.remat]) / (given.peak_flops * USUAL_EFFICIENCY)
    shards = mesh.fsdp * mesh.expert * mesh.model
    trained = sizing.num_trained(config)
    update = 7 * sizing.FLOAT32 * trained / shards / given.memory_bandwidth
    ring = 1 / given.ring_bandwidth
    weights = experts / mesh.expert * (1 - 1 / mesh.fsdp) + (number - experts) * (1 - 1 / (mesh.fsdp * mesh.expert))
    gathered = 4 * sizing.BFLOAT16 * weights / mesh.model * microbatches * ring
    summed = 2 * sizing.FLOAT32 * trained / shards * (1 - 1 / (mesh.dcn_data * mesh.data)) * ring
    stream = tokens * mesh.model * model.embed_dim * sizing.BFLOAT16
    across_model = 8 * model.num_layers * stream * (1 - 1 / mesh.model) * ring
    exchanged = 4 * model.num_layers * model.experts_per_token * stream * (1 - 1 / mesh.expert) * ring
    exposed = across_model + exchanged + summed + max(0.1 * gathered, gathered - 0.8 * products)
    return (products + update + exposed) / (tokens * topology.chips)


def _most_promising(candidates: list[Candidate], tried: list[Candidate], topology) -> list[Candidate]:
    """Return candidates worth compiling next, the most promising first; at first one of each mesh precedes others."""
    times = [(c.features, math.log(c.seconds / c.predicted_seconds)) for c in tried if c.seconds < math.inf]
    sizes = [(c.features, math.log(c.row["GiB"] * GIB / c.predicted_bytes)) for c in tried if "GiB" in c.row]
    slower, larger = _correction(times), _correction(sizes)
    capacity = topology.capacity_gib * GIB * (MEMORY_MARGIN if len(tried) < ROUND else CORRECTED_MARGIN)
    done = [candidate.keys for candidate in tried]
    rest = [c for c in candidates if c.keys not in done and c.predicted_bytes * larger(c) <= capacity]
    best = min((c.seconds for c in tried), default=math.inf)
    meshes = {c.features[0] for c in tried}
    hoped = {id(c): c.predicted_seconds * slower(c) * (1 if c.features[0] in meshes else UNTRIED) for c in rest}
    worth = sorted((c for c in rest if hoped[id(c)] < best * MARGIN), key=lambda c: hoped[id(c)])
    first = {c.features[0]: c for c in reversed(worth)}.values()
    return sorted(worth, key=lambda c: (c not in first, hoped[id(c)])) if not tried else worth


def _correction(known: list[tuple[tuple, float]]) -> Callable[[Candidate], float]:
    """Return a function that gives a prediction's correction factor, fitted to known (features, log factor) pairs.

    The logarithm of the factor is a sum of one common term and one term for each feature.
    """
    if not known:
        return lambda candidate: 1.0
    common = sum(value for _, value in known) / len(known)
    effects: dict[tuple, float] = defaultdict(float)
    # In the order of `known`: that of a set differs from process to process, and with it what the search finds.
    every = dict.fromkeys(feature for features, _ in known for feature in features)
    for _ in range(5):
        for feature in every:
            left = [
                value - common - sum(effects[other] for other in features if other != feature)
                for features, value in known if feature in features
            ]  # fmt: skip
            effects[feature] = sum(left) / (len(left) + 1)  # shrunk towards 0 if few are known
    return lambda candidate: math.exp(common + sum(effects[feature] for feature in candidate.features))


def _compile(chosen: list[Candidate], topology, display, progress: str) -> None:
    pairs = [(candidate.config, topology) for candidate in chosen]
    what = f"compiling {len(chosen)} layouts for {topology.name}, {progress}"
    for index, result in display.compile_all(pairs, what):
        candidate = chosen[index]
        candidate.row = report.row(result)
        took = "does not fit" if candidate.seconds == math.inf else f"{1 / candidate.seconds:,.0f} tokens/s"
        took = str(result) if isinstance(result, Exception) else took
        display.line(f"  {options(candidate.keys)}: {took}")


def _table(loaded, topology, candidates: list[Candidate], tried: list[Candidate]) -> dict:
    fitting = sorted((c for c in tried if c.seconds < math.inf), key=lambda c: c.seconds)
    if not candidates:
        keys = options(loaded.as_typed()) or "the recipe's batch"
        raise ConfigError(f"no layout of {loaded.recipe} on {topology.name} is possible with {keys}; change or omit it")
    if not fitting:
        raise ConfigError(
            f"no layout of {loaded.recipe} fits {topology.name}: {len(tried)} of {len(candidates)} were compiled, and "
            f"the others are predicted to need more memory; use a larger slice, or a smaller batch or sequence"
        )
    efficient = [
        c for c in fitting
        if not any(o.seconds < c.seconds and o.row["GiB"] < c.row["GiB"] for o in fitting)
    ]  # fmt: skip
    best = fitting[0]
    recipe = shlex.quote(f"--config={loaded.path}")
    command = f"python train.py {recipe} --topology={topology.name} {options(best.keys)}"
    typed = {key: value for key, value in loaded.as_typed().items() if key not in best.keys}
    return {
        "title": f"{loaded.recipe} on {topology.name}: layouts that no other beats in both speed and memory",
        "columns": ["layout", "Microbatch a chip", "A step", "MFU", "Tokens/s", "GiB", "Exposed"],
        "rows": [_row(candidate) for candidate in efficient],
        "tried": [_row(candidate) for candidate in tried],
        "best": best.keys,
        "notes": [
            f"{len(candidates)} layouts, {len(tried)} compiled; times are estimates",
            *report.notes_on([best.row]),
            f"the fastest: {command} {options(typed)}".rstrip(),
        ],
    }


def _row(candidate: Candidate) -> dict:
    keys = candidate.keys
    axes = [f"{key[5:]} {value}" for key, value in keys.items() if key.startswith("mesh.") and value > 1]
    return candidate.row | {
        "layout": f"{' x '.join(axes) or 'one device'}, remat {keys['model.remat']}",
        "Microbatch a chip": dict(candidate.features)["rows"],
        "Tokens/s": None if candidate.seconds == math.inf else 1 / candidate.seconds,
        "keys": keys,
    }


# The largest model


def largest_model(loaded, topology, display) -> dict:
    """Return a table by sequence length: the widest model of the recipe's depth, and the deepest of its width.

    Raises:
      ConfigError: the sizes of the recipe's model are not known here.
    """
    if loaded.config.model.name != "decoder_lm":
        raise ConfigError(f"--search=model sizes a decoder_lm, not model.name={loaded.config.model.name}")
    rows = []
    for length in sorted({*LENGTHS, loaded.config.train.sequence_length}):
        for what, sizes in (("widest", _widths(loaded.config)), ("deepest", _depths(loaded.config))):
            rows.append({"Sequence": length, "size": what} | _largest(loaded, topology, display, length, sizes))
    return {
        "title": f"the largest model like {loaded.recipe} on {topology.name}, batch and remat as in the recipe",
        "columns": ["Sequence", "size", "Layers", "Width", "Heads", "Parameters", "GiB", "A step", "MFU"],
        "rows": rows,
        "notes": [
            f"each was compiled and fits; it is the largest of at most {TRIES} tries; widths are multiples of a head's "
            f"width and of {topology.chips} chips",
            *report.notes_on(rows),
        ],
    }


def _widths(config) -> list[dict]:
    """Return the recipe at other widths, with the same head width and an MLP in proportion."""
    model = config.model
    grouped = model.num_heads // model.num_kv_heads
    ratio, found = model.mlp_dim / model.embed_dim, []
    for kv_heads in range(1, 257):
        heads = kv_heads * grouped
        width = heads * head_dim(model)
        mlp = max(256, round(ratio * width / 256) * 256)
        found.append(
            {"model.embed_dim": width, "model.num_heads": heads, "model.num_kv_heads": kv_heads, "model.mlp_dim": mlp}
        )
    return found


def _depths(config) -> list[dict]:
    step = max(1, config.model.global_every)
    return [{"model.num_layers": n * step} for n in range(1, 513)]


def _largest(loaded, topology, display, length: int, sizes: list[dict]) -> dict:
    """Return the largest of growing sizes that fits: predict, compile, and correct the prediction."""
    base = {"train.sequence_length": length, "model.max_length": max(length, loaded.config.model.max_length)}
    width = loaded.config.model.embed_dim
    sizes = [size for size in sizes if size.get("model.embed_dim", width) % topology.chips == 0]  # which fsdp may split
    configs = [c for c in (changed(loaded.config, base | size, topology.chips) for size in sizes) if c]
    predicted = [sizing.predict(config) for config in configs]
    factor, best, fitting, too_large = 1.0, None, -1, len(configs)
    for _ in range(TRIES):
        between = range(fitting + 1, too_large)
        hoped = [n for n in between if factor * predicted[n] <= topology.capacity_gib * GIB]
        if not hoped and (best or not between):
            break
        index = hoped[-1] if hoped else between[len(between) // 2]
        compiled = display.compile(configs[index], topology)
        factor = compiled.total_bytes / predicted[index]
        if compiled.fits:
            best, fitting = compiled, index
        else:
            too_large, factor = index, factor * TOO_LARGE
    return report.row(best) if best else {}
