# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters start the same in every process."""

import os
import subprocess
import sys

import pytest

from tests.support import ROOT

CODE = """
import jax
from flax import nnx
from layers.adapters import LoRA, add_adapters
from layers.mlp import SwiGLU
from parallelism.mesh import mesh_context
from tests.support import one_device_mesh

with mesh_context(one_device_mesh()):
    sizes = dict(embed_dim=4, mlp_dim=8, biased=False, quantization="none", out_scale=1.0)
    mlp = SwiGLU(**sizes, rngs=nnx.Rngs(0))
    add_adapters(mlp, LoRA.named(2, 4.0, "gate,down,up"), nnx.Rngs(1))
    print(jax.tree.map(lambda leaf: float(leaf.sum()), nnx.to_pure_dict(nnx.state(mlp, nnx.LoRAParam))))
"""


@pytest.mark.slow
def test_adapters_start_the_same_whatever_the_hash_seed_of_python_is():
    printed = set()
    for seed in range(3):  # by which sets of these names have other orders
        environment = os.environ | {"PYTHONHASHSEED": str(seed)}
        command = [sys.executable, "-c", CODE]
        printed.add(subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True).stdout)
    assert len(printed) == 1
