# SPDX-License-Identifier: Apache-2.0
"""How long does `make train TOPOLOGY=...` take without an accelerator, and does the loss fall?"""

import support


def main() -> None:
    """Run the default recipe on 4, 16 and 32 simulated devices, and judge."""
    figures, missed = {}, []
    for name in ("v4-8", "v4-32", "v4-64"):
        steps = {"train.steps": 20} if support.QUICK else {}
        run = support.train(steps, "configs/tiny.py", f"--topology={name}")
        losses = [line["loss"] for _, line in sorted(run.lines["train"].items())]
        figures |= {f"{name}_seconds": round(run.seconds), f"{name}_first_loss": round(losses[0], 3)}
        figures |= {f"{name}_last_loss": round(losses[-1], 3)}
        missed += [] if losses[-1] < losses[0] else [f"the loss on {name} does not fall"]
    support.judge("simulated_pods", figures, "; ".join(missed))


if __name__ == "__main__":
    main()
