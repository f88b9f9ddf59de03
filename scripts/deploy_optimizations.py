# SPDX-License-Identifier: Apache-2.0
"""Compile the train step with the enabled switches on this host, run it three times, and report its time and memory.

Also rehearses the step for the slice of --topology: naive, as `launch` trains it, and with the switches.

    python scripts/deploy_optimizations.py [--config=configs/optimization_config.json] [--config=configs/large.py]
        [--model-size=medium] [--sequence-length=512] [--disable-tpu] [--disable-causal] ... [--ahead]
        [train.py's arguments]

A JSON file contains switches and sizes; it is data. A recipe is code, so it can only be given as an argument.

`pod.py setup_optimizations` runs this script on all hosts of a pod as one process group. Each host writes its
optimization_deployment_report.json: the given switches, what each costs, and measured seconds, tokens/s and memory.
With --ahead the script uses no device, because a run holds them: all figures are those of rehearsals.
"""

import functools
import json
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from core import command_line  # first: it restarts in the workspace's Python

from core.overrides import split_overrides
from configs.errors import ConfigError
from pods import deploy, records, switches
from pods.errors import PodError

if __name__ == "__main__":
    try:
        SWITCHES, ARGUMENTS, SEARCH_STEPS, AHEAD = deploy.resolve(sys.argv, __doc__)
    except (ConfigError, PodError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    sys.argv[1:] = ARGUMENTS
    if AHEAD:
        os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported
        LOADED = command_line.parse_configuration(__doc__, use=lambda flags: command_line.IGNORE)
    else:
        COMMAND = command_line.parse(__doc__, use=lambda flags: command_line.IGNORE)
        LOADED = COMMAND.loaded
    command_line.ending.continues(False)

import jax
import numpy as np

from causality import explanation
from core import assembly, batch_fit
from settings import loading, validation
from settings.keys import flat
from cluster import identity, processes
from input_pipeline.cache import cache_folder
from parallelism.mesh import mesh_context
from rehearsal.layouts import ways
from rehearsal.compiler import Compiler, check_compiler
from reporting import preflight
from reporting.step_log import NonFinite

STEPS = 3
BASELINE, LAUNCH, OPTIMIZED = "naive", "launch", "launch_optimized"  # names of rehearsed ways
COSTS = ("step_seconds", "memory_gib_per_device")


def measure(config) -> dict:
    """Compile the real step, run it on random tokens, and return its time and memory."""
    config = config.copy_and_resolve_references()
    batch_fit.fit_batch(config, print)
    run, started = assembly.assemble(config), time.perf_counter()
    step = run.compile()
    compiled = time.perf_counter() - started
    seconds, losses = [], []
    with mesh_context(run.mesh):
        shardings = {name: array.sharding for name, array in run.abstract_batch.items()}
        state, draw = run.init(), jax.jit(run.objective.random_batch, out_shardings=shardings)
        for batch in [draw(jax.random.key(number)) for number in range(STEPS)]:
            started = time.perf_counter()
            state, scalars = step(state, batch, {})
            losses.append(float(jax.block_until_ready(scalars["loss"])))
            seconds.append(time.perf_counter() - started)
    if not np.isfinite(losses).all():
        raise NonFinite(f"the losses of {STEPS} steps on random tokens are {losses}; no report is written")
    step_seconds = sum(seconds[1:]) / (STEPS - 1)
    return {
        "compile_seconds": compiled,
        "first_step_seconds": seconds[0],
        "step_seconds": step_seconds,
        "tokens_per_second": config.train.global_batch * config.train.sequence_length / step_seconds,
        "memory_gib_per_device": preflight.compiled_gib(step),
        "losses": losses,
        "parameters": run.models.num_parameters,
        "flops_per_step": run.flops_per_step,
        "mesh": dict(config.mesh),
    }


def without(config, names: list[str]):
    """Return a configuration in which the keys of switches have the recipe's values, unless others were typed."""
    topology, changed = LOADED.topology, config.copy_and_resolve_references()
    recipe = loading.load(LOADED.path, topology.name if topology else "", {}).config
    with changed.unlocked():
        for key, value in [pair for name in names for pair in switches.SWITCHES[name].items()]:
            section, _, last = key.partition(".")
            if changed[section][last] == value:
                changed[section][last] = recipe[section][last]
    return changed


def costs(config, measured: dict) -> dict[str, dict[str, float]]:
    """Return what each switch adds: to the step and its memory, to each evaluation, or before the training."""
    found = {}
    for name in SWITCHES.on:
        if name == switches.EVOLUTION:
            found[name] = {"search_seconds": SEARCH_STEPS * measured["step_seconds"]}
        elif name == switches.CAUSAL:
            found[name] = {"evaluation_seconds": explaining_seconds(config)}
        else:
            off = measure(without(config, [name]))
            found[name] = {key: measured[key] - off[key] for key in COSTS}
    return found


def rehearse(more: list[str]) -> dict:
    """Return the figures of all ways of training the recipe, and how the ways compare; {"error": text} without them.

    The step is also rehearsed without each switch in `more`.
    """
    topology = LOADED.topology
    if topology is None or topology.accelerator != "tpu":
        return {"error": "only a slice of TPUs, named by --topology, can be rehearsed"}
    check_compiler(topology)
    overrides, _ = split_overrides(sys.argv)
    config = loading.load(LOADED.path, topology.name, overrides, os.environ).config  # whole: nothing is scaled down
    validation.validate(config, topology.chips)
    plain, others = without(config, SWITCHES.on), [name for name in SWITCHES.on if name != switches.TPU_OPT]
    wanted = {LAUNCH: plain}
    if switches.TPU_OPT in SWITCHES.on:
        wanted[switches.TPU_OPT] = without(config, others)
    wanted |= {OPTIMIZED: config} | {f"without {name}": without(config, [name]) for name in more}
    cache, announce = cache_folder(config.data.cache_dir) / "rehearsals", functools.partial(print, flush=True)
    of_baseline = Compiler(cache, precision=ways.NAIVE_PRECISION)
    found = ways.rehearse({BASELINE: ways.naive(plain, topology)}, topology, of_baseline, announce)
    found |= ways.rehearse(wanted, topology, Compiler(cache), announce)
    compared = {
        name: [ways.factors(found, name, baseline) for baseline in (BASELINE, LAUNCH) if baseline != name]
        for name in (LAUNCH, switches.TPU_OPT, OPTIMIZED)
        if name in found
    }
    naive = {"naive_keys": ways.NAIVE, "naive_precision": ways.NAIVE_PRECISION}
    return {"topology": topology.name, **naive, "ways": found, "factors": compared}


def rehearsed_costs(rehearsed: dict) -> dict[str, dict[str, float | None]]:
    """Return what each switch adds by rehearsal; None is a figure that only a device can give."""
    found, compared = {}, rehearsed["ways"]
    for name in SWITCHES.on:
        other = compared[LAUNCH] if name == switches.TPU_OPT else compared.get(f"without {name}", {})
        mine = compared[switches.TPU_OPT if name == switches.TPU_OPT else OPTIMIZED]
        if name == switches.EVOLUTION:
            step = mine.get("step_seconds")
            found[name] = {"search_seconds": step and SEARCH_STEPS * step}
        elif name == switches.CAUSAL:
            found[name] = {"evaluation_seconds": None}
        else:
            known = [key for key in COSTS if mine.get(key) and other.get(key)]
            found[name] = dict.fromkeys(COSTS) | {key: mine[key] - other[key] for key in known}
    return found


def explaining_seconds(config) -> float:
    """Return the time of one causal analysis of two prompts, without its compilation."""
    run = assembly.assemble(config)
    tokens = np.arange(1, 1 + min(16, config.model.vocab_size // 2, config.model.max_length), dtype=np.int32)
    with mesh_context(run.mesh):
        params = run.eval_params(run.init(), {})
        for _ in range(2):
            started = time.perf_counter()
            explanation.explain(run.graph, params, tokens, tokens[::-1].copy(), str)
    return time.perf_counter() - started


def ahead() -> None:
    """Rehearse without a device, and write the report; ConfigError if the step cannot run on the slice."""
    print("\n".join(SWITCHES.lines()), flush=True)
    more = [name for name in SWITCHES.on if switches.SWITCHES[name] and name not in (switches.TPU_OPT, switches.CAUSAL)]
    rehearsed = rehearse(more)
    if not (whole := rehearsed.get("ways", {}).get(OPTIMIZED, rehearsed)).get("fits"):
        raise ConfigError(f"the step with these switches is not ready: {ways.text(whole)}")
    report = {"switches": SWITCHES.record() | {"cost": rehearsed_costs(rehearsed)}, "measured": deploy.WAITS,
              "rehearsed": rehearsed, "config": flat(LOADED.config)}  # fmt: skip
    write(report)
    print("\n".join([*summary(report), deploy.REPORT]))


def main() -> None:
    """Measure the step and write the report in the current folder."""
    config = COMMAND.config
    command_line.join(COMMAND, shares_folder=False)
    first = processes.index() == 0
    if first:
        print("\n".join([*SWITCHES.lines(), *COMMAND.banner()]), flush=True)
    measured, plain = measure(config), measure(without(config, SWITCHES.on))
    report = {
        "switches": SWITCHES.record() | {"cost": costs(config, measured)},
        "simulated": COMMAND.scaled_down is not None,
        "process": processes.index(),
        "num_processes": processes.count(),
        "num_devices": jax.device_count(),
        "device_kind": jax.devices()[0].device_kind,
        **measured,
        LAUNCH: {key: plain[key] for key in (*COSTS, "tokens_per_second")},
        "rehearsed": rehearsal_or_reason() if first else None,
        "config": flat(config),
    }
    write(report)
    if first:
        print(
            f"{report['num_devices']} devices ({report['device_kind']}), {report['num_processes']} processes: "
            f"compiled in {report['compile_seconds']:.1f} s, {report['step_seconds']:.3f} s a step, "
            f"{report['tokens_per_second']:,.0f} tokens/s, "
            f"{report['memory_gib_per_device']:.2f} GiB a device; on: {', '.join(SWITCHES.on) or 'nothing'}; "
            f"{deploy.REPORT}"
        )
        print("\n".join(summary(report)))
    processes.leave()


def summary(report: dict) -> list[str]:
    """Return a line for the cost of each switch, and one for each comparison of two ways."""
    units = {
        "step_seconds": "s a step", "memory_gib_per_device": "GiB a device", "evaluation_seconds": "s an evaluation",
        "search_seconds": "s before the training",
    }  # fmt: skip
    lines = []
    for name, cost in report["switches"]["cost"].items():
        known = [f"{value:+.3g} {units[key]}" for key, value in cost.items() if value is not None]
        lines.append(f"{name}: {', '.join(known) or deploy.WAITS}")
    for name, compared in report["rehearsed"].get("factors", {}).items():
        for one in compared:
            speed, memory = (
                f"{one[key]:.2f}" if one[key] else "unknown" for key in ("times_faster", "times_less_memory")
            )
            lines.append(f"{name}, rehearsed: {speed} times the speed of {one['baseline']}, its memory / {memory}")
    return lines


def rehearsal_or_reason() -> dict:
    """Return the rehearsal, or why there is none: the measured figures do not depend on it."""
    try:
        return rehearse([])
    except ConfigError as error:
        return {"error": str(error)}


def write(report: dict) -> None:
    """Write the report with what identifies the code."""
    commit, changed = records.code_state()
    about = {"arguments": ARGUMENTS, "versions": identity.versions(), "commit": commit, "changed_files": changed}
    about |= {"code": identity.code_digest(), "time": time.time()}
    pathlib.Path(deploy.REPORT).write_text(json.dumps(report | about, indent=1))


if __name__ == "__main__":
    ahead() if AHEAD else main()
