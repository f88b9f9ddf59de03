# SPDX-License-Identifier: Apache-2.0
"""The commands of the v4-64 plan. Each is translated to a command of Torus, which is printed and replaces the process.

    python kellen/experiments/run_experiment.py GROUP [--dry-run] [KEY=VALUE ...] [flags of sweep.py run]
    python kellen/experiments/run_experiment.py --config kellen/configs/GROUP.yaml [...]
    python pretrain_jax.py --config-name GROUP[/CONFIGURATION] [KEY=VALUE ...] [flags of train.py]
    python update_experiment_gcs_paths.py

KEY is a key of the TRM reference (epochs, lr, arch.H_cycles), or one of Torus (train.steps). The guide is
docs/coming_from_the_v4_64_plan.md.
"""

import os
import shlex
import sys
from collections import Counter
from typing import NoReturn

from configs.base import KEYS
from configs.errors import ConfigError, did_you_mean, shown
from configs.experiments.trm.exp01_model_scaling import width
from migration import guides
from settings.loading import ROOT
from studies import suites

SUITE, BUCKET = "trm", "gs://sculptor-tpu-experiments/checkpoints"
RENAMED = {  # keys of the reference's configuration, and ours
    "epochs": "train.epochs", "global_batch_size": "train.global_batch", "eval_interval": "evaluation.every_epochs",
    "seed": "train.seed", "lr": "optimizer.learning_rate", "lr_min_ratio": "optimizer.final_fraction",
    "lr_warmup_steps": "optimizer.warmup_steps", "beta1": "optimizer.beta1", "beta2": "optimizer.beta2",
    "weight_decay": "optimizer.weight_decay", "puzzle_emb_lr": "optimizer.table_learning_rate",
    "puzzle_emb_weight_decay": "optimizer.table_weight_decay", "ema": "optimizer.ema_decay",
    "ema_rate": "optimizer.ema_decay", "arch.H_cycles": "model.high_cycles", "arch.L_cycles": "model.low_cycles",
    "arch.L_layers": "model.num_layers", "arch.puzzle_emb_ndim": "model.puzzle_dim",
    "arch.puzzle_emb_len": "model.prefix_length", "arch.pos_encodings": "model.positions",
    "arch.mlp_t": "model.mixer", "arch.forward_dtype": "model.dtype", "arch.halt_max_steps": "supervision.max_steps",
    "arch.halt_exploration_prob": "supervision.exploration", "arch.loss.loss_type": "supervision.loss",
}  # fmt: skip
VALUES = {  # of keys whose values have other names here; None leaves our key as it is
    "ema": {"true": None, "false": "0.0"},
    "arch.mlp_t": {"true": "mlp", "false": "attention"},
    "arch.loss.loss_type": {"stablemax_cross_entropy": "stablemax", "softmax_cross_entropy": "softmax"},
}
WIDTH, HEADS, FOLDER = "arch.hidden_size", "arch.num_heads", "checkpoint_path"  # each means several keys, or a flag
ANSWERED = {  # keys that have no equal here, and what to type
    "data_paths": "data.path=FOLDER, with train.csv and test.csv; the versions of a puzzle are made from these",
    "arch.expansion": "model.mlp_dim=WIDTH; 1536 is an expansion of 4 at a width of 512",
    "checkpoint_every_eval": "train.save_every=STEPS",
    "load_checkpoint": "train.init_from=FOLDER_OF_A_RUN",
}


def start(command: str, words: list[str]) -> NoReturn:
    """Replace this process by the command of Torus that a command of the plan means; exit with 2 for a wrong word."""
    if {"-h", "--help"} & set(words):
        print(__doc__)
        sys.exit(0)
    try:
        arguments = COMMANDS[command](words)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    if not arguments:
        sys.exit(0)
    print("this is:", shlex.join(["python", *arguments]), flush=True)
    os.execv(sys.executable, [sys.executable, str(ROOT / arguments[0]), *arguments[1:]])


def experiment(words: list[str]) -> list[str]:
    """Return the command of run_experiment.py: all trials of a group; ConfigError for a wrong word."""
    file, rest = guides.take(words, "--config")
    group = rest.pop(0) if rest and not rest[0].startswith("-") and "=" not in rest[0] else ""
    if bool(file) == bool(group):
        raise ConfigError("run_experiment.py takes GROUP, as baseline, or --config=kellen/configs/GROUP.yaml; give one")
    flags, keys, folder = _translated(rest)
    if folder:
        raise ConfigError(f"{FOLDER} is of one run; --root=FOLDER has a folder for each configuration of the group")
    return ["sweep.py", "run", group or group_of(file), *flags, *_typed(keys)]


def training(words: list[str]) -> list[str]:
    """Return the command of pretrain_jax.py: one run of a configuration; ConfigError for a wrong word."""
    name, rest = guides.take(words, "--config-name")
    asked, _, configuration = (name or "baseline").removesuffix(".yaml").partition("/")
    study, groups = suites.find(asked)
    configurations = study.groups[groups[0]].configurations
    if len(groups) > 1 or not (configuration or len(configurations) == 1):
        raise ConfigError(
            f"--config-name={shown(name)} has several configurations; add one: {', '.join(configurations)}"
        )
    configuration = configuration or next(iter(configurations))
    if configuration not in configurations:
        raise ConfigError(f"{groups[0]} has no configuration {shown(configuration)} (all: {', '.join(configurations)})")
    flags, keys, folder = _translated(rest)
    keys = study.base.changes | configurations[configuration] | keys
    workdir = folder or f"runs/{groups[0]}/{configuration}"
    return ["train.py", f"--config={study.base.recipe}", f"--workdir={workdir}", *flags, *_typed(keys)]


def folders() -> dict[str, str]:
    """Return {GROUP/CONFIGURATION: folder of its checkpoints} of the whole study, as `sweep.py run --root` has them."""
    study, _ = suites.find(SUITE)
    return {
        f"{group}/{name}": suites.folder(BUCKET, suites.Member(group, name, 0, study.base.recipe, {}, {})) + "/"
        for group in study.counted for name in study.groups[group].configurations
    }  # fmt: skip


def check(found: dict[str, str]) -> None:
    """Raise ConfigError if a folder is missing or that of two configurations."""
    if missing := [name for name, folder in found.items() if not folder.startswith(f"{BUCKET}/") or "//" in folder[5:]]:
        raise ConfigError(f"{missing[0]} has no folder, but {shown(found[missing[0]])}; correct its name")
    folder, count = Counter(found.values()).most_common(1)[0]
    if count > 1:
        raise ConfigError(f"{folder} is the folder of {count} configurations; rename one")


def paths(words: list[str]) -> list[str]:
    """Print and check the folder of every configuration; no command follows."""
    if words:
        raise ConfigError(f"update_experiment_gcs_paths.py takes no word, but got {shown(words[0])!r}")
    found, (study, _) = folders(), suites.find(SUITE)
    check(found)
    print("\n".join(found.values()))
    print(f"{len(found)} configurations in {len(study.counted)} groups: each has a folder, and no two have the same")
    print(f"python sweep.py run {SUITE} --topology=v4-64 --root={BUCKET}")
    print("writes there. Equal configurations are one trial, in the folder of the first of them.")
    return []


def group_of(file: str) -> str:
    """Return the group that a file of kellen/configs/ names; ConfigError if it does not."""
    content = guides.read_file(file, "kellen/configs/baseline.yaml")
    if list(content) != ["group"] or not isinstance(content["group"], str):
        raise ConfigError(f"--config={shown(file)} must hold `group: GROUP` alone; type keys after it, as epochs=100")
    return content["group"]


def _translated(words: list[str]) -> tuple[list[str], dict[str, str], str]:
    """Return flags as they are, {our key: value} of KEY=VALUE words, and the folder of checkpoint_path or ""."""
    flags = [word for word in words if word.startswith("-") or "=" not in word]  # also values after a space
    pairs = [word.lstrip("+").partition("=") for word in words if word not in flags]
    typed, ours = {key: value for key, _, value in pairs}, {}
    folder = typed.pop(FOLDER, None)
    if folder is not None and folder.lower() in ("", "null", "none"):
        raise ConfigError(f"{FOLDER}={folder} is no folder; omit it, or name one, as {BUCKET}/baseline/baseline")
    if WIDTH in typed or HEADS in typed:
        ours |= _sizes(typed.pop(WIDTH, None), typed.pop(HEADS, None))
    for key in sorted(typed, key=lambda key: key == "ema"):  # last, because ema=false wins over ema_rate
        value = _value(key, typed[key])
        ours |= {} if value is None else {RENAMED.get(key, key): value}
    return flags, ours, folder or ""


def _sizes(dim: str | None, heads: str | None) -> dict[str, str]:
    """Return our keys of a width and a number of heads: the reference derives the MLP and the puzzle's embedding."""
    for key, text in ((WIDTH, dim), (HEADS, heads)):
        if text is not None and not (text.isdecimal() and int(text)):
            raise ConfigError(f"{key}={shown(text)} is not a whole number greater than 0")
    keys = {key: str(value) for key, value in width(int(dim or 1), int(heads or 1)).items()}
    asked = [*(("model.num_heads", "model.num_kv_heads") if heads else ())]
    asked += ("model.embed_dim", "model.mlp_dim", "model.puzzle_dim") if dim else ()
    return {key: keys[key] for key in asked}


def _value(key: str, text: str) -> str | None:
    """Return our value of a key; ConfigError for an unknown key, or a value that the key has not."""
    if key in ANSWERED:
        raise ConfigError(f"{shown(key)} is not read here; type {ANSWERED[key]}")
    if key not in RENAMED and key not in KEYS:
        near = did_you_mean(guides.nearest(key, [*RENAMED, WIDTH, HEADS, FOLDER, *KEYS]))
        raise ConfigError(f"{shown(key)} is not a key of the TRM reference or of Torus{near}")
    choices = VALUES.get(key)
    if choices and text.lower() not in choices:
        raise ConfigError(f"{key}={shown(text)} is not one of {', '.join(choices)}")
    return choices[text.lower()] if choices else text


def _typed(keys: dict[str, object]) -> list[str]:
    return [f"--config.{key}={value}" for key, value in keys.items()]


COMMANDS = {"run_experiment": experiment, "pretrain_jax": training, "update_experiment_gcs_paths": paths}
