# SPDX-License-Identifier: Apache-2.0
"""Features of a run, each with the keys that switch it on, and what the rules say of each pair of them.

To write the page again after a change: .venv/bin/python -m tests.features > docs/interactions.md
"""

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ml_collections import ConfigDict

from configs import base
from configs.errors import ConfigError
from settings.validation import validate

DEVICES = 8
STEPS, SAVED = 4, 2  # of a run, and the checkpoint in the middle; a ramp ends and a mesh changes on both sides of it
FOLDER = "FOLDER"  # stands for the folder of texts and of other runs
SOURCE = f"{FOLDER}/source"  # stands for a run of the same model

BASE = {  # a decoder whose sizes each mesh divides, on texts
    "mesh.data": -1, "mesh.fsdp": 1, "model.num_layers": 2, "model.embed_dim": 32, "model.num_heads": 4,
    "model.num_kv_heads": 4, "model.mlp_dim": 48, "model.vocab_size": 256, "model.max_length": 32,
    "model.dtype": "float32", "model.layer_loop": "unroll", "train.sequence_length": 32, "train.global_batch": 16,
    "train.steps": STEPS, "train.save_every": SAVED, "train.eval_every": SAVED, "train.log_every": 1,
    "train.gradient_accumulation": 1, "optimizer.warmup_steps": 2, "data.path": f"{FOLDER}/texts/*.txt",
    "data.tokenizer": "byte", "data.holdout_fraction": 0.2, "data.cache_dir": f"{FOLDER}/cache",
    "evaluation.batches": 1, "evaluation.sample_tokens": 0, "checkpoint.keep": STEPS, "logging.tensorboard": False,
    "logging.report": False, "inference.puzzles": 0, "grpo.group_size": 4, "tot.problems": 2,
    "supervision.max_steps": 2,
}  # fmt: skip
EXPERTS = {"model.num_experts": 4}
FROM_RUN = {"train.init_from": SOURCE}
COUNTDOWN = {
    "data.source": "countdown", "data.tokenizer": "numbers", "data.path": "", "train.sequence_length": 48,
    "model.max_length": 64,
}  # fmt: skip
ROLLOUTS = COUNTDOWN | {"data.source": "countdown_rollouts"}
LONGER = {"train.sequence_length": 64, "model.max_length": 64}  # than the marks of a conversation
META = {"model.attention": "reference"}
RECURSIVE = {
    "model.name": "trm", "train.objective": "recursive", "data.source": "sudoku", "data.path": "", "data.tokenizer": "",
    "data.puzzle_size": 4, "data.puzzle_count": 32, "data.puzzle_augmentations": 0, "data.puzzle_heldout": 16,
    "train.sequence_length": 16, "model.max_length": 16, "model.high_cycles": 2, "model.low_cycles": 2,
    "model.puzzle_dim": 16, "model.prefix_length": 1,
}  # fmt: skip

FEATURES: dict[str, dict[str, object]] = {
    # the update
    "EMA": {"optimizer.ema_decay": 0.5},
    "accumulation": {"train.gradient_accumulation": 2},
    "ramp": {
        "batch.ramp": "steps", "batch.first": 8, "batch.increase_step": 3, "batch.increase_factor": 2.0,
        "batch.learning_rate": "sqrt",
    },
    "noise-scale ramp": {
        "batch.ramp": "noise_scale", "batch.first": 8, "batch.increase_step": 1, "batch.increase_factor": 2.0,
    },
    "noise scale": {"batch.noise_scale": True},
    "batch fit": {"batch.fit": "auto", "batch.memory_gib": 1.0, "train.gradient_accumulation": 0},
    "spike guard": {"train.spike_deviations": 3.0},
    "recheck": {"train.recheck_every": 2},
    "offload": {"train.offload": "optimizer"},
    "muon": {"optimizer.name": "muon"},
    "adafactor": {"optimizer.name": "adafactor"},
    "muP": {"model.mup_base_dim": 16},
    "z-loss": {"train.z_loss": 1e-3},
    "float32 sums": {"train.sum_dtype": "float32"},
    # plasticity
    "continual backprop": {
        "plasticity.method": "continual_backprop", "plasticity.rate": 0.1, "plasticity.maturity": 1,
    },
    "ReDo": {"plasticity.method": "redo", "plasticity.every": 3, "plasticity.dormant_below": 0.9},
    "L2 init": {"plasticity.method": "l2_init"},
    "shrink and perturb": {"plasticity.method": "shrink_perturb", "plasticity.every": 3},
    "plasticity measures": {"plasticity.measure": 2},
    # the model
    "experts": EXPERTS,
    "expert capacity": EXPERTS | {"model.expert_capacity": 1.5, "train.balance_loss": 0.01},
    "int8": {"model.quantization": "int8"},
    "sliding window": {"model.sliding_window": 8, "model.global_every": 2},
    "remat": {"model.remat": "full"},
    "scan": {"model.layer_loop": "scan"},
    "dropout": {"model.dropout": 0.1},
    "tied head": {"model.tie_embeddings": True},
    # the mesh
    "FSDP": {"mesh.fsdp": 2},
    "context": {"mesh.context": 2},
    "tensor": {"mesh.model": 2},
    "expert mesh": EXPERTS | {"mesh.expert": 2},
    "slices": {"mesh.dcn_data": 2},
    "mesh change": {"layout.changes": "1: fsdp=8"},
    # the objective
    "LoRA": FROM_RUN | {"lora.rank": 2},
    "distillation": {"train.objective": "distillation", "distillation.teacher": SOURCE},
    "DPO": FROM_RUN
    | LONGER
    | {"train.objective": "dpo", "data.source": "preferences", "data.path": f"{FOLDER}/preferences.jsonl"},
    "GRPO": ROLLOUTS | FROM_RUN | {"train.objective": "grpo", "grpo.updates": 3, "grpo.kl": 0.1},
    "value head": ROLLOUTS | FROM_RUN | {"train.objective": "value_head"},
    "error correction": FROM_RUN | {"train.objective": "error_correction", "error_correction.num_layers": 1},
    "meta text": META
    | {"train.objective": "meta_language_modeling", "meta.method": "first_order_maml", "meta.share": 0.5},
    "meta tasks": META
    | {
        "train.objective": "meta_learning", "model.name": "mlp_regressor", "data.source": "sinusoids",
        "data.tokenizer": "", "data.path": "", "train.sequence_length": 20,
    },
    "classifier": {
        "train.objective": "classification", "model.name": "mlp_classifier", "model.vocab_size": 10, "model.levels": 17,
        "data.source": "labeled", "data.tokenizer": "", "data.path": f"{FOLDER}/labeled.csv",
        "train.sequence_length": 16, "model.max_length": 16,
    },
    "recursive": RECURSIVE | {"inference.trajectories": 2, "inference.puzzles": 8},
    "growing cycles": RECURSIVE
    | {"supervision.first_high_cycles": 1, "supervision.first_low_cycles": 1, "supervision.growth_fraction": 1.0},
    # the data
    "mixture": {"data.mixture": f"0.7 {FOLDER}/texts/1*.txt; 0.3 {FOLDER}/texts/*.txt", "data.path": ""},
    "stream": {"data.stream": f"{FOLDER}/texts/1*.txt:24,{FOLDER}/texts/*.txt:1000", "data.path": ""},
    "chat": LONGER | {"data.source": "chat", "data.path": f"{FOLDER}/chat.jsonl"},
    # checkpoints
    "broadcast restore": {"checkpoint.restore": "broadcast"},
    "per-host folders": {"checkpoint.per_host": True},
    # evaluation
    "chunked evaluation": {"evaluation.chunk_tokens": 16},
    "tasks": {"evaluation.tasks": f"{FOLDER}/questions.jsonl", "evaluation.tasks_every": 2},
    "causality": {"causality.prompt": "1 2 3", "causality.corrupt": "2 2 3", "causality.every": 2},
    "tree of thoughts": COUNTDOWN | {"tot.use_tot": True},
    "int8 cache": {"inference.cache_dtype": "int8"},
}  # fmt: skip
Pair = tuple[str, str]

PAGE = """\
# Which features go together

Each pair of {0} features, {1:,} in all, as the rules of `settings/` judge it for a run on {devices} devices: {2:,} are
accepted, {3:,} are refused, and {4:,} set one key to two values. A refused pair ends a command with
[one line](#refused) and status 2 before a device is touched. `benchmarks/interactions.py` trains each accepted pair,
many in one run: it resumes from the middle, and compares steps, evaluations and the last state with those of the run
that was not stopped, bit for bit. `tests/test_interactions.py` trains some of them.

`.` accepted, `x` refused, `=` one key. Columns have the numbers of the rows.

```
{matrix}
```

The page is generated: `.venv/bin/python -m tests.features > docs/interactions.md`.

## Features

The keys that switch a feature on in these runs. A refusal can depend on the values, such as sizes and meshes.
`FOLDER` is the folder of the data and of other runs.

{keys}

## Refused

{refused}

## One key

{of_one_key}
"""


def pairs(names: Iterable[str] = FEATURES) -> list[Pair]:
    """Return all pairs of features, in the order of the table."""
    return list(itertools.combinations(names, 2))


def keys_of(names: Iterable[str]) -> dict[str, object]:
    """Return the keys of the small run and of these features."""
    return functools.reduce(operator.or_, (FEATURES[name] for name in names), BASE)


def shared_key(pair: Pair) -> str:
    """Return the first key that two features set to different values; "" if there is none."""
    first, second = (FEATURES[name] for name in pair)
    return next((key for key in first if key in second and first[key] != second[key]), "")


def refusal(names: Iterable[str]) -> str:
    """Return the line that refuses these features together; "" if the rules accept them."""
    config = _base_config().copy_and_resolve_references()  # in half the time that a new one takes
    config.update_from_flattened_dict(keys_of(names))
    try:
        validate(config, DEVICES)
    except ConfigError as error:
        return str(error)
    return ""


@functools.cache
def _base_config() -> ConfigDict:
    return base.get_config()


class Verdicts(NamedTuple):
    """What the rules say of all pairs: those with one key, by the key; those refused, by the line; the others."""

    of_one_key: dict[str, list[Pair]]
    refused: dict[str, list[Pair]]
    accepted: list[Pair]


@functools.cache
def verdicts() -> Verdicts:
    """Return the verdict on every pair."""
    found = Verdicts({}, {}, [])
    for pair in pairs():
        if key := shared_key(pair):
            found.of_one_key.setdefault(key, []).append(pair)
        elif line := refusal(pair):
            found.refused.setdefault(line, []).append(pair)
        else:
            found.accepted.append(pair)
    return found


def sets_of(accepted: Iterable[Pair]) -> Iterator[tuple[str, ...]]:
    """Yield sets of features that the rules accept together, until each pair was in one of them."""
    left, fitting = dict.fromkeys(accepted), set(accepted)
    while left:
        chosen = _set(left, fitting)
        left = {pair: None for pair in left if pair not in set(pairs(chosen))}
        yield chosen


def _set(left: dict[Pair, None], fitting: set[Pair]) -> tuple[str, ...]:
    """Return the first pair that is left, with the features that bring most such pairs into the set."""
    chosen, others = list(next(iter(left))), set(FEATURES)
    while others := {name for name in others if all(ordered(name, one) in fitting for one in chosen)}:
        gains = {name: sum(ordered(name, one) in left for one in chosen) for name in others}
        best = max(others, key=lambda name: (gains[name], -_places()[name]))
        if not gains[best]:
            break
        others.remove(best)
        if not refusal([*chosen, best]):
            chosen.append(best)
    return tuple(sorted(chosen, key=_places().get))


def ordered(one: str, other: str) -> Pair:
    """Return two features as a pair, in the order of the table."""
    return tuple(sorted((one, other), key=_places().get))


@functools.cache
def _places() -> dict[str, int]:
    return {name: place for place, name in enumerate(FEATURES)}


def page() -> str:
    """Return docs/interactions.md."""
    found = verdicts()
    counts = [len(FEATURES), len(pairs()), len(found.accepted)]
    counts += [sum(map(len, table.values())) for table in (found.refused, found.of_one_key)]
    keys = [[f"{name}", " ".join(f"`{key}={value}`" for key, value in FEATURES[name].items())] for name in FEATURES]
    refused = [[f"`{line}`", _listed(said)] for line, said in found.refused.items()]
    of_one_key = [[f"`{key}`", _listed(said)] for key, said in found.of_one_key.items()]
    return PAGE.format(
        *counts, devices=DEVICES, matrix="\n".join(_matrix(found)), keys=_table("feature", "keys", keys),
        refused=_table("line", "pairs", refused), of_one_key=_table("key", "pairs", of_one_key),
    )  # fmt: skip


def _matrix(found: Verdicts) -> list[str]:
    """Return a line for each feature: its number, its name, and the verdict on it with each feature before it."""
    marks = dict.fromkeys(found.accepted, ".")
    for mark, table in (("x", found.refused), ("=", found.of_one_key)):
        marks |= {pair: mark for said in table.values() for pair in said}
    names = list(FEATURES)
    width = max(map(len, names))
    rows = [
        f"{number:2} {name:{width}} {''.join(marks[other, name] for other in names[: number - 1])}".rstrip()
        for number, name in enumerate(names, start=1)
    ]
    numbers = range(1, len(names))
    heads = ("".join(str(n // 10) if n % 10 == 0 else " " for n in numbers), "".join(str(n % 10) for n in numbers))
    return [*(" " * (width + 4) + head.rstrip() for head in heads), *rows]


def _listed(said: list[Pair]) -> str:
    return "; ".join(f"{first} + {second}" for first, second in said)


def _table(left: str, right: str, rows: list[list[str]]) -> str:
    return "\n".join([f"| {left} | {right} |", "|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


if __name__ == "__main__":
    print(page(), end="")
