# SPDX-License-Identifier: Apache-2.0
"""Records the estimated cost of steps in the repository, so that every change of a cost is noticed and explained."""

import dataclasses
import json
import pathlib
import re

from configs import topologies
from rehearsal.compiler import LIBRARIES
from settings import loading, validation
from settings.resolving import Loaded

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
FOLDER = pathlib.Path(__file__).with_name("recorded")
TOLERANCE = 0.02  # a smaller relative change of a figure is not reported
SLICE = re.compile(r"\bv\d\w*-\d+\b")


@dataclasses.dataclass(frozen=True)
class Case:
    """A step whose cost is recorded: a recipe, a topology, and changed configuration keys."""

    name: str
    recipe: str
    topology: str
    changes: dict[str, object] = dataclasses.field(default_factory=dict)

    @property
    def path(self) -> pathlib.Path:
        """The file of its record."""
        return FOLDER / f"{self.name}.json"

    def load(self) -> Loaded:
        """Return its validated configuration."""
        typed = {key: str(value) for key, value in self.changes.items()}
        loaded = loading.load(str(CONFIGS / f"{self.recipe}.py"), self.topology, typed)
        validation.validate(loaded.config, loaded.topology.chips, loaded)
        return loaded


def _long(length: int, fsdp: int, context: int) -> dict:
    """Return the keys for one sequence of `length` tokens for each group of chips along `context`."""
    return {
        "train.sequence_length": length, "model.max_length": length, "mesh.fsdp": fsdp, "mesh.context": context,
        "train.global_batch": fsdp, "model.remat": "attended",
    }  # fmt: skip


FOUR_OF_2048 = {"train.sequence_length": 2048, "train.global_batch": 64}  # 4 a chip on 16 chips, as published figures
ON_HOST = {  # a model that does not fit otherwise
    "train.sequence_length": 2048, "train.global_batch": 32, "model.remat": "full", "train.offload": "optimizer",
}  # fmt: skip
FOUR_OF_32 = FOUR_OF_2048 | {"train.global_batch": 128}
HEADS_SPLIT = {"mesh.data": 4, "mesh.model": 4, "mesh.fsdp": 2, "model.remat": "attention"}
ONE_B = {"train.global_batch": 16, "model.remat": "dots", "train.loss_chunk_tokens": 8192}
LITTLE_KEPT = {"model.remat": "query", "train.loss_chunk_tokens": 8192}
NOTHING_KEPT = {"model.remat": "full"}
ATTENDS = {"model.mixer": "attention", "model.positions": "rope"}
TWO_PARTS, FOUR_PARTS, EIGHT_PARTS = ({"train.gradient_accumulation": parts} for parts in (2, 4, 8))
SMALL = {  # scanned and rematerialised; it compiles in seconds, so that tests can compare it with its record
    "model.remat": "full", "model.vocab_size": 512, "train.sequence_length": 128, "train.global_batch": 64,
    "model.num_layers": 32, "model.embed_dim": 128, "model.num_heads": 2, "model.num_kv_heads": 2, "model.mlp_dim": 256,
}  # fmt: skip
MORE = (
    Case("trm_sudoku_attention_v4-64", "trm/sudoku", "v4-64", ATTENDS),
    Case("tiny_v4-8", "tiny", "v4-8"),
    Case("tiny_remat_v4-8", "tiny", "v4-8", SMALL),
    Case("mixtral_8x7b_v4-64", "mixtral_8x7b", "v4-64", FOUR_OF_2048 | {"train.global_batch": 32} | NOTHING_KEPT),
    Case("deepseek_like_v4-64", "deepseek_like", "v4-64", {"train.global_batch": 64} | NOTHING_KEPT),
    Case("llama_1b_v4-8", "llama_1b", "v4-8", ONE_B),
    Case("llama_1b_v5e-8", "llama_1b", "v5e-8", EIGHT_PARTS | {"model.remat": "dots"}),
    Case("llama_1b_v6e-8", "llama_1b", "v6e-8", TWO_PARTS | {"model.remat": "mlp"}),
    Case("small_v5e-1", "small", "v5e-1"),
    Case("small_v6e-1", "small", "v6e-1"),
    Case("medium_v5e-1", "medium", "v5e-1", EIGHT_PARTS),
    Case("medium_v5e-4", "medium", "v5e-4", TWO_PARTS),
    Case("medium_v6e-1", "medium", "v6e-1", FOUR_PARTS),
    Case("large_v5e-4", "large", "v5e-4", EIGHT_PARTS),
    Case("large_v6e-4", "large", "v6e-4", TWO_PARTS),
    Case("llama3_8b_2048_v4-8", "llama3_8b", "v4-8", ON_HOST),
    Case("llama2_13b_2048_v4-32", "llama2_13b", "v4-32", FOUR_OF_2048 | LITTLE_KEPT),
    Case("llama2_7b_2048_v4-32", "llama2_7b", "v4-32", FOUR_OF_2048),
    Case("llama2_7b_2048_v4-64", "llama2_7b", "v4-64", FOUR_OF_32),
    Case("llama2_7b_2048_2xv4-32", "llama2_7b", "2xv4-32", FOUR_OF_32),
    Case("llama2_7b_4x4x2_v4-64", "llama2_7b", "v4-64", FOUR_OF_32 | HEADS_SPLIT),
    Case("llama2_7b_32k_v4-64", "llama2_7b", "v4-64", _long(32_768, 4, 8)),
    Case("llama2_7b_128k_v4-64", "llama2_7b", "v4-64", _long(131_072, 1, 32)),
)


def cases() -> list[Case]:
    """Return every recipe on the topologies that its docstring names, and more."""
    found = []
    for recipe in loading.recipe_names():
        docstring = (CONFIGS / f"{recipe}.py").read_text().partition('"""')[2].partition('"""')[0]
        names = [name for name in dict.fromkeys(SLICE.findall(docstring)) if name in topologies.SLICES]
        found += [Case(f"{recipe.replace('/', '_')}_{name}", recipe, name) for name in names]
    return [*found, *MORE]


def figures(found: dict) -> dict[str, float]:
    """Return the figures of an estimate that a change must explain, for one chip and one step."""
    kept = {
        "step_seconds": found["step_seconds"],
        "hbm_gib": found["hbm_gib"]["total"],
        "flops_model": found["flops_model"],
        "flops_hardware": found["flops_hardware"],
    }
    for row in found["collectives"]:
        name = f"{row['kind']} over {row['axes']}"
        for what in ("count", "gib"):
            kept[f"{name}: {what}"] = kept.get(f"{name}: {what}", 0) + row[what]
    return {name: value if isinstance(value, int) else float(f"{value:.5g}") for name, value in sorted(kept.items())}


def not_compared(found: dict) -> dict[str, float]:
    """Return further figures that are recorded but not compared: they are small, or follow from the others."""
    memory = found["hbm_gib"]
    kept = {
        "exposed_communication_seconds": found["exposed_communication_seconds"],
        "state_gib": memory["parameters"] + memory["optimizer"] + found["host_gib"],
    }
    return {name: float(f"{value:.5g}") for name, value in kept.items()}


def changes(recorded: dict[str, float], now: dict[str, float]) -> list[str]:
    """Return a line for each figure that differs from its record by more than 2 %."""
    lines = []
    for name in sorted(recorded.keys() | now.keys()):
        before, after = recorded.get(name, 0), now.get(name, 0)
        if abs(after - before) > TOLERANCE * abs(before):
            by = f" ({after / before - 1:+.1%})" if before else ""
            lines.append(f"{name}: {before:g} -> {after:g}{by}")
    return lines


def other_versions(recorded: dict, now: dict[str, str]) -> list[str]:
    """Return a line for each library whose version differs from the recorded one."""
    return [
        f"{name} {recorded['versions'].get(name)} -> {now.get(name)}"
        for name in LIBRARIES
        if recorded["versions"].get(name) != now.get(name)
    ]


def write(path: pathlib.Path, reason: str, found: dict, versions: dict[str, str]) -> None:
    """Record the figures of an estimate and the reason why they changed."""
    path.parent.mkdir(exist_ok=True)
    content = {"reason": reason, "versions": versions, "figures": figures(found), "not_compared": not_compared(found)}
    path.write_text(json.dumps(content, indent=1) + "\n")
