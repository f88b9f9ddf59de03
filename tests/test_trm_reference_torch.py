# SPDX-License-Identifier: Apache-2.0
"""The PyTorch step that benchmarks measure ours against computes what was recorded of the public code."""

import numpy as np
import pytest

from tests.support import ROOT


@pytest.fixture(scope="module")
def torch():
    """The library, which each worker that collects tests would import for seconds."""
    return pytest.importorskip("torch", reason="the extra `interop` is not installed")


@pytest.fixture(scope="module")
def reference(torch):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        import trm_reference_torch
    return trm_reference_torch


@pytest.mark.parametrize("case", ["att_p16", "mlp_p16"])
def test_steps_are_those_recorded(reference, case):
    found = reference.disagreement(case)
    assert np.all(np.array(found) <= reference.TOLERANCES[case.partition("_")[0]])


def test_adam_atan2_is_that_recorded(reference, torch):
    with np.load(reference.FIXTURES / "trm_public_aux.npz", allow_pickle=False) as file:
        recorded = {name.removeprefix("adam_atan2/"): file[name] for name in file if name.startswith("adam_atan2/")}
    *betas, weight_decay = recorded["beta1_beta2_wd"].tolist()
    param = torch.tensor(recorded["param_init"])
    mean, square = torch.zeros_like(param), torch.zeros_like(param)
    for count, (gradient, lr) in enumerate(zip(recorded["grads"], recorded["lr"].tolist(), strict=True), 1):
        gradient = torch.tensor(gradient)
        reference.adam_atan2(param, gradient, mean, square, count, lr=lr, weight_decay=weight_decay, betas=tuple(betas))
        np.testing.assert_allclose(param, recorded["param_after"][count - 1], rtol=1e-12, atol=1e-14)


def test_rows_of_the_table_move_by_signs_as_recorded(reference, torch):
    with np.load(reference.FIXTURES / "trm_public_att_p16_grads.npz", allow_pickle=False) as file:
        ids, gradients = (torch.tensor(file[name]) for name in ("puzzle_emb_ids", "grad/puzzle_emb_per_example"))
        wanted = file["puzzle_emb_after_signsgd_lr0.01_wd0.1"]
    with np.load(reference.FIXTURES / "trm_public_att_p16_weights.npz", allow_pickle=False) as file:
        table = torch.tensor(file[reference.CONSTANTS[2]])
    reference.sign_descent(table, ids.long(), gradients, lr=0.01, weight_decay=0.1)
    np.testing.assert_allclose(table, wanted, rtol=1e-6)


def test_a_first_update_moves_weights_and_table_and_no_slot_halts(reference):
    settings = reference.Settings(
        hidden_size=16, num_heads=2, puzzle_emb_ndim=16, puzzle_emb_len=2, H_cycles=1, L_cycles=1
    )
    weights = reference.initial_weights(settings)
    step = reference.Step(settings, weights, dtype="bfloat16")
    found = step(reference.random_batch(settings, 3))
    assert np.isfinite(found["loss"]) and not step.carry["halted"].any()
    moved = np.abs(step.constants[reference.CONSTANTS[2]].numpy())
    np.testing.assert_allclose(moved, step.lr, rtol=1e-6)
    for name, param in step.params.items():
        change = np.abs(param.detach().numpy() - weights[name] * (1 - step.lr * step.weight_decay)).max()
        assert change == pytest.approx(0.9967 * step.lr, rel=0.02), name
