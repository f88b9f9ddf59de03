# SPDX-License-Identifier: Apache-2.0
"""What a CPU compiles in place of a GPU's attention kernel: the same values, the memory and the time of a kernel."""

import jax
import jax.numpy as jnp
import pytest

from configs import base, topologies
from layers.attention.attention import attend, attention_mask
from rehearsal import gpu_attention, roofline
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


def rehearsed(tmp_path, **model) -> dict:
    config = base.get_config()
    config.model.update(dict(num_layers=2, embed_dim=128, num_heads=2, num_kv_heads=2, mlp_dim=128, vocab_size=300))
    config.model.update(model)
    config.train.update(global_batch=8, sequence_length=1024, steps=2, eval_every=0)
    config.data.update(source="synthetic", tokenizer="byte")
    config.evaluation.sample_tokens = 0
    topology = topologies.get("h200-1")
    validation.resolve_mesh(config, topology.chips)
    return estimate(Compiler(tmp_path).compile(config, topology))


@pytest.mark.slow
def test_a_rehearsed_gpu_holds_no_scores_and_its_attention_takes_a_kernels_time(tmp_path):
    """The scores of the two layers alone would take 128 MiB in float32."""
    with_kernel, without = rehearsed(tmp_path), rehearsed(tmp_path, attention="reference")
    assert without["hbm_gib"]["total"] - with_kernel["hbm_gib"]["total"] > 2 * 8 * 2 * 1024**2 * 4 / 2**30
    assert with_kernel["seconds_by_category"]["attention kernel"] > 0
    assert "attention kernel" not in without["seconds_by_category"]


def test_the_schedule_knows_its_scope():
    assert roofline.GPU_ATTENTION == gpu_attention.SCOPE
