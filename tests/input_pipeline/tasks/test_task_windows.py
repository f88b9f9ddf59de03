# SPDX-License-Identifier: Apache-2.0
"""Generated tasks of meta-learning: functions of seed, stream and number, and what they say that they are."""

import numpy as np
import pytest

from input_pipeline.tasks import task_windows
from input_pipeline.tasks.task_windows import Glyphs, LinearMaps, Sinusoids

KINDS = {
    "sinusoids": lambda seed, stream: Sinusoids(seed, stream),
    "linear_maps": lambda seed, stream: LinearMaps(seed, stream, 3),
    "glyphs": lambda seed, stream: Glyphs(seed, stream, 4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_is_a_function_of_seed_stream_and_number(kind):
    windows, length = KINDS[kind](3, "train"), 9
    batch, again = windows.read(np.array([5, 0, 5]), length), KINDS[kind](3, "train").read(np.array([5]), length)
    assert batch["inputs"].shape == (3, length, windows.input_dim) and batch["targets"].shape == (3, length)
    assert batch["tasks"].tolist() == [6, 1, 6] and windows.fills["tasks"] == 0
    for name, values in batch.items():
        assert values.dtype == np.int32
        assert np.array_equal(values[0], values[2]) and np.array_equal(values[:1], again[name])
    for other in (KINDS[kind](4, "train"), KINDS[kind](3, "heldout")):
        assert not np.array_equal(other.read(np.array([5]), length)["inputs"], again["inputs"])
    assert windows.read(np.zeros(0, np.int64), length)["inputs"].shape == (0, length, windows.input_dim)


def test_sinusoids_have_the_amplitudes_and_phases_of_the_paper():
    batch = Sinusoids(0, "train").read(np.arange(300), 12)
    x, y = batch["inputs"].view(np.float32)[..., 0].astype(float), batch["targets"].view(np.float32).astype(float)
    basis = np.stack([np.sin(x), np.cos(x)], axis=-1)
    found = np.stack([np.linalg.lstsq(b, t, rcond=None)[0] for b, t in zip(basis, y, strict=True)])
    np.testing.assert_allclose((basis * found[:, None]).sum(-1), y, atol=1e-4)
    amplitude, phase = np.hypot(*found.T), np.arctan2(-found[:, 1], found[:, 0])
    for values, low, high in ((amplitude, 0.1, 5), (phase, 0, np.pi), (x, -5, 5)):
        spread = high - low
        assert low - 1e-3 < values.min() < low + 0.05 * spread and high - 0.05 * spread < values.max() < high + 1e-3


def test_linear_maps_are_linear_with_normal_inputs_and_weights():
    batch = LinearMaps(0, "train", 3).read(np.arange(500), 8)
    x, y = batch["inputs"].view(np.float32).astype(float), batch["targets"].view(np.float32).astype(float)
    weights = np.stack([np.linalg.lstsq(a, b, rcond=None)[0] for a, b in zip(x, y, strict=True)])
    np.testing.assert_allclose((x * weights[:, None]).sum(-1), y, atol=1e-3)
    for numbers in (x, weights):
        assert abs(numbers.mean()) < 0.1 and numbers.std() == pytest.approx(1, abs=0.05)


def test_glyphs_have_one_image_of_each_class_first_and_held_out_classes_are_unseen():
    windows = Glyphs(0, "heldout", 5)
    batch = windows.read(np.arange(20), 10)
    pixels = batch["inputs"].view(np.float32)
    assert (batch["targets"] == np.arange(10) % 5).all() and pixels.min() >= 0 and 0.9 < pixels.max() <= 1
    assert windows.lines.shape == (50, task_windows.STROKES, 2, 2)
    train = {tuple(lines.ravel()) for lines in Glyphs(0, "train", 5).lines}
    assert len(train) == 200 and not train & {tuple(lines.ravel()) for lines in windows.lines}
    still = [task_windows.drawn(windows.lines[:3], jitter) for jitter in (np.zeros((3, 4)), np.ones((3, 4)))]
    assert np.abs(still[0] - still[1]).max() > 0.5
