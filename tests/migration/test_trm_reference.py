# SPDX-License-Identifier: Apache-2.0
"""Weights of the reference come in and go out to the last bit, and what does not fit is said in a line."""

import json
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from migration import trm_reference
from migration.trm_reference import WeightsError, from_reference, load, save, to_reference
from tests.support import FIXTURES
from training.state import named_leaves

CASES = sorted(path.name.split("_", 2)[2].removesuffix("_weights.npz") for path in FIXTURES.glob("*_weights.npz"))


def published(case: str) -> tuple[dict, dict]:
    """The tensors of a fixture, without a prefix, and its settings."""
    with np.load(FIXTURES / f"trm_public_{case}_weights.npz", allow_pickle=False) as file:
        settings = {name.removeprefix("config/"): file[name][()] for name in file if name.startswith("config/")}
        return {name: file[name] for name in file if not name.startswith("config/")}, settings


def inner(width: int, expansion: float) -> int:
    return -(-round(expansion * width * 2 / 3) // 256) * 256


def tree(settings: dict) -> dict:
    """The shapes of our model, from settings alone."""
    D, V, S = (int(settings[name]) for name in ("hidden_size", "vocab_size", "seq_len"))
    table, N = int(settings["puzzle_emb_ndim"]), int(settings["num_heads"])
    L = S + (int(settings["puzzle_emb_len"]) or -(-table // D))
    expansion, H = float(settings["expansion"]), D // N

    def swiglu(width):
        F = inner(width, expansion)
        return {"gate": empty(width, F), "up": empty(width, F), "down": empty(F, width)}

    def empty(*shape):
        return np.zeros(shape, np.float32)

    attention = {name: empty(D, N, H) for name in ("query", "key", "value")} | {"out": empty(N, H, D)}
    blocks = {
        str(n): {"mixer": swiglu(L) if settings["mlp_t"] else attention, "mlp": swiglu(D)}
        for n in range(settings["L_layers"])
    }
    learned = {"positions": {"embedding": empty(L, D)}} if settings["pos_encodings"] == "learned" else {}
    puzzles = {"puzzles": {"table": empty(int(settings["num_puzzle_identifiers"]), table)}} if table else {}
    return {
        "embedding": {"embedding": empty(V, D)}, "head": {"kernel": empty(D, V)},
        "halt": {"kernel": empty(D, 2), "bias": empty(2)}, "initial": {"high": empty(D), "low": empty(D)},
        "network": {"blocks": blocks}, **learned, **puzzles,
    }  # fmt: skip


def drawn(like: dict) -> dict:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), like)


def assert_same(found: dict, wanted: dict) -> None:
    leaves, others = (dict(named_leaves(params)) for params in (found, wanted))
    assert leaves.keys() == others.keys()
    for name, leaf in leaves.items():
        assert leaf.dtype == np.float32 and leaf.shape == others[name].shape and leaf.flags.c_contiguous
        np.testing.assert_array_equal(leaf.view(np.uint32), np.asarray(others[name]).view(np.uint32), name)


def file_of(folder: pathlib.Path, tensors: dict) -> pathlib.Path:
    safetensors.numpy.save_file(tensors, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def test_there_are_fixtures_of_both_kinds_of_mixer():
    assert {published(case)[1]["mlp_t"].item() for case in CASES} == {True, False}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prefix", trm_reference.PREFIXES)
def test_what_comes_in_goes_out_the_same(tmp_path, case, prefix):
    tensors, settings = published(case)
    path = file_of(tmp_path, {prefix + name: tensor for name, tensor in tensors.items()})
    params = load(path, tree(settings))
    assert_same(to_reference(params, ""), tensors)
    save(tmp_path / "again.safetensors", params)
    assert sorted(other.name for other in tmp_path.iterdir()) == ["again.safetensors", "weights.safetensors"]
    assert_same(load(tmp_path / "again.safetensors", tree(settings)), params)
    assert all(
        name.startswith("_orig_mod.model.inner.")
        for name in safetensors.numpy.load_file(tmp_path / "again.safetensors")
    )


@pytest.mark.parametrize("case", CASES)
def test_what_goes_out_comes_in_the_same(case):
    params = drawn(tree(published(case)[1]))
    assert_same(from_reference(to_reference(params), params), params)


def test_products_are_those_of_the_reference():
    tensors, settings = published("att_p16")
    params = from_reference(tensors, tree(settings))
    block, x_BD = params["network"]["blocks"]["1"], np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    layer = {name.removeprefix("inner.L_level.layers.1."): tensor for name, tensor in tensors.items()}
    heads = (x_BD @ layer["self_attn.qkv_proj.weight"].T).reshape(3, 12, 16)  # queries, then keys, then values
    for name, wanted in zip(("query", "key", "value"), np.split(heads, 3, axis=1), strict=True):
        np.testing.assert_allclose(np.einsum("BD,DNH->BNH", x_BD, block["mixer"][name]), wanted, rtol=2e-5, atol=1e-5)
    out = heads[:, 8:].reshape(3, 64) @ layer["self_attn.o_proj.weight"].T
    np.testing.assert_allclose(np.einsum("BNH,NHD->BD", heads[:, 8:], block["mixer"]["out"]), out, rtol=2e-5, atol=1e-5)
    gate, up = np.split(x_BD @ layer["mlp.gate_up_proj.weight"].T, 2, axis=1)
    np.testing.assert_allclose(x_BD @ block["mlp"]["gate"], gate, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(x_BD @ block["mlp"]["up"], up, rtol=2e-5, atol=1e-5)


def test_blocks_may_be_numbered_by_numbers():
    tensors, settings = published("mlp_p0")
    like = tree(settings)
    like["network"]["blocks"] = {int(n): block for n, block in like["network"]["blocks"].items()}
    assert_same(to_reference(from_reference(tensors, like), ""), tensors)


def test_the_table_of_other_puzzles_becomes_its_mean_row():
    tensors, settings = published("att_p16")
    params = from_reference(tensors, tree(settings | {"num_puzzle_identifiers": 9}))
    mean = tensors["inner.puzzle_emb.weights"].astype(np.float64).mean(0).astype(np.float32)
    np.testing.assert_array_equal(params["puzzles"]["table"], np.tile(mean, (9, 1)))


def test_bfloat16_is_read_as_the_same_numbers(tmp_path):
    tensors, settings = published("att_p0")  # exact in bfloat16
    path = file_of(tmp_path, {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()})
    assert_same(to_reference(load(path, tree(settings)), ""), tensors)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("inner.H_init"), "lacks inner.H_init; use the configuration that they were trained with"),
        (lambda t: t.update({"inner.L_level.layers.2.x": t["inner.H_init"], "inner.y": t["inner.H_init"]}),
         "has inner.L_level.layers.2.x and 1 more, for which the model has no place"),
        (lambda t: t.update({"inner.lm_head.weight": t["inner.lm_head.weight"].T.copy()}),
         r"inner.lm_head.weight has shape \[64, 11\], but the model needs \[11, 64\]; use the sizes"),
        (lambda t: t.update({"inner.puzzle_emb.weights": t["inner.puzzle_emb.weights"][:3, :9].copy()}),
         r"inner.puzzle_emb.weights has shape \[5, 9\], but the model needs \[5, 64\]"),
        (lambda t: t.clear() or t.update(other=np.ones(2, np.float32)), "no tensor of a Tiny Recursive Model"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_a_line_with_its_name(tmp_path, change, said):
    tensors, settings = published("att_p16")
    change(tensors)
    with pytest.raises(WeightsError, match=rf"weights.safetensors: {said}") as caught:
        load(file_of(tmp_path, tensors), tree(settings))
    assert "\n" not in str(caught.value) and caught.value.exit_status == 2


def test_another_kind_of_model_is_told_both_ways():
    tensors, settings = published("att_p0")
    with pytest.raises(WeightsError, match=r"lacks inner.*mlp_t.* and 3 more and has inner.*self_attn.* and 3 more"):
        from_reference(tensors, tree(settings | {"mlp_t": np.bool_(True)}))


def test_a_weight_that_the_reference_has_not_is_named(tmp_path):
    params = drawn(tree(published("att_p0")[1])) | {"norm": {"scale": np.ones(3, np.float32)}}
    with pytest.raises(WeightsError, match=r"norm.scale has no name in the reference"):
        save(tmp_path / "weights.safetensors", params)
    assert not list(tmp_path.iterdir())


def test_what_is_no_such_file_is_a_line(tmp_path):
    like = tree(published("att_p0")[1])
    (tmp_path / "pickle").write_bytes(json.dumps({"a": 1}).encode())
    with pytest.raises(WeightsError, match=r"pickle: not a safetensors file .*torch.save_file\(torch.load"):
        load(tmp_path / "pickle", like)
    safetensors.numpy.save_file({"x": np.zeros(2, ml_dtypes.float8_e4m3fn)}, tmp_path / "fp8")
    with pytest.raises(WeightsError, match="fp8: x has type F8_E4M3; supported types: F32, F16, BF16"):
        load(tmp_path / "fp8", like)
    with pytest.raises(WeightsError, match=r"absent: .*; name a safetensors file"):
        load(tmp_path / "absent", like)
    with pytest.raises(WeightsError, match="; name a safetensors file"):
        load(tmp_path, like)
