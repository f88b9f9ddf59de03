# SPDX-License-Identifier: Apache-2.0
"""What does each optimization of the 7B step gain? Compiles the step as it is, and with one change at a time.

The topology is v4-32; for names with `over_model_` it is v4-64 with heads sharded over `model`. Names with `tried_` are
changes that gained nothing. A change is a key of the configuration, an option of the compiler, or a replaced part of
the code in the process that compiles. All times are estimates: the schedule of the TPU compiler is replayed, without
the order of chips in the mesh and the block sizes of the attention kernel. `costs` is the additional time of a step.
Arguments select some of the names.

`tried_other_prices` is an option with which the compiler makes almost the same program, but estimates its cycles
differently. It shows how far to trust the estimate. It makes nothing faster, so it is not used.
"""

import dataclasses
import statistics
import sys
from collections.abc import Sequence

import support

import rehearsed
from layers.block import REMAT
from rehearsal.compiler import Compiled, CompileError
from rehearsal.estimate import estimate

CASE = "tiny_v4-8" if support.QUICK else "llama2_7b_2048_v4-32"

CASE_OVER_MODEL = "llama2_7b_4x4x2_v4-64"
OTHER_PRICES = "xla_tpu_break_of_accum_cost_heuristic"
USED = "mlp"  # of REMAT, by the recipe
OVER_MODEL = "over_model_"  # begins the names of levers of the second case
QUICK = ("without_rings", "tried_latency_hiding_scheduler")


def replaced(module: str, name: str, by: str) -> str:
    """Return the program that replaces a name in a module; it fails if the module lacks the name."""
    return f"import jax, {module} as place; from layers import fsdp; place.{name}; place.{name} = {by}"


def option(name: str, value: str | None) -> str:
    """Return the program that passes an option to the compiler; None removes the option."""
    given = "from configs.topologies import COMPILER_OPTIONS; options = COMPILER_OPTIONS['tpu']"
    return f"{given}; del options[{name!r}]" if value is None else f"{given}; options[{name!r}] = {value!r}"


SCATTERED = "lambda x, axis, dim, *_: jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)"
LEVERS = {  # keys of the configuration, or a program
    "without_remat": {"model.remat": "none"},
    **{f"remat_{policy}": {"model.remat": policy} for policy in reversed(REMAT) if policy != USED},
    "loss_in_chunks_of_1024": {"train.loss_chunk_tokens": 1024},
    "sums_in_float32": {"train.sum_dtype": "float32"},
    "without_attention_kernel": {"model.attention": "reference"},
    "placed_by_the_compiler": replaced("core.assembly", "supports_shard_map", "lambda config: False"),
    "without_rings": replaced("layers.fsdp", "ring_reduce_scatter", SCATTERED),
    "without_mlp_summed_first": replaced(
        "layers.block", "all_gather_params_ordered",
        "lambda weights, axes, dtype, order: fsdp.all_gather_params(weights, axes, dtype)",
    ),
    "without_head_first": replaced("layers.fsdp", "_reduce_first", "lambda x, weight: (x, weight)"),
    "without_weight_first": replaced("layers.products", "_weight_first", "jax.numpy.einsum"),
    "without_kept_heads_first": replaced("layers.attention.kernels", "checkpoint_name", "lambda x, name: x"),
    "without_fused_backward_kernel": replaced("layers.attention.kernels", "DQ_PARTS", "0"),
    "without_rotary_by_product": replaced("layers.attention.rotary", "platform", "lambda: 'cpu'"),
    "without_async_all_gather": option("xla_enable_async_all_gather", None),
    "without_windowed_einsum_off": option("xla_jf_spmd_threshold_for_windowed_einsum_mib", None),
    "tried_one_chunk_of_loss": {"train.loss_chunk_tokens": 8192},
    "tried_latency_hiding_scheduler": option("xla_tpu_enable_latency_hiding_scheduler", "true"),
    "tried_async_collective_fusion": option("xla_tpu_enable_async_collective_fusion", "true"),
    "tried_async_fusion_of_all_gather": option("xla_tpu_enable_async_collective_fusion_fuse_all_gather", "true"),
    "tried_overlap_compute_collective": option("xla_tpu_overlap_compute_collective_tc", "true"),
    "tried_more_scoped_vmem": option("xla_tpu_scoped_vmem_limit_kib", "24576"),
    "tried_other_prices": option(OTHER_PRICES, "true"),
    "over_model_in_one_part": replaced("layers.block", "overlap_splits", "lambda batch: 1"),
    "over_model_placed_by_the_compiler": replaced("core.assembly", "supports_shard_map", "lambda config: False"),
}  # fmt: skip


def compiled_with(case: str, change: dict | str) -> tuple[Compiled, float]:
    """Return the step with one change, and the seconds of its compilation: 0 if it was cached."""
    keys, program = ({}, change) if isinstance(change, str) else (change, "")
    (recorded,), compiler = rehearsed.recorded([case]), rehearsed.compiler(program)
    loaded = dataclasses.replace(recorded, changes=recorded.changes | keys).load()
    return compiler.compile(loaded.config, loaded.topology), sum(compiler.spent)


def compare(name: str, compiled: Compiled, as_it_is: Compiled) -> dict:
    """Return the figures of one change."""
    found, usual = estimate(compiled), estimate(as_it_is)
    if not found["fits"]:
        return {name: f"does not fit: needs {found['hbm_gib']['total']:.1f} GiB"}
    if compiled.program() == as_it_is.program():
        return {name: "the same program"}
    return {
        f"{name}_step_seconds": round(found["step_seconds"], 4),
        f"{name}_costs_seconds": round(found["step_seconds"] - usual["step_seconds"], 4),
        f"{name}_gib": round(found["hbm_gib"]["total"], 2),
    }


def main() -> None:
    """Compile each step with each change, and compare."""
    parser = support.Parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="two of them, of the smallest step")
    parser.add_argument("names", nargs="*", metavar="NAME")
    given = parser.parse_args()
    names = QUICK if given.quick else given.names or tuple(LEVERS)
    if unknown := set(names) - LEVERS.keys():
        support.usage_error(f"{unknown.pop()} is not a lever; the levers are {', '.join(LEVERS)}")
    over_model = [name for name in names if name.startswith(OVER_MODEL)]
    figures = measure(CASE, "", [name for name in names if name not in over_model])
    support.finish("levers", figures | (measure(CASE_OVER_MODEL, OVER_MODEL, over_model) if over_model else {}))


def measure(case: str, prefix: str, names: Sequence[str]) -> dict:
    """Return the figures of a step as it is and with each change; names get a prefix."""
    as_it_is, seconds = compiled_with(case, {})
    usual, spent = estimate(as_it_is), [seconds] if seconds else []
    figures = {
        f"{prefix}as_it_is_step_seconds": round(usual["step_seconds"], 4),
        f"{prefix}as_it_is_mfu": round(usual["mfu"], 3),
        f"{prefix}as_it_is_gib": round(usual["hbm_gib"]["total"], 2),
        f"{prefix}as_it_is_exposed_seconds": round(usual["exposed_communication_seconds"], 3),
    }
    print(f"{case} as it is: {figures}", flush=True)
    for number, name in enumerate(names, 1):
        left = f", about {(len(names) - number + 1) * statistics.mean(spent) / 60:.0f} min left" if spent else ""
        print(f"{name}, {number} of {len(names)}{left}", flush=True)
        try:
            compiled, seconds = compiled_with(case, LEVERS[name])
        except CompileError as error:
            sys.exit(f"{name}: {error}")
        spent += [seconds] if seconds else []
        found = compare(name, compiled, as_it_is)
        figures |= found
        print(f"  {found}", flush=True)
    return figures


if __name__ == "__main__":
    main()
