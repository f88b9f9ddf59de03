# SPDX-License-Identifier: Apache-2.0
"""The commands of the v4-64 plan. Each is translated to a command of Torus, which is printed and replaces the process.

Words KEY=VALUE are keys of the TRM reference (epochs, lr, arch.H_cycles) or of Torus (train.steps); flags stay as they
are. docs/coming_from_the_v4_64_plan.md has the commands.
"""

import os
import shlex
import sys
from typing import NoReturn

from configs.errors import ConfigError, shown
from configs.experiments.trm.exp01_model_scaling import width
from core import ending
from migration import guides
from settings.loading import ROOT
from studies import suites

BUCKET = "gs://sculptor-tpu-experiments/checkpoints"
WIDTH, HEADS, FOLDER = "arch.hidden_size", "arch.num_heads", "checkpoint_path"  # each means several keys, or a flag
KEYS = guides.Keys(  # of the reference's configuration
    renamed={
        "epochs": "train.epochs", "global_batch_size": "train.global_batch", "eval_interval": "evaluation.every_epochs",
        "seed": "train.seed", "lr": "optimizer.learning_rate", "lr_min_ratio": "optimizer.final_fraction",
        "lr_warmup_steps": "optimizer.warmup_steps", "beta1": "optimizer.beta1", "beta2": "optimizer.beta2",
        "weight_decay": "optimizer.weight_decay", "puzzle_emb_lr": "optimizer.table_learning_rate",
        "puzzle_emb_weight_decay": "optimizer.table_weight_decay", "ema": "optimizer.ema_decay",
        "ema_rate": "optimizer.ema_decay", "arch.H_cycles": "model.high_cycles", "arch.L_cycles": "model.low_cycles",
        "arch.L_layers": "model.num_layers", "arch.puzzle_emb_ndim": "model.puzzle_dim",
        "arch.puzzle_emb_len": "model.prefix_length", "arch.pos_encodings": "model.positions",
        "arch.mlp_t": "model.mixer", "arch.forward_dtype": "model.dtype",
        "arch.halt_max_steps": "supervision.max_steps", "arch.halt_exploration_prob": "supervision.exploration",
        "arch.loss.loss_type": "supervision.loss",
    },
    own={WIDTH: 512, HEADS: 8, FOLDER: ""},
    fixed={  # no text is None, so these are always refused
        "data_paths": (None, "type data.path=FOLDER, with train.csv and test.csv; a puzzle's versions are made of it"),
        "arch.expansion": (None, "type model.mlp_dim=WIDTH; 1536 is an expansion of 4 at a width of 512"),
        "checkpoint_every_eval": (None, "type train.save_every=STEPS"),
        "load_checkpoint": (None, "type train.init_from=FOLDER_OF_A_RUN"),
    },
)  # fmt: skip
VALUES = {  # of keys whose values have other names here; None leaves our key as it is
    "ema": {"true": None, "false": "0.0"},
    "arch.mlp_t": {"true": "mlp", "false": "attention"},
    "arch.loss.loss_type": {"stablemax_cross_entropy": "stablemax", "softmax_cross_entropy": "softmax"},
}


def start(command: str) -> NoReturn:
    """Replace this process by the command of Torus that a command of the plan means."""
    ending.install()
    arguments = COMMANDS[command](sys.argv[1:])
    print("this is:", shlex.join(["python", *arguments]), flush=True)
    os.execv(sys.executable, [sys.executable, str(ROOT / arguments[0]), *arguments[1:]])


def experiment(words: list[str]) -> list[str]:
    """Return the command of run_experiment.py: all trials of a group; ConfigError for a wrong word."""
    file, rest = guides.take(words, "--config")
    group = rest.pop(0) if rest and not rest[0].startswith("-") and "=" not in rest[0] else ""
    if bool(file) == bool(group):
        raise ConfigError("run_experiment.py takes GROUP, as baseline, or --config=kellen/configs/GROUP.yaml; give one")
    flags, keys = _translated(rest)
    if FOLDER in keys:
        raise ConfigError(f"{FOLDER} is of one run; --root=FOLDER has a folder for each configuration of the group")
    return ["sweep.py", "run", group or group_of(file), *flags, *_typed(keys)]


def training(words: list[str]) -> list[str]:
    """Return the command of pretrain_jax.py: one run of a configuration; ConfigError for a wrong word."""
    name, rest = guides.take(words, "--config-name")
    asked, _, configuration = (name or "baseline").removesuffix(".yaml").partition("/")
    study, groups = suites.find(asked)
    known = study.groups[groups[0]].configurations
    configuration = configuration or (next(iter(known)) if len(known) == 1 else "")
    if len(groups) > 1 or configuration not in known:
        what = f"has no configuration {shown(configuration)}" if configuration else "names several runs"
        choices = f"{groups[0]}/NAME: {', '.join(known)}" if len(groups) == 1 else f"GROUP/NAME: {', '.join(groups)}"
        raise ConfigError(f"--config-name={shown(name)} {what}; choose one of {choices}")
    flags, keys = _translated(rest)
    workdir = keys.pop(FOLDER, f"runs/{groups[0]}/{configuration}")
    keys = study.base.changes | known[configuration] | keys
    return ["train.py", f"--config={study.base.recipe}", f"--workdir={workdir}", *flags, *_typed(keys)]


def folders(words: list[str]) -> list[str]:
    """Return the command of update_experiment_gcs_paths.py, which lists and checks the folder of each configuration."""
    return ["sweep.py", "folders", "trm", f"--root={BUCKET}", *words]


def group_of(file: str) -> str:
    """Return the group that a file of kellen/configs/ names; ConfigError if it does not."""
    content = guides.read_file(file, "kellen/configs/baseline.yaml")
    if list(content) != ["group"] or not isinstance(content["group"], str):
        raise ConfigError(f"--config={shown(file)} must hold `group: GROUP` alone; type keys after it, as epochs=100")
    return content["group"]


def _translated(words: list[str]) -> tuple[list[str], dict[str, object]]:
    """Return flags as they are, and {our key: value} of KEY=VALUE words; FOLDER stays."""
    flags = [word for word in words if word.startswith("-") or "=" not in word]  # also values after a space
    typed = dict(word.lstrip("+").split("=", 1) for word in words if word not in flags)
    if typed.get(FOLDER, "a folder").lower() in ("", "null", "none"):
        raise ConfigError(
            f"{FOLDER}={typed[FOLDER]} is not a folder; omit it, or name one like {BUCKET}/baseline/baseline"
        )
    ours = {}
    for key in sorted(typed, key=lambda key: (key not in (WIDTH, HEADS), key == "ema")):  # ema=false wins over ema_rate
        ours |= _ours(key, typed[key])
    return flags, ours


def _ours(key: str, text: str) -> dict[str, object]:
    """Return our keys of one of the reference; ConfigError if it is unknown, or cannot have this value."""
    KEYS.check(key, text, "the TRM reference")
    if key in (WIDTH, HEADS):  # the reference derives the MLP and the puzzle's embedding from the width
        size = KEYS.read({key: text}, "the TRM reference")[key]
        return {ours: value for ours, value in width(size, size).items() if ("heads" in ours) == (key == HEADS)}
    choices = VALUES.get(key, {text.lower(): text})
    if text.lower() not in choices:
        raise ConfigError(f"{key}={shown(text)} is not one of {', '.join(choices)}")
    value = choices[text.lower()]
    return {} if value is None else {KEYS.renamed.get(key, key): value}


def _typed(keys: dict[str, object]) -> list[str]:
    return [f"--config.{key}={value}" for key, value in keys.items()]


COMMANDS = {"run_experiment": experiment, "pretrain_jax": training, "update_experiment_gcs_paths": folders}
