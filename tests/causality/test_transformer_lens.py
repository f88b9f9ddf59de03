# SPDX-License-Identifier: Apache-2.0
"""Comparison with TransformerLens on the same tiny published model from a local folder: equal tables of patching.

It needs torch, transformers and transformer-lens 4, and is skipped without them: pip install transformer-lens
"""

import numpy as np
import pytest

from causality import patching
from parallelism.mesh import mesh_context
from tests.migration import hugging_face_cases as cases
from tests.migration.record_hugging_face import FOLDER, V
from trained_run import TrainedRun

# First the one that is missing most often: to import torch takes seconds.
lens = pytest.importorskip("transformer_lens", reason="transformer-lens is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
TOLERANCE = 1e-4


def bridged(case: str):
    """Return TransformerLens's model of a folder."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    model = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER / case, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return build_bridge_from_module(model, type(model).__name__, hf_config=model.config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["llama3", "qwen3"])
def test_transformer_lens_has_the_same_tables(tmp_path, case):
    rng = np.random.default_rng(0)
    clean = rng.integers(0, V, 9)
    corrupt = np.where(np.arange(9) == 4, (clean + 5) % V, clean)
    config = cases.import_run(FOLDER / case, tmp_path / "run")
    config.model.dtype = "float32"
    run = TrainedRun(tmp_path / "run", config)
    with mesh_context(run.run.mesh):
        pair = patching.contrast(run.run.graph, run.params, clean, corrupt)
        ours = patching.restore(run.run.graph, run.params, pair)
    model = bridged(case)
    wrong = torch.from_numpy(corrupt)[None]
    with torch.no_grad():
        logits, cache = model.run_with_cache(torch.from_numpy(clean)[None])
        assert logits[0, -1].argmax() == pair.answer

        def metric(logits):
            return pair.normalized(logits[0, -1, pair.answer] - logits[0, -1, pair.other])

        theirs = {
            "attention": lens.patching.get_act_patch_attn_out(model, wrong, cache, metric),
            "mlp": lens.patching.get_act_patch_mlp_out(model, wrong, cache, metric),
            "heads": lens.patching.get_act_patch_attn_head_out_all_pos(model, wrong, cache, metric),
        }
        before_blocks = lens.patching.get_act_patch_resid_pre(model, wrong, cache, metric)
    for name, table in theirs.items():
        np.testing.assert_allclose(ours[name], table.numpy(), atol=TOLERANCE, err_msg=name)
    np.testing.assert_allclose(ours["block"][:-1], before_blocks[1:].numpy(), atol=TOLERANCE)  # theirs: before a block
    assert np.abs(before_blocks[1:].numpy()).max() > 0.1
