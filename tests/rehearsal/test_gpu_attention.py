# SPDX-License-Identifier: Apache-2.0
"""What a CPU compiles in place of a GPU's attention kernel: the same values, the memory and the time of a kernel."""

import jax
import jax.numpy as jnp
import pytest

from configs import base, topologies
from layers.attention.attention import attend, attention_mask
from rehearsal import assumptions, gpu_attention, roofline
from rehearsal.compiler import Compiler
from rehearsal.estimate import estimate
from settings import validation
from tests.layers.test_kernels import inputs, mesh
from tests.support import assert_close


def test_it_computes_what_the_kernel_computes():
    qkv, dy, batch = inputs([[100, 156], [130, 50]], 256, 16)

    def differentiated(attends):
        y, pull = jax.vjp(attends, *qkv)
        return y * (batch["segments"] > 0)[:, :, None, None], pull(dy)

    def reference(q, k, v):
        segments, positions = batch["segments"], batch["positions"]
        return attend(q, k, v, attention_mask(segments, segments, positions, positions))

    with mesh():
        actual = differentiated(lambda *qkv: gpu_attention.attend(*qkv, segments_BT=jnp.asarray(batch["segments"])))
        assert_close(actual, differentiated(reference))


LAYERS, BATCH, LENGTH, HEADS, HEAD_DIM = 2, 8, 1024, 2, 64


def rehearsed(folder, topology, **model) -> dict:
    config = base.get_config()
    config.model.update(dict(num_layers=LAYERS, embed_dim=128, num_heads=HEADS, num_kv_heads=HEADS, mlp_dim=128))
    config.model.update(dict(vocab_size=300) | model)
    config.train.update(global_batch=BATCH, sequence_length=LENGTH, steps=2, eval_every=0)
    config.data.update(source="synthetic", tokenizer="byte")
    config.evaluation.sample_tokens = 0
    validation.resolve_mesh(config, topology.chips)
    return estimate(Compiler(folder).compile(config, topology))


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["h200-1", "h100-8"], ids=["unrolled", "in a scan, a sequence on each"])
def test_a_rehearsed_gpu_holds_no_scores_and_its_attention_takes_a_kernels_time(tmp_path, topology):
    """Two products forward and five backward; a causal kernel computes half of them."""
    topology = topologies.get(topology)
    with_kernel, without = rehearsed(tmp_path, topology), rehearsed(tmp_path, topology, attention="reference")
    of_scores = LAYERS * BATCH * HEADS * LENGTH**2 * 4 / topology.chips
    assert without["hbm_gib"]["total"] - with_kernel["hbm_gib"]["total"] > of_scores / 2**30
    flops = 7 * LAYERS * BATCH * HEADS * LENGTH**2 * HEAD_DIM / topology.chips
    seconds = flops / (topology.peak_flops * assumptions.GPU_KERNEL_EFFICIENCY)
    assert with_kernel["seconds_by_category"]["attention kernel"] == pytest.approx(seconds, rel=0.01)
    assert "attention kernel" not in without["seconds_by_category"]


def test_the_schedule_knows_its_scope():
    assert roofline.GPU_ATTENTION == gpu_attention.SCOPE
