# SPDX-License-Identifier: Apache-2.0
"""Windows that are small learning tasks, made at random: functions to fit, and classes of drawn glyphs.

A window is a task, a pure function of (seed, stream, number). Training and held-out tasks share no number, and glyphs
share no class. Numbers are float32 whose bits are stored as int32, since batches have integers alone.
"""

import numpy as np

from input_pipeline.cache import digest_of_json
from input_pipeline.order import MASK, mix
from input_pipeline.tasks.hashes import stream_key
from input_pipeline.windows import Windows

EXAMPLES = {"train": 1 << 26, "heldout": 1 << 13}  # by stream
GLYPH_SIDE, STROKES, STROKE_WIDTH = 14, 3, 0.06  # pixels; lines of a class; deviation of the ink, as part of the side
CLASSES = {"train": (0, 200), "heldout": (200, 250)}  # first class of each stream, and the one after its last
ROTATION, SCALE, SHIFT = 0.5, 0.25, 0.15  # largest jitter: radians, part of the size, part of the side


class TaskWindows(Windows):
    """The base of generated tasks; a subclass draws their examples. Both streams share the digest."""

    fills = dict.fromkeys(("inputs", "targets", "tasks"), 0)  # task 0 is padding
    batch_exceeds_pass = True
    input_dim = 1

    def __init__(self, seed: int, stream: str, **facts: int):
        self.stream, self.num_tokens, self.seed = stream, EXAMPLES[stream], seed
        self.digest = digest_of_json([type(self).__name__, seed, facts])
        self._key = stream_key(seed, f"{type(self).__name__} {stream}")

    def read(self, indices: np.ndarray, sequence_length: int) -> dict[str, np.ndarray]:
        """Return tasks: int32 `inputs` [n, T, input_dim] and `targets` [n, T], and `tasks` [n], numbers from 1."""
        indices = np.asarray(indices, np.int64)
        inputs, targets = self.draw(mix(indices.astype(np.uint64)) ^ self._key, sequence_length)
        targets = targets if targets.dtype == np.int32 else targets.astype(np.float32).view(np.int32)
        return {
            "inputs": inputs.astype(np.float32).view(np.int32),
            "targets": targets,
            "tasks": (1 + indices).astype(np.int32),
        }

    def draw(self, keys: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs [n, length, input_dim] and targets [n, length] (numbers, or int32 classes) of n tasks."""
        raise NotImplementedError


class Sinusoids(TaskWindows):
    """y = A sin(x - p), A in [0.1, 5], p in [0, pi], x in [-5, 5] (arXiv:1703.03400, section 5.1)."""

    def draw(self, keys, length):
        """Return x and y."""
        draws = uniform(keys, 2 + length)
        amplitude, phase, x = 0.1 + 4.9 * draws[:, :1], np.pi * draws[:, 1:2], 10 * draws[:, 2:] - 5
        return x[..., None], amplitude * np.sin(x - phase)


class LinearMaps(TaskWindows):
    """y = w . x, with w and x of independent normal numbers (arXiv:2208.01066, section 3)."""

    def __init__(self, seed: int, stream: str, dim: int):
        super().__init__(seed, stream, dim=dim)
        self.input_dim = dim

    def draw(self, keys, length):
        """Return x and y."""
        numbers = normal(keys, (1 + length) * self.input_dim).reshape(len(keys), 1 + length, self.input_dim)
        weights, x = numbers[:, :1], numbers[:, 1:]
        return x, (weights * x).sum(axis=-1)


class Glyphs(TaskWindows):
    """Images of `ways` classes; example i of a task has class i modulo `ways`, so the first ones have one of each.

    A class is three random lines. An image is its lines, rotated, scaled and shifted at random, drawn with soft ink on
    14 x 14 pixels in [0, 1].
    """

    input_dim = GLYPH_SIDE**2

    def __init__(self, seed: int, stream: str, ways: int):
        super().__init__(seed, stream, ways=ways)
        self.ways = ways
        first, last = CLASSES[stream]
        ends = uniform(mix(np.arange(first, last, dtype=np.uint64)) ^ mix([seed & MASK]), 4 * STROKES)
        self.lines = 0.7 * ends.reshape(last - first, STROKES, 2, 2) - 0.35  # from the middle, as parts of the side

    def draw(self, keys, length):
        """Return pixels and classes."""
        order = np.argsort(uniform(keys, len(self.lines)), axis=1)[:, : self.ways]
        targets = np.broadcast_to(np.arange(length, dtype=np.int32) % self.ways, (len(keys), length))
        lines = self.lines[np.take_along_axis(order, targets, axis=1)]
        jitter = 2 * uniform(mix(keys), 4 * length).reshape(len(keys), length, 4) - 1
        return drawn(lines, jitter), targets.copy()


def drawn(lines: np.ndarray, jitter: np.ndarray) -> np.ndarray:
    """Return pixels [..., GLYPH_SIDE^2] of lines [..., STROKES, 2 ends, 2] with jitter [..., 4] in [-1, 1]."""
    angle, size = ROTATION * jitter[..., 0], 1 + SCALE * jitter[..., 1]
    sine, cosine = size * np.sin(angle), size * np.cos(angle)
    turn = np.stack([np.stack([cosine, -sine], -1), np.stack([sine, cosine], -1)], -2)
    ends = lines @ np.swapaxes(turn, -1, -2)[..., None, :, :] + SHIFT * jitter[..., None, None, 2:]
    place = (np.arange(GLYPH_SIDE) + 0.5) / GLYPH_SIDE - 0.5
    pixels = np.stack(np.meshgrid(place, place, indexing="ij"), -1).reshape(-1, 2)
    start, along = ends[..., 0, :], ends[..., 1, :] - ends[..., 0, :]
    squared = np.maximum((along**2).sum(-1, keepdims=True), 1e-6)
    # Of offsets from the start of a line: their projections on it, and their squared lengths.
    projected = along @ pixels.T - (along * start).sum(-1, keepdims=True)
    distant = (pixels**2).sum(-1) - 2 * start @ pixels.T + (start**2).sum(-1, keepdims=True)
    part = np.clip(projected / squared, 0, 1)
    square = np.maximum(distant - part * (2 * projected - part * squared), 0).min(axis=-2)
    return np.exp(-square / (2 * STROKE_WIDTH**2))


def uniform(keys: np.ndarray, count: int) -> np.ndarray:
    """Return float64 [len(keys), count] in [0, 1), a function of each key."""
    draws = mix(keys[:, None] + np.arange(1, 1 + count, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95))
    return (draws >> np.uint64(11)) * 2.0**-53


def normal(keys: np.ndarray, count: int) -> np.ndarray:
    """Return float64 [len(keys), count] of a unit normal distribution (Box and Muller, 1958)."""
    radius, angle = np.split(uniform(keys, 2 * count), 2, axis=1)
    return np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle)
