# SPDX-License-Identifier: Apache-2.0
"""How low is the held-out loss of the tiny recipe after 60 steps with each optimizer? A table by seed.

Learning rates are the best of a few, tried in factors of two or three; AdamW's is that of the recipe. A loss above the
stated one ends the benchmark with an error.
"""

import statistics

import support

STEPS, SEEDS = (5, (0,)) if support.QUICK else (60, (0, 1, 2))
SETTINGS = {
    "adamw": {"learning_rate": "4e-3"},
    "muon": {"learning_rate": "2e-2", "beta1": "0.95"},
    "adafactor": {"learning_rate": "1e-1"},
    "lion": {"learning_rate": "2e-3", "beta2": "0.99"},
    "sgd": {"learning_rate": "2"},
}
STATED = {"adamw": 4.8, "muon": 4.55, "adafactor": 4.8, "lion": 4.8, "sgd": 6.0}  # nats a token


def heldout_loss(name: str, seed: int) -> float:
    """Return the loss on all held-out documents after the run."""
    keys = {f"optimizer.{key}": value for key, value in SETTINGS[name].items()}
    keys |= {"optimizer.name": name, "train.seed": seed, "train.steps": STEPS}
    return support.train(support.QUIET | keys).lines["eval"][STEPS]["eval_loss"]


def main() -> None:
    """Train with each optimizer and every seed; print the table."""
    losses = {name: [heldout_loss(name, seed) for seed in SEEDS] for name in SETTINGS}
    heads = "".join(f"  seed {seed}" for seed in SEEDS)
    print(f"\nheld-out nats a token after {STEPS} steps\n{'':12}{heads}  stated")
    for name, values in losses.items():
        print(f"{name:12}" + "".join(f"{value:8.3f}" for value in values) + f"{STATED[name]:8.2f}")
    missed = [name for name, values in losses.items() if max(values) > STATED[name]]
    figures = {"steps": STEPS, "seeds": len(SEEDS)}
    for name, values in losses.items():
        figures |= {f"{name}_loss": round(statistics.mean(values), 3), f"{name}_worst": round(max(values), 3)}
    support.judge("optimizers", figures, missed and f"above the stated loss: {', '.join(missed)}")


if __name__ == "__main__":
    main()
