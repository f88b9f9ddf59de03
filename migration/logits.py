# SPDX-License-Identifier: Apache-2.0
"""Computes the logits of a run's model in float32, with few layers in memory, to check conversions."""

import pathlib
from collections.abc import Callable, Iterator

import jax
import numpy as np

from configs.base import MESH_AXES
from configs.errors import ConfigError
from core import assembly
from files.atomic import writing
from files.numpy_reader import ArrayFileError, map_integers
from migration import hugging_face_reader
from models.decoder_lm import logits_by_layer
from parallelism.mesh import mesh_context
from settings.decoding import dropless

TOLERANCE = 1e-4  # of the largest logit: float32 sums in another order differ by far less, a wrong weight by far more
PROMPTS, LENGTH = 2, 24  # of the tokens that check an export


class Different(ValueError):
    """The exported model computes other logits than the run."""

    exit_status = 1


def float32_run(config) -> assembly.Run:
    """Return the run of a configuration that computes in float32 with reference attention on one device, dropless."""
    config = dropless(config)
    config.model.update(dtype="float32", attention="reference", quantization="none")
    config.meta.learn_rates = False  # step sizes of training are not part of the model
    config.mesh.update(dict.fromkeys(MESH_AXES, 1))
    return assembly.assemble(config, devices=jax.devices()[:1])


def of_run(run: assembly.Run, read: Callable, tokens_BT: np.ndarray) -> Iterator[np.ndarray]:
    """Yield float32 [T, V] for each row of int32 [B, T], a document each; `read` as in models/decoder_lm.py."""
    with mesh_context(run.mesh), jax.default_matmul_precision("highest"):
        for logits_TV in logits_by_layer(run.graph, run.abstract_state.params, read, tokens_BT):
            yield np.asarray(logits_TV)


def check_same(folder: pathlib.Path, run: assembly.Run, weights) -> None:
    """Raise Different unless a second reader of an export computes the run's logits on fixed prompts."""
    vocab_size = run.config.model.vocab_size
    tokens_BT = ((np.arange(PROMPTS * LENGTH) ** 2 * 7919 + 3) % vocab_size).astype(np.int32).reshape(PROMPTS, LENGTH)
    ours = np.stack(list(of_run(run, weights.read, tokens_BT)))
    theirs = hugging_face_reader.logits(folder, tokens_BT)
    difference, largest = np.abs(ours - theirs).max(), np.abs(ours).max()
    if not difference <= TOLERANCE * largest:
        raise Different(
            f"the export computes other logits than the run: they differ by {difference:.3g}, and the largest is "
            f"{largest:.3g}; the export is removed"
        )


def read_tokens(file: pathlib.Path, model) -> np.ndarray:
    """Return int32 [batch, length] from a file; ConfigError for anything else, and for ids outside the vocabulary."""
    try:
        tokens_BT = np.asarray(map_integers(file, 2))
    except OSError as error:
        raise ConfigError(f"--tokens={file}: {error.strerror or error}; name an .npy file") from None
    except ArrayFileError as error:
        raise ConfigError(f"--tokens={error}; write int32 [batch, length] with numpy.save") from None
    if tokens_BT.dtype != np.int32 or not tokens_BT.size:
        found = f"{tokens_BT.dtype} {list(tokens_BT.shape)}"
        raise ConfigError(f"--tokens={file} contains {found}; it must be int32 [batch, length], neither of them 0")
    wrong = tokens_BT[(tokens_BT < 0) | (tokens_BT >= model.vocab_size)]
    if wrong.size:
        raise ConfigError(f"--tokens={file} contains the id {wrong[0]}; ids must be from 0 to {model.vocab_size - 1}")
    if tokens_BT.shape[1] > model.max_length:
        raise ConfigError(
            f"--tokens={file}: rows of {tokens_BT.shape[1]} tokens are longer than model.max_length={model.max_length}"
        )
    return tokens_BT


def write(file: pathlib.Path, shape: tuple[int, ...], rows: Iterator[np.ndarray]) -> None:
    """Write a float32 array row by row to an .npy file, atomically; no memory map, for which a full disk is fatal."""
    with writing(file) as npy:
        np.lib.format.write_array_header_1_0(npy, {"descr": "<f4", "fortran_order": False, "shape": shape})
        for row in rows:
            npy.write(row.astype("<f4").tobytes())
