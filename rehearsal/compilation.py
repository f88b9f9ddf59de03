# SPDX-License-Identifier: Apache-2.0
"""The process that compiles. Arguments of `main`: the folder to write into, the request as JSON, the parent's id.

The process assembles the run on the devices of a topology description, and compiles it as train.py does.
"""

import contextlib
import dataclasses
import functools
import gzip
import json
import pathlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental.topologies import get_topology_desc

from cluster.parent import end_with
from configs import topologies
from configs.errors import ConfigError, is_too_large
from core import decoding
from core.assembly import Run, assemble
from core.models import with_sharding
from inference import batching, rows
from inference.choice import Sampling, choice_of
from inference.engine import Engine
from layers.axes import bytes_of_device
from models import decoder_lm
from parallelism.mesh import mesh_context
from rehearsal import sealed
from rehearsal.compiler import EVALUATION, FACTS, PROGRAM, SAMPLE, Call, digest, first_line, is_whole
from reporting import preflight, throughput
from settings.keys import from_flat
from training import offload
from training.platform_defaults import UNROLLED_LAYERS

PROMPT = 16  # tokens of a sample's prompt


def main() -> None:
    """Compile the request of the command line, then write facts and program atomically into the named folder."""
    folder, request, parent = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    end_with(parent)
    topology = dataclasses.replace(topologies.get(request["topology"]), chips=request["chips"])
    try:
        config, call = from_flat(request["config"]), request.get("call")
        facts, text = compile_call(config, topology, Call(**call)) if call else compile_step(config, topology)
    except ConfigError as error:
        facts, text = {"error": {"kind": "ConfigError", "message": str(error)}}, ""
    program = gzip.compress(text.encode(), compresslevel=3)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder.parent, ignore_cleanup_errors=True) as name:
        unfinished = pathlib.Path(name)
        unfinished.chmod(0o755)  # other users may share the cache
        (unfinished / PROGRAM).write_bytes(program)
        sealed.write(unfinished / FACTS, facts | {"program_sha256": digest(unfinished / PROGRAM)})
        if not is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        with contextlib.suppress(OSError):  # another process was faster
            unfinished.rename(folder)


def compile_step(config, topology) -> tuple[dict, str]:
    """Compile a step; return the facts, or {"error": ...}, and the program as text, "" if there is none."""
    config.train.steps = config.train.steps or 1000
    run = _assembled(config, topology)
    facts = {
        "state": state_bytes(run),
        "on_host": device_bytes(run.abstract_state, on_host=True),
        "frozen": device_bytes(run.abstract_frozen),
        "decoded": run.objective.decoded(),
        "steps_of_batch": run.objective.steps_of_batch,
        "num_microbatches": run.num_microbatches,
        "flops_per_step": run.flops_per_step,
        "device_coordinates": [list(getattr(device, "coords", ())) for device in run.mesh.devices.flat],
    }
    facts, text = _compiled(run, facts, run.compile)
    if topology.accelerator == "cpu" and text:
        facts["measured_peak_flops"] = throughput.measured_matmul_peak()
    return facts, text


def _assembled(config, topology) -> Run:
    if topology.accelerator == "gpu":
        _compute_as_gpu(config, topology.chips)
    return assemble(config, devices=devices(topology))


def _compute_as_gpu(config, chips: int) -> None:
    """Let this process, whose CPU replaces the GPU, compute as a GPU would."""
    decoder_lm.KERNELS["cpu"] = "rehearsal.gpu_attention"
    few = config.model.num_layers <= UNROLLED_LAYERS["gpu"]
    unrolled = chips == 1 and few and config.model.remat == "none"  # a CPU's remat saves memory in a scan alone
    automatic = {"dtype": "bfloat16", "layer_loop": "unroll" if unrolled else "scan"}
    config.model.update({key: value for key, value in automatic.items() if config.model[key] == "auto"})
    config.train.gradient_accumulation = config.train.gradient_accumulation or 1


def compile_call(config, topology, call: Call) -> tuple[dict, str]:
    """Compile a program of inference/rows.py; return the same as `compile_step`."""
    run = _assembled(config, topology)
    if call.name in (EVALUATION, SAMPLE):
        return _compile_phase(run, call)
    with mesh_context(run.mesh):
        engine = batching.with_padding(Engine(run.graph, decoding.weights(run), call.length, call.cache_dtype))
        shape = call.rows, engine.head_size()
        shardings = rows.empty.lower(engine, *shape).compile().output_shardings
        held = jax.tree.map(with_sharding, jax.eval_shape(functools.partial(rows.empty, engine, *shape)), shardings)
        lower, tokens = _lower(engine, held, call)
        facts = {"state": {"weights": device_bytes(engine.params), "cache": device_bytes(held.cache)}, "tokens": tokens}
        return _compiled(run, facts, lambda: lower().compile())


def _compile_phase(run, call: Call) -> tuple[dict, str]:
    """Compile an evaluation of a batch, or the prefill of a sample, with the parameters of the training state."""
    params = run.eval_params(run.abstract_state, run.abstract_frozen)
    facts = {"state": {"weights": device_bytes(params)}}
    with mesh_context(run.mesh):
        if call.name == SAMPLE:
            engine = Engine(run.graph, params, call.length, call.cache_dtype)
            lowered = Engine.prefill.lower(engine, np.zeros((call.rows, PROMPT), np.int32))
            return _compiled(run, facts, lowered.compile)
        read = [model.role for model in run.objective.frozen_models() if model.evaluates]
        facts["state"]["weights"] += device_bytes([run.abstract_frozen[role] for role in read])
        batch = {
            name: jax.ShapeDtypeStruct((run.eval_rows, *one.shape[1:]), one.dtype, sharding=one.sharding)
            for name, one in run.abstract_batch.items()
        }
        return _compiled(run, facts, run.eval_step.lower(params, batch, run.abstract_frozen).compile)


def _lower(engine: Engine, held: rows.Rows, call: Call) -> tuple[Callable, tuple[int, int]]:
    """Return (what lowers the program, the rows and the tokens a row that it computes); tokens are drawn greedily."""
    if call.name == "decode":
        greedy = choice_of([(Sampling(temperature=0.0), 0)] * call.rows)
        given = jax.jit(
            lambda engine, held, active: rows.decode(engine, held, active, greedy, False), donate_argnames="held"
        )
        return lambda: given.lower(engine, held, np.ones(call.rows, bool)), (call.rows, 1)
    _, count = batching.rows_of_chunks(call.rows)
    size = max(size for size in batching.CHUNKS if size <= max(call.length, batching.CHUNKS[0]))
    tokens_RT = np.zeros((count, size), np.int32)
    return lambda: rows.extend.lower(engine, held.cache, np.arange(count), tokens_RT), (count, size)


def _compiled(run: Run, facts: dict, compile_program: Callable) -> tuple[dict, str]:
    """Return (the facts with those of a compilation, or {"error": ...}, the program as text, "" if there is none)."""
    facts |= {"mesh": dict(run.mesh.shape), "num_parameters": run.models.num_parameters, "out_of_memory": False}
    began = time.monotonic()
    try:
        compiled = compile_program()
    except jax.errors.JaxRuntimeError as error:
        if not is_too_large(str(error)):
            message = first_line(f"{type(error).__name__}: {error}")
            return {"error": {"kind": "CompileError", "message": message}}, ""
        return facts | {"out_of_memory": True, "total_bytes": needed_bytes(str(error))}, ""
    facts |= {"total_bytes": preflight.compiled_bytes(compiled), "compile_seconds": time.monotonic() - began}
    return facts, compiled.as_text()


def devices(topology) -> list:
    """Return the devices to compile for: the chips of a topology description, or CPU devices in their place."""
    if topology.accelerator != "tpu":
        return jax.devices()
    # A v4 or v5p chip is one device of two cores ("megacore"); hosts of these have 2 x 2 x 1 chips.
    two_cores = {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1)}
    more = two_cores if topology.compiler_name.startswith(("v4:", "v5p:")) else {}
    more |= {"chips_per_host_bounds": (1, 1, 1)} if topology.chips == 1 else {}
    slices = {"num_slices": topology.slices} if topology.slices > 1 else {}
    description = get_topology_desc(platform="tpu", topology_name=topology.compiler_name, **more, **slices)
    return description.devices[: topology.chips]


def state_bytes(run) -> dict[str, int]:
    """Return the bytes of one device's state and batch, by part."""
    state = run.abstract_state
    parts = {
        "parameters": state.params, "extra": state.extra, "optimizer": state.optimizer, "carry": state.carry,
        "batch": run.abstract_batch,
    }  # fmt: skip
    return {name: device_bytes(part) for name, part in parts.items()}


def device_bytes(tree, *, on_host: bool = False) -> int:
    """Return the bytes of one device's arrays in its own memory, or in its host's memory."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if (leaf.sharding.memory_kind == offload.HOST) is on_host]
    return bytes_of_device(leaves)


def needed_bytes(message: str) -> float:
    """Return the bytes that a program needs, from the compiler's message that it does not fit.

    The message counts arguments as HLO temporaries: with 6.1 GiB of moments on the host they are 5.6 GiB less.
    """
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    for words in ("Total hbm usage >= {}", r"HLO temporaries \({}\)", "Used {} of"):
        if found := re.search(words.format(r"([\d.]+)([KMGT])"), message):
            return float(found[1]) * units[found[2]]
    raise ValueError(f"the compiler's message does not say how much memory is missing: {message[:300]}")
