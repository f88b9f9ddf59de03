# SPDX-License-Identifier: Apache-2.0
"""Draw a run from its metrics: python examples/plot_run.py WORKDIR FILE.png

Loss in training and held out, and tokens a second. A run that was stopped and taken up is one
history: of each step the last line counts.
"""

import argparse
import json
import pathlib

import matplotlib.figure


def lines_of(workdir: pathlib.Path, kind: str) -> list[dict]:
    """Return the last line of each step of a kind, in order."""
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [line for _, line in sorted({line["step"]: line for line in lines if line["kind"] == kind}.items())]


def main(workdir: pathlib.Path, file: pathlib.Path) -> None:
    """Write the picture; its suffix says as what."""
    trained, evaluated = lines_of(workdir, "train"), lines_of(workdir, "eval")
    figure = matplotlib.figure.Figure(figsize=(10, 3.2), layout="constrained")
    loss, speed = figure.subplots(1, 2)
    for lines, name, label in ((trained, "loss", "training"), (evaluated, "eval_loss", "held out")):
        loss.plot([line["step"] for line in lines], [line[name] for line in lines], ".-", label=label)
    speed.plot([line["step"] for line in trained], [line["tokens_per_second"] for line in trained], ".-")
    loss.set(xlabel="step", ylabel="loss")
    loss.legend()
    speed.set(xlabel="step", ylabel="tokens a second", ylim=(0, None))
    last = trained[-1]
    figure.suptitle(f"{workdir.name}: {last['total_tokens']:,} tokens, goodput {last['goodput']:.2f}")
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdir", type=pathlib.Path, metavar="WORKDIR")
    parser.add_argument("file", type=pathlib.Path, metavar="FILE.png")
    main(**vars(parser.parse_args()))
