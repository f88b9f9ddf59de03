# SPDX-License-Identifier: Apache-2.0
"""Plot the metrics of a run: python examples/plot_run.py WORKDIR FILE.png

It plots training loss, held-out loss and tokens a second. A resumed run has one history: the last line of each step
counts.
"""

import argparse
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from core import interpreter

try:
    import matplotlib.figure

    from reporting.metrics import read_steps
except ModuleNotFoundError as missing:
    interpreter.restart(missing)


def lines_of(workdir: pathlib.Path, kind: str) -> list[dict]:
    """Return the last line of each step of a kind, in order of the steps."""
    path = workdir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{workdir} is not the folder of a run: there is no {path.absolute()}")
    return read_steps(path, kind)


def values(lines: list[dict], name: str) -> list[float]:
    """Return a value of each line, nan if it has none."""
    return [math.nan if line.get(name) is None else line[name] for line in lines]


def main(workdir: pathlib.Path, file: pathlib.Path) -> None:
    """Write the plot; the suffix of the file selects the format."""
    trained, evaluated = lines_of(workdir, "train"), lines_of(workdir, "eval")
    figure = matplotlib.figure.Figure(figsize=(10, 3.2), layout="constrained")
    loss, speed = figure.subplots(1, 2)
    for lines, name, label in ((trained, "loss", "training"), (evaluated, "eval_loss", "held out")):
        loss.plot(values(lines, "step"), values(lines, name), ".-", label=label)
    speed.plot(values(trained, "step"), values(trained, "tokens_per_second"), ".-")
    loss.set(xlabel="step", ylabel="loss")
    loss.legend()
    speed.set(xlabel="step", ylabel="tokens a second", ylim=(0, None))
    last = trained[-1] if trained else {}
    tokens, goodput = last.get("total_tokens", 0), last.get("goodput") or 0.0
    name = workdir.name.replace("$", r"\$")  # which begins a formula
    figure.suptitle(f"{name}: {tokens:,} tokens, goodput {goodput:.2f}")
    file = file if file.suffix else file.with_suffix(".png")
    figure.savefig(file, dpi=120)
    print(f"Drew {len(trained):,} logged step{'s' * (len(trained) != 1)} of {workdir} in {file}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdir", type=pathlib.Path, metavar="WORKDIR")
    parser.add_argument("file", type=pathlib.Path, metavar="FILE.png")
    try:
        main(**vars(parser.parse_args()))
    except (OSError, ValueError) as error:  # no such folder, a damaged line, a picture that cannot be written
        where = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        print(f"error: {where}", file=sys.stderr)
        sys.exit(2)
