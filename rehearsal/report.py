# SPDX-License-Identifier: Apache-2.0
"""What a rehearsal says: the dictionary of --json, and the same on the terminal."""

import contextlib
import pathlib
import sys
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from configs import topologies
from configs.base import ConfigError
from input_pipeline.cache import writing
from rehearsal import assumptions
from rehearsal.compiler import Compiled, Compiler
from rehearsal.estimate import estimate
from training.display import duration

SHOWN_ROWS = 8  # on the terminal; the page has all
WIDTH = 110
STATE, COST = "Parameters, optimizer GiB", "$ a billion tokens"  # columns
BAR = 40  # characters
COLOURS = {
    "parameters": "blue", "optimizer": "cyan", "batch": "white", "gradients": "magenta",
    "saved_activations": "yellow", "temporaries": "green",
    "matmul": "green", "attention kernel": "cyan", "kernel": "cyan", "element-wise": "yellow", "collective": "red",
    "copy": "magenta",
}  # fmt: skip


def figures(loaded, compiled: Compiled) -> dict:
    """Return the report on one compiled configuration, all but its advice."""
    config, topology = compiled.config, compiled.topology
    found = estimate(compiled)
    given = None if found["step_seconds"] is None else assumptions.of_topology(topology, found["peak_flops"])
    return {
        "recipe": loaded.recipe, "topology": topology.name, "chips": topology.chips, "hosts": topology.hosts,
        "accelerator": topology.accelerator, "typed": loaded.typed,
        "global_batch": config.train.global_batch, "sequence_length": config.train.sequence_length,
        "tokens_per_step": config.train.global_batch * config.train.sequence_length,
    } | found | cost(found, config.train.steps, topology) | {
        "memory_bandwidth": topology.hbm_bandwidth if given else None,
        "assumptions": assumptions.table(topology), "remedies": [], "advice": [],
    }  # fmt: skip


def cost(found: dict, num_steps: int, topology: topologies.Topology) -> dict:
    """Return dollars per billion tokens and of the run; None where the price, the time or the length is unknown."""
    price, step = topology.price_per_chip_hour, found["step_seconds"]
    hourly = None if price is None else price * topology.chips
    rate = found["tokens_per_second"]
    known = step is not None
    listed = topologies.CHIPS[topology.chip].get("price_per_chip_hour")
    return {
        "price_per_chip_hour": price,
        "price_source": f"list price of {topologies.PRICES_AS_OF}" if price == listed else "as given by --price",
        "cost_per_billion_tokens": hourly * 1e9 / rate / 3600 if known and hourly is not None else None,
        "run": {
            "steps": num_steps or None,
            "days": step * num_steps / 86_400 if known and num_steps else None,
            "dollars": hourly * step * num_steps / 3600 if known and num_steps and hourly is not None else None,
        },
    }  # fmt: skip


def row(result: Compiled | Exception) -> dict:
    """Return what tables of layouts and slices say of one, by column; of an error that alone."""
    if isinstance(result, Exception):
        return {"verdict": str(result)}
    found, model = estimate(result), result.config.model
    spent, step, memory = (
        cost(found, result.config.train.steps, result.topology),
        found["step_seconds"],
        found["hbm_gib"],
    )
    return {
        "verdict": "fits" if found["fits"] else "does not fit",
        "GiB": memory["total"], STATE: memory["parameters"] + memory["optimizer"],
        "Layers": model.num_layers, "Width": model.embed_dim, "Heads": model.num_heads,
        "Parameters": found["num_parameters"],
        "A step": step, "MFU": found["mfu"], "Exposed": step and found["exposed_communication_seconds"] / step,
        "Tokens/s": found["tokens_per_second"], "Tokens/s a chip": found["tokens_per_second_per_device"],
        COST: spent["cost_per_billion_tokens"] if found["fits"] else None,
        "A run": spent["run"]["days"] and 86_400 * spent["run"]["days"], "$ a run": spent["run"]["dollars"],
    }  # fmt: skip


def write_file(name: str, text: str) -> None:
    """Write a file whole or not at all; ConfigError where it cannot be written."""
    path = pathlib.Path(name).expanduser()
    try:
        with writing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a file that can be written") from error


class Display:
    """Says on a terminal, or in plain lines elsewhere, what is being compiled and what came of it."""

    def __init__(self, compiler: Compiler):
        self.compiler, self.live = compiler, sys.stdout.isatty()
        self.console = Console(highlight=False, width=None if self.live else WIDTH, soft_wrap=False)

    def line(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, markup=False)

    @contextlib.contextmanager
    def working(self, what: str):
        """Show that something is under way; gives update(text)."""
        if not self.live:
            self.line(what)
            yield lambda text: None
            return
        with self.console.status(what) as status:
            yield lambda text: status.update(f"{what} {text}")

    def compile_all(self, pairs: list[tuple], what: str, until: float | None = None) -> Iterator[tuple]:
        """Yield what `Compiler.compile_all` does of (configuration, topology) pairs, and show for how long."""
        with self.working(what) as update:
            yield from self.compiler.compile_all(pairs, waiting=lambda s: update(f"{s:.0f} s"), until=until)

    def compile(self, config, topology) -> Compiled:
        """Compile one configuration and show for how long."""
        if self.compiler.is_cached(config, topology):
            return self.compiler.compile(config, topology)
        with self.working(f"compiling the step for {topology.name} (a 7B model takes about a minute)") as update:
            return self.compiler.compile(config, topology, waiting=lambda s: update(f"{s:.0f} s"))

    def report(self, report: dict) -> None:
        """Print all but the advice."""
        for part in (
            _head(report),
            _memory(report),
            _time(report),
            _collectives(report),
            _operations(report),
            _cost(report),
        ):
            for piece in part:
                self.console.print(piece)

    def advice(self, report: dict) -> None:
        """Print what to change."""
        for piece in [*_remedies(report["remedies"]), *_advice(report["advice"])]:
            self.console.print(piece)

    def table(self, result: dict) -> None:
        """Print the rows of a comparison or a search."""
        table = _table(*result["columns"])
        for row in result["rows"]:
            table.add_row(*[_cell(column, row.get(column)) for column in result["columns"]])
        self.console.print(Text(result["title"], style="bold"))
        self.console.print(table)
        for text in result["notes"]:
            self.console.print(text, markup=False, soft_wrap=True)


def seconds_text(seconds: float) -> str:
    """Return three digits and a unit: 3.2 s, 12.8 ms, 41 us."""
    size, unit = next((pair for pair in ((1, "s"), (1e-3, "ms")) if seconds >= pair[0]), (1e-6, "us"))
    return f"{seconds / size:.3g} {unit}"


def _cell(column: str, value) -> str:
    """Return a value as text, by what its column's name says it is."""
    if value is None:
        return "-"
    if column in ("A step", "A run"):
        return seconds_text(value) if column == "A step" else duration(value)
    if column.startswith(("MFU", "Exposed")):
        return f"{value:.1%}"
    if column.startswith("$"):
        return f"{value:,.2f}"
    return (
        f"{value:,.3g}"
        if isinstance(value, float) and value < 1000
        else f"{value:,.0f}"
        if isinstance(value, float | int)
        else str(value)
    )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


def _table(*columns: str) -> Table:
    """Return a table; columns whose name begins with a lower-case letter or a space hold text."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column[:1].islower() else "right", overflow="fold")
    return table


def _bar(parts: dict[str, float], whole: float) -> Text:
    """One bar of all parts, each in its colour; what is left of the whole stays empty."""
    text, used = Text("  "), 0
    for name, size in parts.items():
        length = round(BAR * size / whole)
        text.append("█" * length, style=COLOURS.get(name, "white"))
        used += length
    return text.append("·" * max(0, BAR - used), style="dim")


def _head(report: dict) -> list:
    mesh = " x ".join(f"{axis} {size}" for axis, size in report["mesh"].items() if size > 1) or "one device"
    slice_ = f"{_count(report['chips'], 'chip')}, {_count(report['hosts'], 'host')}"
    microbatches = report["num_microbatches"]
    batch = f"{report['global_batch']} x {report['sequence_length']} tokens a step"
    batch += f" in {microbatches} microbatches" if microbatches > 1 else ""
    return [
        Text(f"{report['recipe']} on {report['topology']}: {slice_}", style="bold"),
        f"  {report['num_parameters']:,} parameters; mesh {mesh}; {batch}",
        "",
    ]  # fmt: skip


def _memory(report: dict) -> list:
    hbm = report["hbm_gib"]
    names = ("parameters", "optimizer", "batch", "gradients", "saved_activations", "temporaries")
    parts = {name: hbm[name] for name in names}
    if report["fits"]:
        verdict = Text(f"FITS: {hbm['total']:.1f} of {hbm['capacity']:.0f} GiB a chip", style="bold green")
    else:
        text = f"DOES NOT FIT: {hbm['total']:.1f} GiB a chip, which has {hbm['capacity']:.0f}"
        verdict = Text(text + ("" if report["compiled"] else " (the compiler refuses it)"), style="bold red")
    lines = [verdict, _bar(parts, max(hbm["capacity"], hbm["total"]))]
    for name, size in parts.items():
        if size >= 0.005:
            lines.append(Text.assemble("  ", ("█ ", COLOURS[name]), f"{name.replace('_', ' '):18s} {size:7.2f} GiB"))
    if report["host_gib"]:
        lines.append(f"  beside these, in its host's memory: {report['host_gib']:.2f} GiB a chip")
    table = _table("largest buffers", "class", "line", "GiB")
    for row in report["largest_buffers"]:
        table.add_row(row["name"], row["class"], row["source"], f"{row['gib']:.3f}")
    return [*lines, table if report["largest_buffers"] else "", ""]


def _time(report: dict) -> list:
    step = report["step_seconds"]
    if step is None:
        return []
    rate = f"{report['tokens_per_second']:,.0f} tokens/s ({report['tokens_per_second_per_device']:,.0f} a chip)"
    lines = [
        Text(f"TIME: {seconds_text(step)} a step, MFU {report['mfu']:.1%}, {rate}", style="bold"),
        f"  an estimate from {report['basis']}; hardware utilisation {report['hardware_utilisation']:.1%}",
        _bar(report["seconds_by_category"], step),
    ]  # fmt: skip
    for name, seconds in sorted(report["seconds_by_category"].items(), key=lambda item: -item[1]):
        what = {"collective": "exposed communication", "copy": "waiting for copies"}.get(name, name)
        lines.append(
            Text.assemble("  ", ("█ ", COLOURS[name]), f"{what:22s} {seconds_text(seconds):>9s} {seconds / step:6.1%}")
        )
    lines.append(f"  communication hidden behind computation: {seconds_text(report['hidden_communication_seconds'])}")
    lines += [f"  {note}" for note in report["notes"]]
    return [*lines, ""]


def _collectives(report: dict) -> list:
    rows = report["collectives"]
    if not rows:
        return []
    shown = f"collectives ({min(SHOWN_ROWS, len(rows))} of {len(rows)})"
    table = _table(shown, "axes", "line", "runs", "Count", "GiB", "Time", "Exposed")
    for row in rows[:SHOWN_ROWS]:
        how, gib = "beside" if row["asynchronous"] else "alone", f"{row['gib']:.2f}"
        table.add_row(
            row["kind"], row["axes"] or "-", row["source"], how, f"{row['count']:,}", gib, seconds_text(row["seconds"]),
            seconds_text(row["exposed_seconds"]),
        )  # fmt: skip
    return [table]


def _operations(report: dict) -> list:
    if report["step_seconds"] is None:
        return []
    rows = report["operations"]
    shown = f"heaviest operations ({min(SHOWN_ROWS, len(rows))} of {len(rows)})"
    table = _table(shown, "pass", "line", "Time", "Share", "TFLOP/s", "bound by")
    for row in rows[:SHOWN_ROWS]:
        table.add_row(
            row["name"], row["pass"], row["source"], seconds_text(row["seconds"]), f"{row['share']:.1%}",
            f"{row['flops_per_second'] / 1e12:.0f}", row["bound"],
        )  # fmt: skip
    return [table]


def _cost(report: dict) -> list:
    per_billion, run = report["cost_per_billion_tokens"], report["run"]
    if report["step_seconds"] is None:
        return []
    price = report["price_per_chip_hour"]
    lines = [Text("COST: the price of this slice is unknown; give --price", style="bold")]
    if per_billion is not None:
        text = f"COST: ${per_billion:,.2f} per billion tokens at ${price:.2f} per chip-hour ({report['price_source']})"
        lines = [Text(text, style="bold")]
    if run["days"] is not None:
        dollars = "" if run["dollars"] is None else f", ${run['dollars']:,.2f}"
        lines.append(f"  the configured run of {run['steps']:,} steps: {duration(86_400 * run['days'])}{dollars}")
    table = _table("what the estimate assumes", "value", "source")
    for row in report["assumptions"]:
        table.add_row(*row)
    return [*lines, table]


def options(keys: dict) -> str:
    """Return what to type for these keys."""
    return " ".join(f"--config.{key}={value}" for key, value in keys.items())


def _remedies(remedies: list[dict]) -> list:
    if not remedies:
        return []
    table = _table("what would make it fit", "type", "GiB", "Saves", "verdict")
    for row in remedies:
        table.add_row(
            row["what"], options(row["keys"]), f"{row['total_gib']:.1f}", f"{row['gives_gib']:.1f}",
            ("compiled" if row["verified"] else "not compiled") + ("" if row["fits"] else ", does not fit"),
        )  # fmt: skip
    return [table]


def _advice(advice: list[dict]) -> list:
    verified = [row for row in advice if row["verified"]]
    lines = []
    if verified:
        table = _table("advice, compiled", "Faster", "A step", "GiB", "why")
        for row in verified:
            table.add_row(
                options(row["keys"]), f"{row['gain']:+.1%}", seconds_text(row["step_seconds"]),
                f"{row['total_gib']:.1f}", row["why"],
            )  # fmt: skip
        lines.append(table)
    unverified = [row for row in advice if not row["verified"]]
    if unverified:
        lines.append(Text("Not verified (give more --advice_seconds to compile it):", style="bold"))
        lines += [f"  {options(row['keys'])}  perhaps {row['expected']:+.1%}: {row['why']}" for row in unverified]
    return lines
