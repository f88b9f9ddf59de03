# SPDX-License-Identifier: Apache-2.0
"""With transformers itself and new random models: each reads what the other writes."""

import numpy as np
import pytest

from tests.migration import hugging_face_cases as cases
from tests.migration.record_hugging_face import CASES, make

TOLERANCE = 1e-4  # as in test_hugging_face.py


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_same_before_and_after(tmp_path, case):
    for library in ("torch", "transformers"):  # not above, where each worker would import them to collect tests
        pytest.importorskip(library, reason="the extra `interop` is not installed")
    tokens, wanted = make(case, tmp_path / "theirs", seed=1)
    config = cases.import_run(tmp_path / "theirs", tmp_path / "run")
    assert np.abs(cases.logits_of(config, tmp_path / "run", tokens) - wanted).max() < TOLERANCE
    cases.export(config, tmp_path / "run", tmp_path / "ours")
    assert np.abs(by_transformers(tmp_path / "ours", tokens) - wanted).max() < TOLERANCE
    config.model.max_length = 64  # differs from the original, so a new config.json is written
    cases.export(config, tmp_path / "run", tmp_path / "anew")
    assert np.abs(by_transformers(tmp_path / "anew", tokens) - wanted).max() < TOLERANCE


def by_transformers(folder, tokens: np.ndarray) -> np.ndarray:
    """Return float32 logits of a folder."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
