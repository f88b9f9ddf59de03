# SPDX-License-Identifier: Apache-2.0
"""What loss does the default run reach, and how fast? Runs train.py with the tiny recipe in a fresh workdir."""

import support


def main() -> None:
    """Train, then report the figures of the run."""
    run = support.train({"train.steps": 20} if support.QUICK else {})
    last = run.lines["train"][max(run.lines["train"])]
    support.finish(
        "tiny_recipe",
        {
            "heldout_bits_per_byte": run.figure(r"held-out bits per byte: ([\d.]+)"),
            "unigram_bits_per_byte": run.figure(r"unigram model: ([\d.]+)"),
            "tokens_per_second": run.figure(r"speed: ([\d,]+)"),
            "tokens": last["total_tokens"],
            "last_mfu": round(last["mfu"], 3),
            "whole_command_seconds": round(run.seconds),
        },
    )


if __name__ == "__main__":
    main()
