# SPDX-License-Identifier: Apache-2.0
"""Does a small student learn faster from a trained teacher than alone?

The data source has a known entropy (1.213 nats per token). For three seeds, a student with a fifth of the teacher's
parameters is trained alone and by distillation, with the same number of steps on the same batches. The held-out
cross-entropies are compared. If distillation does not help a student, the benchmark ends with an error.
"""

import pathlib
import tempfile

import support

SEEDS = (0,) if support.QUICK else (0, 1, 2)
TEACHER_STEPS, STEPS = (20, 10) if support.QUICK else (400, 200)
SMALL = support.QUIET | {
    "model.num_layers": 1, "model.embed_dim": 32, "model.num_heads": 2, "model.num_kv_heads": 2, "model.mlp_dim": 64,
    "model.vocab_size": 512, "model.max_length": 64, "data.source": "synthetic", "train.sequence_length": 64,
    "train.global_batch": 16, "optimizer.learning_rate": 0.01, "optimizer.warmup_steps": 10,
}  # fmt: skip
LARGE = {"model.num_layers": 2, "model.embed_dim": 96, "model.mlp_dim": 256, "optimizer.learning_rate": 0.005}


def heldout(workdir: pathlib.Path, keys: dict) -> float:
    """Train in a folder, and return the loss on all held-out documents."""
    return support.train(SMALL | keys, workdir=workdir).figure(r"held-out loss: ([\d.]+) nats")


def main() -> None:
    """Train the teacher, then each student alone and by distillation."""
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder)
        teacher = heldout(workdir / "teacher", LARGE | {"train.steps": TEACHER_STEPS})
        distilling = {"train.objective": "distillation", "distillation.teacher": workdir / "teacher"}
        alone, distilled = [], []
        for seed in SEEDS:
            keys = {"train.steps": STEPS, "train.seed": seed}
            alone.append(heldout(workdir / f"alone{seed}", keys))
            distilled.append(heldout(workdir / f"distilled{seed}", keys | distilling))
    print(f"held-out nats a token: teacher {teacher}, alone {alone}, distilled {distilled}")
    slower = any(taught >= by_itself for taught, by_itself in zip(distilled, alone, strict=True))
    figures = {"teacher": teacher, "alone": alone, "distilled": distilled}
    support.judge("distillation", figures, "a student learned no faster than alone" if slower else "")


if __name__ == "__main__":
    main()
