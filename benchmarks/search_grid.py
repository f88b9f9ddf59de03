# SPDX-License-Identifier: Apache-2.0
"""Train every point of a grid of tiny runs, and keep their held-out losses in benchmarks/search_grid.json.

    python benchmarks/search_grid.py [--at_most=COUNT] [--processes=2]

benchmarks/evolution.py compares the methods of a search on this table. Each point is a run of `train` on sums of
two numbers as text, with a held-out loss after each of STEPS. The file is written after each run, and a run that it has
is not repeated, so the command can be interrupted. It takes about an hour on two cores.
"""

import contextlib
import functools
import io
import itertools
import json
import multiprocessing
import os
import pathlib
import tempfile
import time

import support

# Most of a run's time is the compilation of a program that runs for less than a second.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["JAX_PLATFORMS"] = "cpu"
import numpy as np

from configs.space import Choice
from files.atomic import write_atomically
from settings import loading, validation
from studies.search import spaces
from train import train

FILE = pathlib.Path(__file__).parent / "search_grid.json"
STEPS = (6, 18, 54)  # with a held-out loss; each is three times the one before, as the rungs of successive halving
SPACE = {
    "optimizer.learning_rate": Choice((1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)),
    "model.num_layers": Choice((1, 2)),
    "width": Choice(
        {
            "32": {"model.embed_dim": 32, "model.num_heads": 2, "model.num_kv_heads": 1},
            "64": {"model.embed_dim": 64, "model.num_heads": 2, "model.num_kv_heads": 1},
            "96": {"model.embed_dim": 96, "model.num_heads": 2, "model.num_kv_heads": 1},
        }
    ),
    "model.mlp_dim": Choice((32, 128)),
    "optimizer.warmup_steps": Choice((0, 20)),
    "train.global_batch": Choice((4, 16)),
    "optimizer.name": Choice(("adamw", "lion", "sgd")),
}
FIXED = support.QUIET | {
    "train.steps": STEPS[-1], "train.eval_every": STEPS[0], "train.sequence_length": 32, "model.max_length": 32,
    "evaluation.batches": 1000, "data.tokenizer": "byte", "model.vocab_size": 256, "model.layer_loop": "scan",
}  # fmt: skip


def points() -> list[dict]:
    """Return every point of the grid; those that share a compiled shape are next to each other."""
    order = sorted(SPACE, key=lambda name: name.startswith("optimizer."))
    return [
        dict(zip(order, values, strict=True)) for values in itertools.product(*(SPACE[name].values for name in order))
    ]


def name_of(point: dict) -> str:
    """Return the name of a point in the file."""
    return json.dumps([point[name] for name in SPACE])


def write_sums(path: pathlib.Path, seed: int, count: int) -> str:
    """Write lines such as 12+345=357; return the path."""
    pairs = np.random.default_rng(seed).integers(0, 1000, (count, 2))
    path.write_text("".join(f"{a}+{b}={a + b}\n" for a, b in pairs))
    return str(path)


def losses(data: dict[str, str], point: dict) -> list[float]:
    """Train a point; return its held-out loss in nats per token after each of STEPS."""
    typed = {key: str(value) for key, value in (FIXED | data | spaces.changes(SPACE, point)).items()}
    config = loading.load(str(support.ROOT / "configs/tiny.py"), "", typed).config
    validation.validate(config, num_devices=1)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        train(config, pathlib.Path(folder))
        lines = support.lines_of(pathlib.Path(folder), "eval")
    found = {line["step"]: line["eval_loss"] for line in lines}
    return [round(found[step], 5) for step in STEPS]


def main() -> None:
    """Train the points that the file does not have."""
    parser = support.Parser(__doc__)
    parser.add_argument("--at_most", type=int, default=10**6, help="points to train")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time")
    arguments = parser.parse_args()
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    left = [point for point in points() if name_of(point) not in kept][: arguments.at_most]
    start, spawn = time.monotonic(), multiprocessing.get_context("spawn")
    # A process keeps what it compiled, and has about 65,000 places for it in its address space.
    # multiprocessing.Pool, because a ProcessPoolExecutor of Python 3.11 hangs once it has replaced its processes.
    with tempfile.TemporaryDirectory() as name, spawn.Pool(arguments.processes, maxtasksperchild=50) as pool:
        folder = pathlib.Path(name)
        data = {
            "data.path": write_sums(folder / "train.txt", 0, 20_000),
            "data.validation_path": write_sums(folder / "heldout.txt", 1, 200),
        }
        found = pool.imap(functools.partial(losses, data), left)
        for done, (point, values) in enumerate(zip(left, found, strict=True), 1):
            kept[name_of(point)] = values
            write_atomically(FILE, json.dumps(kept, indent=0).encode())
            passed = time.monotonic() - start
            print(
                f"{len(kept)} of {len(points())}: {name_of(point)} {values}, "
                f"{passed / done:.1f} s each, {passed / done * (len(left) - done) / 60:.0f} min left", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
