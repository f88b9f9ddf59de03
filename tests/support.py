# SPDX-License-Identifier: Apache-2.0
"""What tests share: tolerances, tiny models and packed batches."""

import contextlib
import functools
import importlib
import os
import pathlib
import socket
import types
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import base
from models import decoder_lm
from parallelism.mesh import make_mesh
from reporting.page_parts import FINE, STYLE, WIDE
from settings import loading

ROOT = pathlib.Path(__file__).resolve().parent.parent

FIXTURES = pathlib.Path(os.environ.get("TRM_FIXTURES") or ROOT / "tests" / "fixtures")  # recorded from the reference

RECIPES = loading.recipe_names()

LEFT_OUT = pytest.StashKey[set[str]]()  # the slow tests that a session was asked to leave out; from tests/conftest.py

# Largest relative L2 error of one array, by the type that it was computed in. Never loosened together with the code.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


@contextlib.contextmanager
def benchmark(name: str) -> Iterator[types.ModuleType]:
    """Yield a module of benchmarks/, imported as if it had been started without arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        patch.setattr("sys.argv", [""])
        yield importlib.import_module(name)


def relative_error(actual, expected) -> float:
    """Return the L2 norm of the difference over that of `expected`."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30))


def assert_close(actual, expected, dtype="float32") -> None:
    """Assert that trees of arrays agree, leaf by leaf, as well as arithmetic in `dtype` lets them."""
    actual, tree = jax.tree_util.tree_flatten_with_path(actual)
    expected, expected_tree = jax.tree.flatten(expected)
    assert tree == expected_tree, f"{tree} is not {expected_tree}"
    errors = {
        jax.tree_util.keystr(path): relative_error(leaf, wanted)
        for (path, leaf), wanted in zip(actual, expected, strict=True)
    }
    limit = TOLERANCE[jnp.dtype(dtype).name]
    assert all(error <= limit for error in errors.values()), f"relative errors over {limit}: {errors}"


@contextlib.contextmanager
def on_one_device() -> Iterator[None]:
    """Train as on a machine of one device: programs without collectives compile in a fraction of the time."""
    devices = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda: devices)
        yield


def one_device_mesh() -> jax.sharding.Mesh:
    """Return a mesh of the first device with all the axes of a run."""
    return make_mesh(dict.fromkeys(base.MESH_AXES, 1), jax.devices()[:1])


def model_config(**changes):
    """Return a `model` section small enough for a test, with a different size for every letter."""
    config = base.get_config().model
    config.update(
        num_layers=3, embed_dim=20, num_heads=6, num_kv_heads=2, head_dim=8, mlp_dim=28, vocab_size=37,
        max_length=64, dtype="float32",
    )  # fmt: skip
    config.update(changes)
    return config


def make_model(config, *, dtype=jnp.float32, scan: bool = True):
    """Return (graph, params) of a decoder, with random weights large enough for every part to matter.

    The weights are from numpy, which compiles nothing, and the layers are scanned, which compiles less.
    """
    model = nnx.eval_shape(lambda: decoder_lm.make(config, dtype=dtype, scan=scan, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    return graph, random_weights(nnx.to_pure_dict(state))


def counting_model(vocab_size: int, embed_dim: int):
    """Return a model that continues ... 3 4 5 ...: its blocks add nothing and its head looks for the next number."""
    graph, params = make_model(model_config(vocab_size=vocab_size, embed_dim=embed_dim))
    params = jax.tree.map(np.copy, params)
    params["stack"]["blocks"]["attention"]["out"][:] = 0
    params["stack"]["blocks"]["mlp"]["down"][:] = 0
    params["embed"]["embedding"] = np.eye(vocab_size, embed_dim, dtype=np.float32)
    params["head"]["kernel"] = np.roll(np.eye(vocab_size, embed_dim, dtype=np.float32), 1, axis=0).T.copy()
    return graph, params


def random_weights(params: dict, seed: int = 0, spread: float = 0.3) -> dict:
    """Return float32 arrays in place of abstract parameters: norm scales around 1, everything else around 0."""
    rng = np.random.default_rng(seed)

    def draw(path, weight):
        return ((path[-1].key == "scale") + spread * rng.standard_normal(weight.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, params)


@functools.partial(jax.jit, static_argnames="graph")
def forward(graph, params, batch: dict):
    """Return the float32 logits [B, T, V] of a batch."""
    model = nnx.merge(graph, params)
    stream, _ = model(batch["tokens"], batch["positions"], batch["segments"])
    return model.logits(stream)


def packed_batch(rows: list[list[int]], length: int, vocab_size: int, seed: int = 0) -> dict:
    """Return random documents of these lengths, packed row by row; what is left of a row is padding."""
    rng = np.random.default_rng(seed)
    batch = {name: np.zeros((len(rows), length), np.int32) for name in ("tokens", "targets", "segments", "positions")}
    for row, sizes in enumerate(rows):
        start = 0
        for segment, size in enumerate(sizes, start=1):
            document, where = rng.integers(1, vocab_size, size + 1), (row, slice(start, start + size))
            batch["tokens"][where], batch["targets"][where] = document[:-1], document[1:]
            batch["segments"][where], batch["positions"][where] = segment, np.arange(size)
            start += size
    return batch


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """Collect the seconds of each program that is compiled in the block, or loaded from the compilation cache."""
    found, is_open = [], True

    def listen(event: str, seconds: float, **unused) -> None:
        if is_open and event == "/jax/core/compile/backend_compile_duration":
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)  # a listener cannot be removed
    yield found
    is_open = False


def drawn(draw, shown, height: float, width: float = WIDE):
    """Return the figure of a plot in the style of a page; assert that nothing is outside of it."""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(width, height), dpi=FINE)
        draw(shown, figure, {})
        box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
    return figure


def write_sums(folder, count: int) -> None:
    """Make a folder of `count` documents with different texts."""
    folder.mkdir()
    for index in range(count):
        words = " ".join(f"{number * (index + 3)} is {number} times {index + 3};" for number in range(60))
        (folder / f"{index}.txt").write_text(words)


def free_port() -> int:
    """Return a port of this machine on which no program listens."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
