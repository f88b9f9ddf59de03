# SPDX-License-Identifier: Apache-2.0
"""rehearse.py --decode compiles the programs of a server for a slice, and its figures follow from each other."""

import json
import os
import subprocess
import sys

import pytest

from configs import topologies
from rehearsal import assumptions
from tests.support import ROOT

LAYERS, ROWS, LENGTH, HEADS, H = 1, 4, 112, 4, 128
SMALL = {
    "num_layers": LAYERS, "embed_dim": 256, "num_heads": HEADS, "num_kv_heads": HEADS, "head_dim": H, "mlp_dim": 512,
    "vocab_size": 512, "max_length": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """Rehearse a small model on v4-8 with the TPU compiler; return (report, what is printed)."""
    folder = tmp_path_factory.mktemp("decode")
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = ["--config=configs/tiny.py", *(f"--config.model.{key}={value}" for key, value in SMALL.items())]
    command += ["--topology=v4-8", "--decode", f"--rows={ROWS}", f"--length={LENGTH}", f"--json={folder}/r.json"]
    done = subprocess.run(
        [sys.executable, "rehearse.py", *command], cwd=ROOT, env=environment | {"XDG_CACHE_HOME": str(folder)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "r.json").read_text()), done.stdout


@pytest.mark.slow
def test_the_bound_is_the_time_to_read_weights_and_cache_once(rehearsed):
    report, _ = rehearsed
    hbm, decode, chips = report["hbm_gib"], report["decode"], 4
    assert report["mesh"]["model"] == chips  # a head each
    keys_and_values = 2 * LAYERS * ROWS * (LENGTH + 16) * H * 2  # bfloat16, with room for the padding of a chunk
    assert hbm["cache"] * 2**30 == pytest.approx(keys_and_values, rel=0.02)
    assert hbm["weights"] * 2**30 == pytest.approx(2 * report["num_parameters"] / chips, rel=0.02)  # bfloat16
    bandwidth = topologies.get("v4-8").hbm_bandwidth
    assert decode["bound_seconds"] == pytest.approx((hbm["weights"] + hbm["cache"]) * 2**30 / bandwidth)
    assert decode["step_seconds"] == pytest.approx(sum(decode["seconds_by_category"].values()))
    assert decode["times_the_bound"] == pytest.approx(decode["step_seconds"] / decode["bound_seconds"])
    assert decode["times_the_bound"] > 1
    assert decode["tokens_per_second"] == pytest.approx(ROWS / decode["step_seconds"])
    assert decode["tokens_per_second_per_device"] == pytest.approx(decode["tokens_per_second"] / chips)
    assert hbm["total"] == pytest.approx(hbm["weights"] + hbm["cache"] + hbm["temporary"])


def test_the_kernel_reads_the_cache_at_the_assumed_share_of_the_bandwidth(rehearsed):
    report, _ = rehearsed
    keys_and_values = 2 * LAYERS * ROWS * (LENGTH + 16) * H * 2
    bandwidth = topologies.get("v4-8").hbm_bandwidth * assumptions.DECODE_EFFICIENCY
    seconds = report["decode"]["seconds_by_category"]["attention kernel"]
    assert seconds == pytest.approx(keys_and_values / bandwidth)


def test_a_batch_of_prompts_is_prefilled_in_several_calls(rehearsed):
    prefill = rehearsed[0]["prefill"]
    assert (prefill["rows_of_a_call"], prefill["tokens_of_a_row"], prefill["calls"]) == (4, 64, 2)
    assert prefill["seconds"] == pytest.approx(2 * prefill["call_seconds"])
    assert prefill["tokens_per_second"] == pytest.approx(ROWS * LENGTH / prefill["seconds"])


def test_what_is_printed_has_the_verdict_and_the_bound(rehearsed):
    report, out = rehearsed
    assert f"{ROWS} rows of {LENGTH} tokens" in out
    for part in ("FITS: ", "cache", "PREFILL: ", "DECODE: ", f"{report['decode']['times_the_bound']:.2f} times the"):
        assert part in out
    assert "arXiv:2604.15464" in out
