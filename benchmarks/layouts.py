# SPDX-License-Identifier: Apache-2.0
"""Does a run compute the same on any mesh? Proves the layout on every preset's mesh, and compares 200 losses.

All in float32 on simulated devices. --quick proves one recipe on the largest mesh of at most 16 devices, with the
optimizer that compiles fastest.
"""

import math
import os
import sys
import time

import support

DEVICES = 16 if support.QUICK else 64
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"

import jax

from core import layout_proof
from core import assembly
from settings import loading
from configs import topologies
from configs.base import MESH_AXES
from input_pipeline.synthetic import MarkovWindows
from parallelism.mesh import mesh_context
from parallelism.placement import place

MOST_APART = 1e-4  # nats, in float32
STEPS = 4 if support.QUICK else 200
RECIPES = ("tiny",) if support.QUICK else ("tiny", "char", "small", "large", "llama2_7b", "llama3_8b")
MESHES = (
    {"fsdp": 1}, {"fsdp": 2}, {"fsdp": 4}, {"fsdp": 8},
    {"data": 8}, {"fsdp": 4, "model": 2}, {"data": 2, "fsdp": 2, "context": 2}, {"context": 4, "model": 2},
)[:: 6 if support.QUICK else 1]  # fmt: skip


def preset_meshes() -> list[dict[str, int]]:
    """Return the different meshes of configs/topologies.py that have more than one device and fit here."""
    meshes = {tuple(topologies.get(name).mesh.items()): None for name in topologies.SLICES}
    fitting = [mesh for mesh in map(dict, meshes) if 1 < math.prod(mesh.values()) <= DEVICES]
    return [max(fitting, key=lambda mesh: math.prod(mesh.values()))] if support.QUICK else fitting


def with_mesh(recipe: str, mesh: dict[str, int]):
    """Return the configuration of a recipe on a mesh."""
    sizes = {f"mesh.{axis}": str(size) for axis, size in (dict.fromkeys(MESH_AXES, 1) | mesh).items()}
    changes = {"model.layer_loop": "scan"} | ({"optimizer.name": "sgd"} if support.QUICK else {})  # scanned as on a TPU
    return loading.load(f"configs/{recipe}.py", "", changes | sizes).config


def prove(recipe: str, mesh: dict[str, int]) -> list[str]:
    """Return the differences between the scaled-down recipe on this mesh and on one device."""
    start = time.perf_counter()
    lines = layout_proof.layout_differences(with_mesh(recipe, mesh))
    verdict = "; ".join(lines) or "forward, gradients and update agree"
    print(f"{recipe} on {mesh}: {verdict} ({time.perf_counter() - start:.0f} s)", flush=True)
    return lines


def losses(mesh: dict[str, int]) -> list[float]:
    """Return the loss of each step of a small run."""
    config = with_mesh("tiny", mesh)
    config.model.update(num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=4, mlp_dim=128, vocab_size=256)
    config.model.dtype = "float32"
    config.train.update(steps=STEPS, global_batch=16, sequence_length=64, gradient_accumulation=1)
    run, train = assembly.assemble(config, devices=jax.devices()[: math.prod(mesh.values())]), config.train
    windows = MarkovWindows(config.model.vocab_size, seed=0, num_tokens=1 << 20, stream="train")
    batches = (windows.read(range(16 * s, 16 * s + 16), train.sequence_length) for s in range(STEPS))
    with mesh_context(run.mesh):
        state, scalars = run.init(), []
        for batch in place(batches, run.batch_sharding, train.global_batch):
            state, step_scalars = run.train_step(state, batch)
            scalars.append(step_scalars["loss"])
    return [float(loss) for loss in scalars]


def main() -> None:
    """Prove the layouts, then train."""
    proofs = {(recipe, str(mesh)): prove(recipe, mesh) for recipe in RECIPES for mesh in preset_meshes()}
    curves, apart = [], []
    for mesh in MESHES:
        curves.append(losses(mesh))
        apart.append(max(abs(a - b) for a, b in zip(curves[0], curves[-1], strict=True)))
        first, last = curves[-1][0], curves[-1][-1]
        print(f"{mesh}: loss {first:.4f} -> {last:.4f}, at most {apart[-1]:.1e} from one device", flush=True)
    figures = {
        "layouts_proved": len(proofs), "layouts_that_differ": sum(map(bool, proofs.values())),
        "steps": STEPS, "meshes": len(MESHES), "largest_loss_difference": max(apart),
        "first_loss": round(curves[0][0], 4), "last_loss": round(curves[0][-1], 4),
    }  # fmt: skip
    support.finish("layouts", figures)
    if figures["layouts_that_differ"]:
        sys.exit("a layout computes something else than one device, see above")
    if figures["largest_loss_difference"] > MOST_APART:
        sys.exit(f"layouts: losses are more than {MOST_APART} apart")


if __name__ == "__main__":
    main()
