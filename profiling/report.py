# SPDX-License-Identifier: Apache-2.0
"""The content of profile.json from the figures of all processes, and its summary for the terminal."""

import statistics

from input_pipeline.cache import cache_folder
from profiling import energy
from rehearsal import memory
from rehearsal.compilation import device_bytes, state_bytes
from rehearsal.compiler import CompileError, Compiler
from rehearsal.estimate import estimate
from rehearsal.sections import SPENT, seconds_text
from reporting import preflight
from reporting.display import aligned
from reporting.throughput import GIB

SHOWN = 8  # rows of a table on the terminal
OF_ALL = ("seconds_by_class", "idle_share", "exposed_collective_seconds", "flops", "bytes")  # means over processes
OF_FIRST = (
    "by_file", "operations", "memory_gib", "rows", "flops_model", "peak_flops", "peak_bytes_per_second", "platform",
    "num_steps", "callback_share", "not_donated_gib",
)  # fmt: skip


def memory_gib(run, compiled, module) -> dict[str, float]:
    """Return the GiB of a device by class, as a rehearsal has them, and their total, by the compiler's count."""
    no_time = dict.fromkeys((i.name for i in module.computations[module.entry]), 0.0)
    total = preflight.compiled_bytes(compiled)
    at_peak = memory.usage(module, no_time).by_class()
    parts = memory.breakdown(at_peak, state_bytes(run), device_bytes(run.abstract_frozen), total) | {"total": total}
    return {name.replace(" ", "_"): size / GIB for name, size in parts.items()}


def not_donated_gib(run, compiled) -> float:
    """Return the GiB of the state that the step does not update in place."""
    kept, state = compiled.memory_analysis().alias_size_in_bytes, state_bytes(run)
    return max(0, sum(size for name, size in state.items() if name != "batch") - kept) / GIB


def joined(processes: list[dict]) -> dict:
    """Return the figures of a run from the figures of its processes; a figure that no process has is None.

    Tables and memory come from the first process, since all run the same program.
    """
    first = processes[0]
    steps = [one["step_seconds"] for one in processes if one.get("step_seconds")]
    found = {name: first.get(name) for name in OF_FIRST} | {name: _mean(processes, name) for name in OF_ALL}
    seconds = {name: max(one[name] for one in steps) for name in steps[0]} if steps else None
    busy = {f"{one['host']}, {name}": s for one in processes for name, s in one.get("busy_seconds", {}).items()}
    host_seconds = {one["host"]: one["host_seconds"] - one["phases"].get("wait", 0.0) for one in processes}
    peaks = [gib for one in processes for gib in one["device_peak_gib"] or ()]
    joules = [one["joules"] for one in processes]
    wall = statistics.fmean(one["host_seconds"] for one in processes)
    return found | {
        "processes": len(processes), "devices": len(busy) or None,
        "step_seconds": seconds, "host_step_seconds": wall,
        "data_wait_share": statistics.fmean(one["phases"].get("data", 0.0) for one in processes) / wall,
        "host_seconds_by_phase": first["phases"],
        "device_imbalance": _imbalance(busy), "host_imbalance": _imbalance(host_seconds),
        "joules_per_step": None if None in joules else sum(joules) / first["num_steps"],
        "device_peak_gib": {"least": min(peaks), "most": max(peaks)} if peaks else None,
    }  # fmt: skip


def _mean(processes: list[dict], name: str):
    values = [one[name] for one in processes if name in one]
    if values and isinstance(values[0], dict):
        keys = sorted({key for one in values for key in one}, key=lambda key: -values[0].get(key, 0.0))
        return {key: statistics.fmean(one.get(key, 0.0) for one in values) for key in keys}
    return statistics.fmean(values) if values else None


def _imbalance(seconds: dict[str, float]) -> dict | None:
    """Return by how much the slowest exceeds the mean, as a share, and its name; None for fewer than two."""
    mean = statistics.fmean(seconds.values()) if len(seconds) > 1 else 0.0
    if not mean:
        return None
    slowest = max(seconds, key=seconds.get)
    return {"excess": seconds[slowest] / mean - 1, "slowest": slowest}


def rehearsed(config, topology) -> dict:
    """Return {"rehearsed": estimated seconds}: of the step, and by class.

    The value is None if the cache has no rehearsal of this very step, or only a refused or unreadable one.
    """
    compiler = Compiler(cache_folder(config.data.cache_dir) / "rehearsals")
    if topology is None or not compiler.is_cached(config, topology):
        return {"rehearsed": None}
    try:
        found = estimate(compiler.compile(config, topology))
    except (CompileError, ValueError):  # a ConfigError is a ValueError
        return {"rehearsed": None}
    return {"rehearsed": {"step_seconds": found["step_seconds"], "seconds_by_class": found.get("seconds_by_category")}}


def rates(whole: dict, job) -> dict:
    """Return MFU, rates and energy; what is unknown is None."""
    seconds = (whole["step_seconds"] or {}).get("mean")
    per_second = {name: whole[name] / seconds if seconds and whole[name] else None for name in ("flops", "bytes")}
    peak, known, used = whole["peak_flops"], preflight.known_topology(job.topology), None
    chip, tokens = known and known.chip, whole["rows"] * job.config.train.sequence_length
    if seconds and whole["joules_per_step"] is not None:
        used = energy.measured(whole["joules_per_step"], job.run.mesh.size, seconds, tokens)
    elif seconds and whole["idle_share"] is not None:
        used = energy.of_step(chip, job.run.mesh.size, seconds, 1 - whole["idle_share"], tokens)
    return {
        "flops_per_second": per_second["flops"], "bytes_per_second": per_second["bytes"],
        "mfu": whole["flops_model"] / seconds / peak if seconds and peak else None, "energy": used,
    }  # fmt: skip


def described(whole: dict) -> dict:
    """Return the notes on what the trace does not have, the lines of the summary, and its tables."""
    return {"notes": _notes(whole), "summary": _summary(whole), "tables": _tables(whole)}


def lines(whole: dict) -> list[str]:
    """Return what the terminal shows."""
    found = [
        f"PROFILE of steps {whole['steps'][0]} to {whole['steps'][1]}",
        *(f"  {line}" for line in whole["summary"]),
    ]
    for table in whole["tables"]:
        rows = aligned([table["columns"], *table["rows"][:SHOWN]])
        more = len(table["rows"]) - SHOWN
        found += ["", f"  {table['title']}", *(f"    {row}" for row in rows)]
        found += [f"    and {more} more in profile.json"] if more > 0 else []
    advice = [f"  advice: {one['line']}" for one in whole["advice"]] or ["  advice: nothing to change"]
    return [*found, "", *advice, *(f"  not in this trace: {note}" for note in whole["notes"]), ""]


def _notes(whole: dict) -> list[str]:
    platform, found = whole["platform"], []
    if whole["seconds_by_class"] is None:
        found.append("any instruction of the step; this platform's trace has none, so only the host's times are known")
    elif whole["step_seconds"] is None:
        found.append("the runs of the program, so the times of single steps are unknown")
    if graphs := [row["name"] for row in whole["operations"] or () if row["name"].startswith("command_buffer")]:
        found.append(
            f"the operations of {graphs[0]}, which XLA records as a CUDA graph; with "
            "XLA_FLAGS=--xla_gpu_enable_command_buffer= in the environment it launches each"
        )
    if whole["peak_bytes_per_second"] is None:
        advice = "" if platform == "cpu" else "; --topology names hardware whose bandwidth is known"
        found.append(f"a bandwidth of main memory to compare with{advice}")
    if whole["device_peak_gib"] is None:
        found.append(f"memory in use; the {platform} backend does not report it, so the compiler's count is shown")
    if whole["energy"] is None:
        found.append("energy; NVML measures none here, and no power of this chip is published")
    if whole["rehearsed"] is None:
        found.append("a rehearsal of the same step; rehearse.py with the same options makes one")
    return found


def _summary(whole: dict) -> list[str]:
    found, steps = [], whole["step_seconds"]
    if steps:
        found.append(
            f"a step: {seconds_text(steps['mean'])} on average, median {seconds_text(steps['p50'])}, 90 % at most "
            f"{seconds_text(steps['p90'])}, longest {seconds_text(steps['max'])}"
        )
    if whole["idle_share"] is not None:
        exposed = seconds_text(whole["exposed_collective_seconds"])
        found.append(f"devices idle {whole['idle_share']:.1%} of the time; exposed collectives {exposed} a step")
    found.append(f"waiting for input {whole['data_wait_share']:.1%} of the time")
    if whole["flops_per_second"]:
        share = f" of {whole['peak_flops'] / 1e12:.3g} TFLOP/s; MFU {whole['mfu']:.1%}" if whole["peak_flops"] else ""
        found.append(f"a device: {whole['flops_per_second'] / 1e12:.3g} TFLOP/s{share}")
    for what, name in (("device", "device_imbalance"), ("host", "host_imbalance")):
        if whole[name]:
            found.append(f"slowest {what}: {whole[name]['slowest']}, {whole[name]['excess']:.1%} above the mean")
    memory_, peak = whole["memory_gib"], whole["device_peak_gib"]
    parts = ", ".join(f"{name.replace('_', ' ')} {gib:.2f}" for name, gib in memory_.items() if name != "total")
    found.append(f"memory of a device: {memory_['total']:.2f} GiB by the compiler ({parts})")
    if peak:
        found.append(f"most memory in use: {peak['most']:.2f} GiB; on the device with the least {peak['least']:.2f}")
    if used := whole["energy"]:
        found.append(
            f"energy, {'an estimate' if used['estimate'] else 'measured'}: {used['joules_per_step']:,.0f} J a step, "
            f"{1000 * used['joules_per_token']:.3g} mJ a token ({used['source']})"
        )
    return found


def _tables(whole: dict) -> list[dict]:
    if whole["seconds_by_class"] is None:
        return []
    total, estimated = sum(whole["seconds_by_class"].values()), whole["rehearsed"]
    rows = [
        [SPENT.get(name, name), seconds_text(seconds), f"{seconds / total:.1%}"]
        + ([seconds_text((estimated["seconds_by_class"] or {}).get(name, 0.0))] if estimated else [])
        for name, seconds in whole["seconds_by_class"].items()
    ]
    columns = ["class", "A step", "Share", *(["Rehearsed"] if estimated else [])]
    files = [
        [row["file"], row["part"], seconds_text(row["seconds"]), f"{row['share']:.1%}"] for row in whole["by_file"]
    ]
    operations = [
        [row["name"], row["part"], row["source"] or "-", seconds_text(row["seconds"]), f"{row['share']:.1%}",
         f"{row['flops_per_second'] / 1e9:,.0f}", f"{row['bytes_per_second'] / 1e9:,.1f}", row["bound"] or "-"]
        for row in whole["operations"]
    ]  # fmt: skip
    return [
        {"title": "time of a device by class", "columns": columns, "rows": rows},
        {"title": "by file", "columns": ["file", "part", "A step", "Share"], "rows": files},
        {
            "title": "heaviest operations",
            "columns": ["operation", "part", "line", "A step", "Share", "GFLOP/s", "GB/s", "nearer to the peak of"],
            "rows": operations,
        },
    ]
