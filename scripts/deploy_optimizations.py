# SPDX-License-Identifier: Apache-2.0
"""Compile the train step with the enabled switches on this host, run it three times, and report its time and memory.

    python scripts/deploy_optimizations.py [--config=configs/optimization_config.json] [--config=configs/large.py]
        [--model-size=medium] [--sequence-length=512] [--disable-tpu] [--disable-causal] ... [train.py's arguments]

A JSON file contains switches and sizes; it is data. A recipe is code, so it can only be given as an argument.

`pod.py setup_optimizations` runs this script on all hosts of a pod as one process group. Each host writes its
optimization_deployment_report.json: the given switches, what each costs, and measured seconds, tokens/s and memory.
"""

import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from core import command_line  # first: it restarts in the workspace's Python

from core import batch_fit
from pods import deploy, records, switches
from pods.errors import PodError

if __name__ == "__main__":
    try:
        SWITCHES, ARGUMENTS, SEARCH_STEPS = deploy.resolve(sys.argv, __doc__)
    except PodError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    sys.argv[1:] = ARGUMENTS
    COMMAND = command_line.parse(__doc__, use=lambda flags: command_line.IGNORE)

import jax
import numpy as np

from causality import explanation
from core import assembly
from settings import loading, validation
from settings.keys import flat
from cluster import identity, processes
from parallelism.mesh import mesh_context
from reporting import preflight
from reporting.step_log import NonFinite

STEPS = 3


def measure(config) -> dict:
    """Compile the real step, run it on random tokens, and return its time and memory."""
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


def without(config, name: str):
    """Return a configuration in which the keys of a switch have the recipe's values, unless others were typed."""
    loaded, changed = COMMAND.loaded, config.copy_and_resolve_references()
    recipe = loading.load(loaded.path, loaded.topology.name if loaded.topology else "", {}).config
    with changed.unlocked():
        for key, value in switches.SWITCHES[name].items():
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
            off = measure(without(config, name))
            found[name] = {key: measured[key] - off[key] for key in ("step_seconds", "memory_gib_per_device")}
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


def main() -> None:
    """Measure the step and write the report in the current folder."""
    config = COMMAND.config
    command_line.join(COMMAND, shares_folder=False)
    if COMMAND.num_devices is None:
        validation.validate(config, jax.device_count())
    first = processes.index() == 0
    if first:
        print("\n".join([*SWITCHES.lines(), *COMMAND.banner()]), flush=True)
    commit, changed = records.code_state()
    measured = measure(config)
    report = {
        "switches": SWITCHES.record() | {"cost": costs(config, measured)},
        "arguments": ARGUMENTS,
        "simulated": COMMAND.scaled_down is not None,
        "process": processes.index(),
        "num_processes": processes.count(),
        "num_devices": jax.device_count(),
        "device_kind": jax.devices()[0].device_kind,
        **measured,
        "config": flat(config),
        "versions": identity.versions(),
        "commit": commit,
        "changed_files": changed,
        "code": identity.code_digest(),
        "time": time.time(),
    }
    pathlib.Path(deploy.REPORT).write_text(json.dumps(report, indent=1))
    if first:
        print(
            f"{report['num_devices']} devices ({report['device_kind']}), {report['num_processes']} processes: "
            f"compiled in {report['compile_seconds']:.1f} s, {report['step_seconds']:.3f} s a step, "
            f"{report['tokens_per_second']:,.0f} tokens/s, "
            f"{report['memory_gib_per_device']:.2f} GiB a device; on: {', '.join(SWITCHES.on) or 'nothing'}; "
            f"{deploy.REPORT}"
        )
    processes.leave()


if __name__ == "__main__":
    main()
