# SPDX-License-Identifier: Apache-2.0
"""The rehearsal of a server: memory and time of its two programs, and the least time that a decoded token can take.

The programs are those of inference/batching.py. Prefill extends a few rows by a part of their prompts, so a batch of
prompts takes several calls. Decode extends all rows by a token.
"""

import math

from configs import topologies
from rehearsal import assumptions, hlo, schedule
from rehearsal.compiler import GIB, Call, Compiled, in_order
from rehearsal.estimate import seconds_by_category
from rehearsal.sections import Section, Table, mesh_text, seconds_bars, seconds_text
from reporting.display import counted

PROGRAMS = ("prefill", "decode")


def rehearse(loaded, config, topology: topologies.Topology, rows: int, length: int, display) -> dict:
    """Compile both programs; return the report.

    `config` is the configuration of `loaded` for decoding, see settings/decoding.py. `rows` prompts are decoded
    together. A row has `length` tokens, prompt and continuation.
    """
    wanted = [(config, topology, Call(name, rows, length, config.inference.cache_dtype)) for name in PROGRAMS]
    compiled = in_order(display.compile_all(wanted, f"compiling prefill and decode for {topology.name}"))
    return figures(loaded, dict(zip(PROGRAMS, compiled, strict=True)), rows, length)


def figures(loaded, compiled: dict[str, Compiled], rows: int, length: int) -> dict:
    """Return the report of both programs; bytes are those of a chip."""
    topology, facts = compiled["decode"].topology, compiled["decode"].facts
    total = max(one.total_bytes for one in compiled.values())
    state = facts["state"]
    hbm = state | {"temporary": total - sum(state.values()), "total": total}
    report = {
        "recipe": loaded.recipe, "topology": topology.name, "chips": topology.chips, "hosts": topology.hosts,
        "typed": loaded.as_typed(), "rows": rows, "length": length, "mesh": facts["mesh"],
        "num_parameters": facts["num_parameters"], "fits": all(one.fits for one in compiled.values()),
        "hbm_gib": {name: size / GIB for name, size in hbm.items()} | {"capacity": topology.capacity_gib},
        "compile_seconds": {name: one.facts.get("compile_seconds") for name, one in compiled.items()},
        "assumptions": assumptions.table_of_decoding(topology),
    }  # fmt: skip
    if any(one.facts["out_of_memory"] for one in compiled.values()):
        return report | {"prefill": None, "decode": None}
    return report | {
        "prefill": _prefill(compiled["prefill"], rows, length), "decode": _decode(compiled["decode"], rows)
    }  # fmt: skip


def _replayed(compiled: Compiled) -> schedule.Replayed:
    module = hlo.parse(compiled.program())
    return schedule.replay(module, assumptions.of_topology(compiled.topology), compiled.facts["mesh"])


def _prefill(compiled: Compiled, rows: int, length: int) -> dict:
    """Return the figures of all calls that compute `rows` prompts of `length` tokens."""
    rows_of_call, tokens_of_row = compiled.facts["tokens"]
    num_calls = math.ceil(rows / rows_of_call) * math.ceil(length / tokens_of_row)
    replayed = _replayed(compiled)
    seconds = num_calls * replayed.seconds
    return {
        "rows_of_a_call": rows_of_call, "tokens_of_a_row": tokens_of_row, "calls": num_calls,
        "call_seconds": replayed.seconds, "seconds": seconds, "tokens_per_second": rows * length / seconds,
        "seconds_by_category": dict(seconds_by_category(replayed)),
    }  # fmt: skip


def _decode(compiled: Compiled, rows: int) -> dict:
    """Return the figures of a step, and the time in which memory alone reads weights and cache once."""
    replayed = _replayed(compiled)
    bound = sum(compiled.facts["state"].values()) / compiled.topology.hbm_bandwidth
    return {
        "step_seconds": replayed.seconds, "tokens_per_second": rows / replayed.seconds,
        "tokens_per_second_per_device": rows / replayed.seconds / compiled.topology.chips,
        "bound_seconds": bound, "times_the_bound": replayed.seconds / bound,
        "seconds_by_category": dict(seconds_by_category(replayed)),
    }  # fmt: skip


def sections(report: dict) -> list[Section]:
    """Return the sections of a report."""
    hbm = report["hbm_gib"]
    lines = [
        f"{report['num_parameters']:,} parameters; mesh {mesh_text(report['mesh'])}; "
        f"{counted(report['rows'], 'row')} of {report['length']:,} tokens"
    ]
    head = Section(f"{report['recipe']} on {report['topology']}: decoding on {counted(report['chips'], 'chip')}", lines)
    title = f"{'FITS' if report['fits'] else 'DOES NOT FIT'}: {hbm['total']:.1f} of {hbm['capacity']:.0f} GiB a chip"
    bars = tuple((name, hbm[name], f"{hbm[name]:.2f} GiB") for name in ("weights", "cache", "temporary"))
    memory = Section(title, [], (), bars, max(hbm["capacity"], hbm["total"]), bad=not report["fits"])
    if report["decode"] is None:
        return [head, memory, Section("TIME: unknown, as a program does not compile", [], bad=True)]
    return [head, memory, _prefill_section(report["prefill"]), _decode_section(report)]


def _prefill_section(prefill: dict) -> Section:
    title = f"PREFILL: {seconds_text(prefill['seconds'])} for all prompts, {prefill['tokens_per_second']:,.0f} tokens/s"
    line = (
        f"{counted(prefill['calls'], 'call')} of {counted(prefill['rows_of_a_call'], 'row')} x "
        f"{prefill['tokens_of_a_row']} tokens, {seconds_text(prefill['call_seconds'])} each"
    )
    return Section(title, [line], (), seconds_bars(prefill["seconds_by_category"]), prefill["call_seconds"])


def _decode_section(report: dict) -> Section:
    decode = report["decode"]
    rate = f"{decode['tokens_per_second']:,.0f} tokens/s ({decode['tokens_per_second_per_device']:,.0f} a chip)"
    line = (
        f"{decode['times_the_bound']:.2f} times the bound of {seconds_text(decode['bound_seconds'])}, in which memory "
        "reads weights and cache once"
    )
    assumed = Table(("what the estimate assumes", "value", "source"), report["assumptions"])
    title = f"DECODE: {seconds_text(decode['step_seconds'])} a step, {rate}"
    return Section(title, [line], (assumed,), seconds_bars(decode["seconds_by_category"]), decode["step_seconds"])
