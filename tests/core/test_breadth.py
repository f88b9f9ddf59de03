# SPDX-License-Identifier: Apache-2.0
"""Accuracy by depth and breadth is that of the answers, the same on one and on eight devices, and is printed."""

import jax
import numpy as np
import pytest

from configs.trm import sudoku_mini
from core import assembly
from core.evaluations import breadth
from objectives import breadth as exploring
from objectives.breadth import Breadth
from objectives.recursive import IGNORED
from parallelism.mesh import mesh_context
from puzzles import choosing
from tests.support import random_weights

ROWS, TRAJECTORIES, STEPS = 8, 4, 2


def config(devices: int = 1):
    config = sudoku_mini.get_config()
    config.model.update(num_layers=1, embed_dim=16, mlp_dim=24, num_heads=2, num_kv_heads=2, dtype="float32")
    config.model.update(high_cycles=1, low_cycles=1)
    config.train.update(steps=2, global_batch=ROWS * TRAJECTORIES)
    config.mesh.data = devices
    config.supervision.max_steps = STEPS
    config.inference.update(trajectories=TRAJECTORIES, noise=0.5)
    return config


@pytest.fixture(scope="module")
def runs():
    return [assembly.assemble(config(count), devices=jax.devices()[:count]) for count in (1, 8)]


def batch_of(run) -> dict:
    """Return puzzles labelled with the first trajectory's answers; of the last two rows one is wrong, one padding."""
    rng = np.random.default_rng(0)
    inputs = rng.integers(1, 6, (ROWS, 16)).astype(np.int32)
    blank = {"inputs": inputs, "labels": inputs, "puzzle_identifiers": np.zeros(ROWS, np.int32)}
    labels, _ = jax.jit(lambda params: run.objective.predict(run.model(params), blank))(weights(run))
    labels = np.array(labels)
    labels[-2] = 1 + (labels[-2] + 1) % 5
    labels[-1] = IGNORED
    labels[0, 3] = IGNORED  # a cell without a label is not wrong
    return blank | {"labels": labels}


def weights(run):
    return random_weights(run.abstract_state.params, spread=0.1)


def test_solved_puzzles_are_counted_for_each_depth_and_breadth(runs):
    run = runs[0]
    with mesh_context(run.mesh):
        batch = batch_of(run)
        counts = breadth.measuring(run, exploring.of_config(run.config))(weights(run), batch, 0)
    counts = {name: int(count) for name, count in counts.items()}
    assert counts["puzzles"] == ROWS - 1, "without padding"
    assert counts[f"alone/{STEPS}x1"] == ROWS - 2 >= counts["alone/1x1"]
    ways = {name.split("/")[0] for name in counts} - {"puzzles"}
    assert ways == {"alone", "oracle", *choosing.CHOICES}
    assert counts[f"oracle/{STEPS}x{TRAJECTORIES}"] == 0, "a random answer is not a Sudoku, whatever the label"


def test_eight_devices_find_what_one_finds(runs):
    """A puzzle is an exception: rounding may change its chosen answer."""
    with mesh_context(runs[0].mesh):
        batch = jax.device_get(batch_of(runs[0]))
    found = [_counts(run, batch) for run in runs]
    assert found[0].keys() == found[1].keys()
    assert all(abs(int(one) - int(found[1][name])) <= 1 for name, one in found[0].items())


def _counts(run, batch: dict) -> dict:
    spec = run.batch_sharding.spec
    with mesh_context(run.mesh):
        placed = {
            name: jax.device_put(
                rows, jax.sharding.NamedSharding(run.mesh, jax.sharding.PartitionSpec(*spec[: rows.ndim]))
            )
            for name, rows in batch.items()
        }
        measure = breadth.measuring(run, exploring.of_config(run.config))
        return jax.device_get(measure(weights(run), placed, 0))


def test_trajectories_take_the_place_of_rows(runs):
    assert breadth.rows_at_once(runs[0], TRAJECTORIES) == ROWS
    assert breadth.rows_at_once(runs[1], 1000) == 8, "one for each device at least"


def test_the_table_has_a_line_for_each_depth():
    how = Breadth(4, 3, 0.5)
    names = [f"alone/{depth}x1" for depth in (1, 2, 3)]
    names += [f"{way}/{d}x{w}" for way in (*choosing.CHOICES, "oracle") for d in (1, 2, 3) for w in (2, 4)]
    lines = breadth.table(dict.fromkeys(names, 0.5), how, "vote", "mlp mixer, 2 layers, 7 held-out puzzles")
    assert lines[0] == "accuracy by depth: mlp mixer, 2 layers, 7 held-out puzzles; 4 trajectories, noise 0.5"
    assert lines[1].split() == ["steps", "alone", *choosing.CHOICES, "oracle"]
    assert [line.split()[0] for line in lines[2:5]] == ["1", "2", "3"]
    assert lines[5:7] == [
        "accuracy by depth and number of trajectories, chosen by vote:",
        breadth._row("steps", [1, 2, 4]),
    ]
    alone = breadth.table(dict.fromkeys(names[:3], 0.5), Breadth(1, 3), "vote", "title")
    assert len(alone) == 5 and alone[1].split() == ["steps", "alone"]


def test_only_recursive_runs_on_a_corpus_are_measured():
    assert breadth.make(config(), None) is None
    off = config()
    off.inference.puzzles = 0
    assert breadth.make(off, object()) is None
    assert isinstance(breadth.make(config(), object()), breadth.DepthAndBreadth)
