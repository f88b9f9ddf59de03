# SPDX-License-Identifier: Apache-2.0
"""The report of a rehearsal: the dictionary of --json, and its display on the terminal."""

import sys
from collections.abc import Generator, Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from configs import topologies
from files.terminal import is_live
from rehearsal import assumptions
from rehearsal.compiler import Compiled, Compiler, in_order
from rehearsal.estimate import UPDATE_ALONE, estimate
from rehearsal.sections import COLOURS, SPENT, Section, seconds_text
from reporting.display import duration
from settings.ramp import known_steps

WIDTH = 110
BAR = 40  # characters
STATE, COST = "Parameters, optimizer GiB", "$ a billion tokens"  # columns


def figures(loaded, compiled: Compiled) -> dict:
    """Return the report on one compiled configuration, without advice."""
    config, topology = compiled.config, compiled.topology
    found = estimate(compiled)
    given = None if found["step_seconds"] is None else assumptions.of_topology(topology, found["peak_flops"])
    return {
        "recipe": loaded.recipe, "topology": topology.name, "chips": topology.chips, "hosts": topology.hosts,
        "accelerator": topology.accelerator, "typed": loaded.as_typed(),
        "global_batch": config.train.global_batch, "sequence_length": config.train.sequence_length,
        "tokens_per_step": config.train.global_batch * config.train.sequence_length,
    } | found | cost(found, known_steps(config), topology) | {
        "memory_bandwidth": topology.hbm_bandwidth if given else None,
        "assumptions": assumptions.table(topology), "remedies": [], "advice": [],
    }  # fmt: skip


def cost(found: dict, num_steps: int | None, topology: topologies.Topology) -> dict:
    """Return dollars per billion tokens and of the run; None if the price, the time or the length is unknown."""
    price, rate = topology.price_per_chip_hour, found["tokens_per_second"]
    seconds = found["step_seconds"] * num_steps if found["step_seconds"] and num_steps else None
    a_second = None if price is None else price * topology.chips / 3600
    listed = topologies.CHIPS[topology.chip].get("price_per_chip_hour")
    source = f"list price of {topologies.PRICES_AS_OF}" if price == listed else "as given by --price"
    return {
        "price_per_chip_hour": price,
        "price_source": None if price is None else source,
        "cost_per_billion_tokens": None if None in (rate, a_second) else a_second * 1e9 / rate,
        "run": {
            "steps": num_steps or None,
            "days": seconds and seconds / 86_400,
            "dollars": None if None in (seconds, a_second) else a_second * seconds,
        },
    }


def row(result: Compiled | Exception) -> dict:
    """Return a row, {column: value}, for the tables of layouts and slices; for an error only the verdict."""
    if isinstance(result, Exception):
        return {"verdict": str(result)}
    found, config = estimate(result), result.config
    model, step, memory = config.model, found["step_seconds"], found["hbm_gib"]
    spent = cost(found, known_steps(config), result.topology)
    return verdict(found["fits"], memory["total"], step, found["tokens_per_second"], spent) | {
        STATE: memory["parameters"] + memory["optimizer"],
        "Layers": model.num_layers, "Width": model.embed_dim, "Heads": model.num_heads,
        "Parameters": found["num_parameters"],
        "MFU": found["mfu"], "Exposed": step and found["exposed_communication_seconds"] / step,
        "Tokens/s a chip": found["tokens_per_second_per_device"], "update alone": bool(result.facts["decoded"]),
    }  # fmt: skip


def verdict(fits: bool, gib: float, step: float | None, rate: float | None, spent: dict) -> dict:
    """Return the columns of a row that a rollout changes, given seconds, tokens/s and what `cost` returns."""
    run = spent["run"]
    return {
        "verdict": "fits" if fits else "does not fit", "GiB": gib, "A step": step, "Tokens/s": rate,
        COST: spent["cost_per_billion_tokens"] if fits else None,
        "A run": run["days"] and 86_400 * run["days"], "$ a run": run["dollars"],
    }  # fmt: skip


def notes_on(rows: Iterable[dict]) -> list[str]:
    """Return a note if the times of some rows leave out the answers that are drawn before a step."""
    return [UPDATE_ALONE] if any(row.get("update alone") for row in rows) else []


class Display:
    """Shows compilations and their results on a terminal, or in plain lines elsewhere."""

    def __init__(self, compiler: Compiler):
        self.compiler, self.live = compiler, is_live(sys.stdout)
        self.console = Console(highlight=False, width=None if self.live else WIDTH, soft_wrap=False)

    def line(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, markup=False)

    def compile_all(self, pairs: list[tuple], what: str, until: float | None = None) -> Generator[tuple]:
        """Yield from `Compiler.compile_all` for (configuration, topology) pairs and show the elapsed time."""
        if all(self.compiler.is_cached(*pair) for pair in pairs):
            yield from self.compiler.compile_all(pairs)
        elif not self.live:
            self.line(what)
            yield from self.compiler.compile_all(pairs, until=until)
        else:
            with self.console.status(what) as status:
                yield from self.compiler.compile_all(
                    pairs, waiting=lambda seconds: status.update(f"{what} {seconds:.0f} s"), until=until
                )

    def compile(self, config, topology) -> Compiled:
        """Compile one configuration and show the elapsed time."""
        what = f"compiling the step for {topology.name} (a 7B model takes about a minute)"
        return in_order(self.compile_all([(config, topology)], what))[0]

    def sections(self, found: list[Section]) -> None:
        """Print sections of a report."""
        for section in found:
            style = "bold red" if section.bad else "bold green" if section.title.startswith("FITS") else "bold"
            self.console.print(Text(section.title, style=style))
            if section.bars:
                self.console.print(_bar(section))
            for name, size, said in section.bars:
                square, share = ("█ ", COLOURS[name]), f"{size / section.whole:6.1%}"
                self.console.print(Text.assemble("  ", square, f"{SPENT.get(name, name):22s} {said:>10s} {share}"))
            for text in section.lines:
                self.line(f"  {text}")
            for columns, rows, shown in section.tables:
                first = f"{columns[0]} ({shown} of {len(rows)})" if shown and shown < len(rows) else columns[0]
                self.console.print(_table((first, *columns[1:]), rows[:shown]))
            self.line("")

    def table(self, result: dict) -> None:
        """Print the rows of a comparison or a search."""
        columns = result["columns"]
        self.console.print(Text(result["title"], style="bold"))
        self.console.print(
            _table(columns, [[_cell(name, row.get(name)) for name in columns] for row in result["rows"]])
        )
        for text in result["notes"]:
            self.console.print(text, markup=False, soft_wrap=True)


def _cell(column: str, value) -> str:
    """Return a value as text, formatted by the name of its column."""
    if value is None:
        return "-"
    if column in ("A step", "A run"):
        return seconds_text(value) if column == "A step" else duration(value)
    if column.startswith(("MFU", "Exposed")):
        return f"{value:.1%}"
    if column.startswith("$"):
        return f"{value:,.2f}"
    if isinstance(value, str):
        return value
    return f"{value:,.3g}" if isinstance(value, float) and value < 1000 else f"{value:,.0f}"


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column, justify="right" if column[0].isupper() or column[0] == "$" else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*row)
    return table


def _bar(section: Section) -> Text:
    """Return one bar of all parts, each in its colour; the rest of the whole stays empty."""
    text, used = Text("  "), 0
    for name, size, _ in section.bars:
        length = round(BAR * size / section.whole)
        text.append("█" * length, style=COLOURS[name])
        used += length
    return text.append("·" * max(0, BAR - used), style="dim")
