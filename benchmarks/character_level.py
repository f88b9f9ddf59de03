# SPDX-License-Identifier: Apache-2.0
"""How well does a 0.8 M-parameter model predict characters?

nanoGPT's CPU recipe is trained on 1 MB of text: a file of your own (--text=FILE), or the first megabyte of the source
code of Python's standard library as one document, whose last tenth is held out. nanoGPT publishes a held-out loss of
1.88 nats per character on tiny Shakespeare. Losses on different texts cannot be compared.
"""

import pathlib
import sys
import tempfile

import support

from configs import base
from input_pipeline.sources import read_source

MEGABYTE = 1_000_000


def text() -> str:
    """Return the given text, or a megabyte of source code."""
    given = [argument.removeprefix("--text=") for argument in sys.argv if argument.startswith("--text=")]
    if given:
        return pathlib.Path(given[0]).read_text()
    documents = read_source(base.get_config().data, vocab_size=256, seed=0)
    return "".join(document.open().read().decode() for document in documents)[:MEGABYTE]


def main() -> None:
    """Train on the text with the char recipe."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "text.txt"
        path.write_text(text())
        steps = {"train.steps": 50} if support.QUICK else {}
        run = support.train({"data.path": path} | steps, "configs/char.py")
    support.finish(
        "character_level",
        {
            "heldout_nats_per_byte": run.figure(r"held-out loss: ([\d.]+)"),
            "tokens_per_second": run.figure(r"speed: ([\d,]+)"),
            "whole_command_seconds": round(run.seconds),
        },
    )


if __name__ == "__main__":
    main()
