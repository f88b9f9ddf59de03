# SPDX-License-Identifier: Apache-2.0
"""Trials of seconds, and whether two studies of the same trials are equal bit for bit."""

import json
import pathlib
from collections.abc import Iterable

import support

TINY = {
    "model.num_layers": 1, "model.embed_dim": 32, "model.num_heads": 2, "model.num_kv_heads": 2, "model.mlp_dim": 64,
    "model.high_cycles": 1, "model.low_cycles": 1, "supervision.max_steps": 3, "train.global_batch": 16,
    "data.puzzle_count": 4, "data.puzzle_augmentations": 0, "data.puzzle_heldout": 20, "optimizer.warmup_steps": 5,
    "logging.tensorboard": False, "logging.report": False,
}  # fmt: skip
FIGURES = ("loss", "gradient_norm", "exact_accuracy", "eval_loss", "eval_exact_accuracy")


def flags(**steps: int) -> list[str]:
    """Return the flags of a tiny trial; `steps` are keys of train, as steps=120."""
    return support.typed(TINY | {f"train.{name}": count for name, count in steps.items()})


def compared(trials: Iterable[pathlib.Path], hit: Iterable[pathlib.Path], database: pathlib.Path, steps: int) -> dict:
    """Return how many trials of a study that was struck ended once, and how many equal the undisturbed ones.

    Args:
      trials, hit: folders of the undisturbed trials, and of the others.
      database: of the others.
      steps: of a finished trial.
    """
    import optuna

    ended = optuna.load_study(study_name="trm-mini", storage=f"sqlite:///{database}").trials
    expected, found = _results(trials, steps), _results(hit, steps)
    return {
        "trials": len(ended),
        "trials_ended_once": sum(trial.state.name == "COMPLETE" for trial in ended),
        "trials_equal_bit_for_bit": sum(found.get(name) == expected[name] for name in expected),
    }


def _results(trials: Iterable[pathlib.Path], steps: int) -> dict[str, object]:
    """Return the figures of every step and the digests of the last checkpoint's arrays, by the folder's name."""
    found = {}
    for folder in trials:
        of_steps = support.lines_of(folder, "train", "eval")
        lines = {f"{line['kind']} {line['step']}": [line.get(name) for name in FIGURES] for line in of_steps}
        files = json.loads((folder / "checkpoints" / str(steps) / "manifest.json").read_text())["files"]
        arrays = {name: digest for name, digest in files.items() if name.count("/") == 2 and name.startswith("state/")}
        assert arrays, "a checkpoint has arrays"
        found[folder.name] = {"lines": lines, "arrays": arrays}
    return found
