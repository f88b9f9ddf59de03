# SPDX-License-Identifier: Apache-2.0
"""Does a long run leak? 5,000 steps of a tiny language model and of a tiny recursive one, with saves and evaluations.

Compares memory from the run's own metrics, open files and threads from /proc, and the compilations that jax logs. None
of them may grow after the first save and evaluation.
"""

import contextlib
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import support

STEPS = 1500 if support.QUICK else 5000
SETTLED = 500  # steps after which nothing may grow; as many show what is usual, with two saves and evaluations
INTERVAL_SECONDS = 0.02
LIMIT_MB = 20.0
POOL = "ts_pool_worker"  # threads of TensorStore; it keeps as many as it once wrote files at the same time
TEXTS = 40
KEYS = {
    "model.num_layers": 1, "model.embed_dim": 32, "model.num_heads": 2, "model.num_kv_heads": 2, "model.mlp_dim": 48,
    "train.global_batch": 8, "train.log_every": 10, "evaluation.sample_tokens": 0, "evaluation.batches": 2,
    "logging.tensorboard": False, "logging.report": False,
}  # fmt: skip
TEXT_KEYS = {
    "model.vocab_size": 300, "model.max_length": 32, "train.sequence_length": 32, "data.holdout_fraction": 0.3,
    "data.tokenizer": "byte",
}  # fmt: skip
PUZZLE_KEYS = {
    "data.puzzle_count": 50, "data.puzzle_augmentations": 3, "data.puzzle_heldout": 20, "model.high_cycles": 1,
    "model.low_cycles": 1, "supervision.max_steps": 4, "inference.puzzles": 0,  # its program is compiled at the end
}  # fmt: skip
STEP = re.compile(r"step +(\d+)/")
COMPILED = re.compile(r"Compiling (\S+)")


class Watched:
    """A run of train.py and its observations.

    Attributes:
      printed: (last step so far, line), of stdout and stderr together.
      samples: (last step so far, open files, threads, seconds of processors so far).
    """

    def __init__(self, folder: pathlib.Path, recipe: list[str], keys: dict):
        """Start it in a folder."""
        arguments = [*recipe, f"--workdir={folder / 'run'}", *support.typed(keys)]
        environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "JAX_LOG_COMPILES": "1"}
        self.step, self.printed, self.samples = 0, [], []
        self.process = subprocess.Popen(
            [sys.executable, "train.py", *arguments], cwd=support.ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def follow(self) -> None:
        """Return when it has ended; exit if it failed."""
        reader = threading.Thread(target=self._read)
        reader.start()
        while self.process.poll() is None:
            self._sample()
            time.sleep(INTERVAL_SECONDS)
        reader.join()
        self.process.stdout.close()
        if self.process.returncode:
            sys.exit(f"train.py ended with status {self.process.returncode}: {self.printed[-1][1]}")

    def _read(self) -> None:
        for line in self.process.stdout:
            found = STEP.match(line)
            self.step = int(found.group(1)) if found else self.step
            self.printed.append((self.step, line.rstrip()))

    def _sample(self) -> None:
        folder, step = pathlib.Path("/proc") / str(self.process.pid), self.step
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread, or all of it, has just ended
            names = [path.read_text().strip() for path in folder.glob("task/*/comm")]
            threads = sum(name != POOL for name in names)
            ticks = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
            seconds = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
            self.samples.append((step, len(os.listdir(folder / "fd")), threads, seconds))


def soak(folder: pathlib.Path, steps: int, settled: int) -> dict:
    """Train a language model for this number of steps in a folder; return the growth after `settled` steps."""
    return figures_of(folder, [], KEYS | TEXT_KEYS | {"data.path": support.write_texts(folder, TEXTS)}, steps, settled)


def soak_recursive(folder: pathlib.Path, steps: int, settled: int) -> dict:
    """Do the same with a recursive model that solves Sudokus of 4 x 4."""
    return figures_of(folder, ["--config=configs/trm/sudoku_mini.py"], KEYS | PUZZLE_KEYS, steps, settled)


def figures_of(folder: pathlib.Path, recipe: list[str], keys: dict, steps: int, settled: int) -> dict:
    """Train to the end; return the growth from the steps right after `settled` to the last steps."""
    often = {"train.eval_every": settled // 2, "train.save_every": settled // 2}
    watched = Watched(folder, recipe, keys | often | {"train.steps": steps})
    watched.follow()
    early, late = range(settled, 2 * settled), range(steps - settled, steps)  # without the summary
    trained = support.lines_of(folder / "run", "train")
    memory = {line["step"]: 1024 * line["host_memory_gib"] for line in trained}
    compiled = [step for step, line in watched.printed if COMPILED.search(line)]
    if not compiled:
        sys.exit("jax logged no compilation, so recompilations cannot be counted")
    return {
        "steps": steps,
        # Medians: with other work on the machine two saves may overlap, which a maximum would take for growth.
        "grown_mb": round(statistics.median(of(memory, late)) - statistics.median(of(memory, early)), 1),
        "recompilations": sum(step >= settled for step in compiled),
        "open_files_grown": grown(watched, 1, early, late),
        "threads_grown": grown(watched, 2, early, late),
    }


def of(values: dict, steps: range) -> list:
    """Return the values of these steps."""
    return [value for step, value in values.items() if step in steps]


def grown(watched: Watched, column: int, early: range, late: range) -> int:
    """Return the growth of the minimum from early to late steps; a save takes more while it is under way."""
    first, last = (min(sample[column] for sample in watched.samples if sample[0] in steps) for steps in (early, late))
    return last - first


def main() -> None:
    """Train and watch."""
    found = {}
    for name, train in {"": soak, "recursive_": soak_recursive}.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = train(pathlib.Path(folder), STEPS, SETTLED)
    support.finish("soak", {f"{name}{key}": value for name, of in found.items() for key, value in of.items()})
    counts = ("recompilations", "open_files_grown", "threads_grown")
    if any(of["grown_mb"] > LIMIT_MB or any(of[name] > 0 for name in counts) for of in found.values()):
        sys.exit("a run has grown, or compiled again")


if __name__ == "__main__":
    main()
