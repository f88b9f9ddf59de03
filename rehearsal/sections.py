# SPDX-License-Identifier: Apache-2.0
"""Turns the dictionary of --json into the sections of a report, which the terminal and the page both show."""

import shlex
from typing import NamedTuple

from reporting.display import counted, duration

COLOURS = {  # of bars and plots
    "parameters": "#6ea8dc", "optimizer": "#9a9fe0", "batch": "#b9a58c", "gradients": "#e9b44c",
    "saved activations": "#5fc0b0", "temporaries": "#e28a7c",
    "training state": "#9a9fe0", "weights": "#6ea8dc", "cache": "#5fc0b0", "temporary": "#e28a7c",
    "matmul": "#6ea8dc", "attention kernel": "#5fc0b0", "kernel": "#93c572", "element-wise": "#e9b44c",
    "collective": "#e28a7c", "copy": "#b39ad6", "loop": "#b8b8b8",
}  # fmt: skip
SPENT = {"collective": "exposed communication", "copy": "waiting for copies"}  # the label of a category's seconds


class Table(NamedTuple):
    """Rows of text. A column whose name begins with a capital holds numbers. A terminal shows only `shown` rows."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    shown: int | None = None


class Section(NamedTuple):
    """A part of a report.

    Attributes:
      title: its verdict, in one line.
      lines: text below the title.
      bars: parts of `whole`: name, size, the size as text.
      plots: names of the page's plots.
      bad: whether the verdict is a failure.
    """

    title: str
    lines: list[str]
    tables: tuple[Table, ...] = ()
    bars: tuple[tuple[str, float, str], ...] = ()
    whole: float = 1.0
    plots: tuple[str, ...] = ()
    bad: bool = False


def of_step(report: dict) -> list[Section]:
    """Return all sections except the suggested changes, the verdict first."""
    assumed = Table(("what the estimate assumes", "value", "source"), report["assumptions"])
    known = [_time(report), _operations(report)] if report["step_seconds"] is not None else []
    cost = _cost(report) if known else Section("TIME AND COST: unknown, as the step does not compile", [], bad=True)
    phases = [_phases(report), _rollout(report["rollout"])] if "rollout" in report else []
    return [_head(report), *phases, _memory(report), *known, cost._replace(tables=(assumed,))]


def of_changes(report: dict) -> list[Section]:
    """Return the sections of changes that would make the step fit or faster."""
    found = []
    if report["remedies"]:
        rows = [
            (row["what"], options(row["keys"]), f"{row['total_gib']:.1f}", f"{row['gives_gib']:.1f}",
             ("compiled" if row["verified"] else "not compiled") + ("" if row["fits"] else ", does not fit"))
            for row in report["remedies"]
        ]  # fmt: skip
        found.append(Section("WOULD FIT", [], (Table(("change", "type", "GiB", "Saves", "verdict"), rows),)))
    rows = [
        (options(row["keys"]), f"{row['gain']:+.1%}", seconds_text(row["step_seconds"]), f"{row['total_gib']:.1f}",
         row["why"])
        for row in report["advice"] if row["verified"]
    ]  # fmt: skip
    lines = [
        f"Untested (raise --advice_seconds to compile it): {options(row['keys'])} may be {row['expected']:.1%} faster; "
        f"{row['why']}."
        for row in report["advice"] if not row["verified"]
    ]  # fmt: skip
    if report["advice"]:
        tables = (Table(("type", "Faster", "A step", "GiB", "why"), rows),) if rows else ()
        found.append(Section("WOULD BE FASTER", lines, tables))
    return found


def seconds_text(seconds: float) -> str:
    """Return a time with three digits and a unit: 3.20 s, 12.8 ms, 41.0 us, 0.950 ns."""
    units = (("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9))
    unit, times = next((one for one in units if seconds * one[1] >= 0.9995 or not seconds), units[-1])
    return f"{times * seconds:,.0f} {unit}" if times * seconds >= 99.95 else f"{times * seconds:#.3g} {unit}"


def seconds_bars(by_category: dict[str, float]) -> tuple[tuple[str, float, str], ...]:
    """Return a bar for the seconds of each category, the longest first."""
    spent = sorted(by_category.items(), key=lambda item: -item[1])
    return tuple((name, seconds, seconds_text(seconds)) for name, seconds in spent)


def mesh_text(mesh: dict[str, int]) -> str:
    """Return the axes of a mesh that shard, as in: data 2 x model 8."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "one device"


def options(keys: dict) -> str:
    """Return these keys as command line options."""
    return shlex.join(f"--config.{key}={value}" for key, value in keys.items())


def _head(report: dict) -> Section:
    batch = f"{report['global_batch']} x {report['sequence_length']} tokens a step"
    batch += f" in {report['num_microbatches']} microbatches" if report["num_microbatches"] > 1 else ""
    slice_ = f"{counted(report['chips'], 'chip')}, {counted(report['hosts'], 'host')}"
    lines = [f"{report['num_parameters']:,} parameters; mesh {mesh_text(report['mesh'])}; {batch}"]
    lines += [f"typed: {options(report['typed'])}"] if report["typed"] else []
    return Section(f"{report['recipe']} on {report['topology']}: {slice_}", lines)


def _phases(report: dict) -> Section:
    """Return the verdict on the update and the rollout before it, see rehearsal/rollout.py."""
    seconds = report["update_and_rollout_seconds"]
    took = "" if seconds is None else f"; at most {seconds_text(seconds)} a step"
    rows = [
        (name, f"{memory['total']:.1f} of {memory['capacity']:.0f}", "fits" if phase["fits"] else "does not fit",
         "-" if phase["seconds"] is None else seconds_text(phase["seconds"]))
        for name, phase, memory in (
            ("update", report["update"], report["hbm_gib"]),
            ("rollout, at most", report["rollout"], report["rollout"]["hbm_gib"]),
        )
    ]  # fmt: skip
    table = Table(("phase", "GiB a chip", "verdict", "Time"), rows)
    title = f"{'FITS' if report['fits'] else 'DOES NOT FIT'}: the update and the rollout{took}"
    return Section(title, [], (table,), bad=not report["fits"])


def _rollout(rollout: dict) -> Section:
    hbm, mesh = rollout["hbm_gib"], mesh_text(rollout["mesh"])
    lines = [f"{counted(rollout['rows'], 'row')} of {rollout['length']:,} tokens, prompt and answer; mesh {mesh}"]
    if rollout["decode"]:
        prefill, decode = rollout["prefill"], rollout["decode"]
        lines.append(
            f"prefill: {counted(prefill['calls'], 'call')} of {seconds_text(prefill['call_seconds'])}; decode: "
            f"{seconds_text(decode['step_seconds'])} a token of all rows, without the host's time between tokens"
        )
    if rollout["steps"] > 1:
        lines.append(f"{rollout['steps']} steps train on the answers of one rollout; a step has its share of the time")
    names = ("training_state", "weights", "cache", "temporary")
    bars = tuple((name.replace("_", " "), hbm[name], f"{hbm[name]:.2f} GiB") for name in names)
    title = f"ROLLOUT: {hbm['total']:.1f} of {hbm['capacity']:.0f} GiB a chip"
    return Section(title, lines, (), bars, max(hbm["capacity"], hbm["total"]), bad=not rollout["fits"])


def _memory(report: dict) -> Section:
    hbm = report["hbm_gib"]
    fits = report["compiled"] and hbm["total"] <= hbm["capacity"]
    title = f"FITS: {hbm['total']:.1f} of {hbm['capacity']:.0f} GiB a chip"
    if not fits:
        title = f"DOES NOT FIT: {hbm['total']:.1f} GiB a chip, which has {hbm['capacity']:.0f}"
        title += "" if report["compiled"] else " (the compiler refuses it)"
    names = ("parameters", "optimizer", "batch", "gradients", "saved_activations", "temporaries")
    bars = tuple((name.replace("_", " "), hbm[name], f"{hbm[name]:.2f} GiB") for name in names if hbm[name] >= 0.005)
    lines = [] if report["compiled"] else ["without a compiled program, all memory except the state is temporaries"]
    if report["host_gib"]:
        lines.append(f"in addition, in the host's memory: {report['host_gib']:.2f} GiB a chip")
    rows = [(b["name"], b["class"], b["source"], f"{b['gib']:.3f}") for b in report["largest_buffers"]]
    tables = (Table(("largest buffers", "class", "line", "GiB"), rows),) if rows else ()
    plots = ("memory",) if report["memory_over_time"] else ()
    return Section(title, lines, tables, bars, max(hbm["capacity"], hbm["total"]), plots, bad=not fits)


def _time(report: dict) -> Section:
    step = report["step_seconds"]
    rate = f"{report['tokens_per_second']:,.0f} tokens/s ({report['tokens_per_second_per_device']:,.0f} a chip)"
    hidden = seconds_text(report["hidden_communication_seconds"])
    lines = [
        f"an estimate from {report['basis']}; hardware utilisation {report['hardware_utilisation']:.1%}",
        f"communication hidden behind computation: {hidden}",
        *report["notes"],
    ]
    rows = [
        (c["kind"], c["axes"] or "-", c["source"], "async" if c["asynchronous"] else "sync", f"{c['count']:,}",
         f"{c['gib']:.2f}", seconds_text(c["seconds"]), seconds_text(c["exposed_seconds"]))
        for c in report["collectives"]
    ]  # fmt: skip
    columns = ("collectives", "axes", "line", "runs", "Count", "GiB", "Time", "Exposed")
    return Section(
        f"TIME: {seconds_text(step)} a step, MFU {report['mfu']:.1%}, {rate}", lines,
        (Table(columns, rows, shown=8),) if rows else (),
        seconds_bars(report["seconds_by_category"]), step, ("layers",) if report["timelines"] else (),
    )  # fmt: skip


def _operations(report: dict) -> Section:
    rows = [
        (o["name"], o["pass"], o["source"], seconds_text(o["seconds"]), f"{o['share']:.1%}",
         f"{o['flops_per_second'] / 1e12:.0f}", o["bound"])
        for o in report["operations"]
    ]  # fmt: skip
    columns = ("heaviest operations", "pass", "line", "Time", "Share", "TFLOP/s", "bound by")
    drawn = any(o["flops"] for o in report["operations"])
    return Section("OPERATIONS", [], (Table(columns, rows, shown=8),), plots=("roofline",) if drawn else ())


def _cost(report: dict) -> Section:
    run, price = report["run"], report["price_per_chip_hour"]
    title = "COST: the price of this slice is unknown; give --price"
    most = "at most " if "rollout" in report else ""
    if report["cost_per_billion_tokens"] is not None:
        title = f"COST: {most}${report['cost_per_billion_tokens']:,.2f} per billion tokens"
        title += f" at ${price:.2f} per chip-hour ({report['price_source']})"
    dollars = "" if run["dollars"] is None else f", ${run['dollars']:,.2f}"
    took = "" if run["days"] is None else f"{duration(86_400 * run['days'])}{dollars}"
    return Section(title, [f"the configured run of {run['steps']:,} steps: {most}{took}"] if took else [])
