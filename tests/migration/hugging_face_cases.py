# SPDX-License-Identifier: Apache-2.0
"""What tests of the conversion share: import a folder, compute logits of the run, compare two folders."""

import pathlib

import numpy as np

from checkpointing.checkpoints import Checkpoints
from convert import record_of_start
from migration import hugging_face, logits, safetensors_files


def import_run(folder: pathlib.Path, workdir: pathlib.Path):
    """Import a folder; return the configuration of the run."""
    published = hugging_face.Published(folder, workdir)
    published.make_run(record_of_start(published.config, workdir))
    return published.config


def logits_of(config, workdir: pathlib.Path, tokens_BT: np.ndarray) -> np.ndarray:
    """Return the logits of a run's newest checkpoint."""
    run = logits.float32_run(config)
    with Checkpoints(workdir) as checkpoints:
        weights = hugging_face.Saved(checkpoints, checkpoints.newest_or_error())
        return np.stack(list(logits.of_run(run, weights.read, tokens_BT)))


def export(config, workdir: pathlib.Path, folder: pathlib.Path, verify=logits.check_same) -> None:
    """Export a run."""
    hugging_face.export(logits.float32_run(config), workdir, folder, verify)


def tensors(folder: pathlib.Path) -> dict[str, tuple]:
    """Return {name: (type, shape, bytes)} of all tensors of a folder."""
    found = safetensors_files.find(folder).items()
    return {name: (each.dtype, each.shape, each.rows(0, each.shape[0]).tobytes()) for name, each in found}
