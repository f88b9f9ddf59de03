# SPDX-License-Identifier: Apache-2.0
"""The ten points before a long run: a healthy step has them, and each is missed by a step with that fault."""

import os
import subprocess
import sys

import pytest

from layers import fsdp
from rehearsal import checklist
from rehearsal.assumptions import of_topology
from rehearsal.compiler import ON_CPU
from settings import loading
from tests.rehearsal.faulty_steps import STEPS, TOPOLOGY, WIDTH
from tests.support import ROOT


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> dict[str, str]:
    """The programs of faulty_steps.py, compiled in a process of their own, since libtpu is loaded once."""
    folder = tmp_path_factory.mktemp("programs")
    command = [sys.executable, "-m", "tests.rehearsal.faulty_steps", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | ON_CPU, check=True)
    return {name: (folder / f"{name}.txt").read_text() for name in STEPS}


@pytest.fixture
def healthy(programs) -> str:
    return programs["healthy"]


def seen(text: str, keys: dict | None = None, **changes) -> checklist.Seen:
    config = loading.load("configs/llama2_7b.py", "v4-8", {"train.save_every": "500"} | (keys or {})).config
    size = 4 * WIDTH**2
    sizes = {
        "accelerator": "tpu", "state_bytes": size, "parameter_bytes": size, "total_bytes": 20e9, "capacity_bytes": 32e9,
    }  # fmt: skip
    return checklist.see(config, text, given=of_topology(TOPOLOGY), **({"mesh": {"data": 4}} | sizes | changes))


def verdicts(judged: list[checklist.Point]) -> dict[str, bool | None]:
    return {point.name: point.holds for point in judged}


def test_a_healthy_step_misses_nothing_but_what_so_small_a_product_cannot_hide(healthy):
    found = verdicts(checklist.judge(seen(healthy)))
    assert len(found) == 10
    assert [name for name, holds in found.items() if not holds] == ["hidden collectives"]


@pytest.mark.parametrize(
    ("name", "fault", "evidence"),
    [
        ("products in bfloat16", "float32", "f32 100.0%"),
        ("state updated in place", "copied", "0% of"),
        ("one reduction of gradients", "in_loop", "of 4.00 times the gradient"),
    ],
)
def test_a_fault_of_the_program_is_found(programs, name, fault, evidence):
    [point] = [point for point in checklist.judge(seen(programs[fault])) if point.name == name]
    assert point.holds is False and evidence in point.evidence, point


@pytest.mark.parametrize(
    ("name", "keys", "evidence"),
    [
        ("fixed shapes", {"layout.changes": "10: data=4,fsdp=1"}, "layout.changes change"),
        ("fixed shapes", {"batch.ramp": "steps", "batch.first": "8"}, "batch.ramp change"),
        ("full matrix units", {"model.mlp_dim": "11000"}, "model.mlp_dim is 11000"),
        ("input made ahead", {"data.prefetch": "1"}, "data.prefetch=1"),
        ("asynchronous saves", {"train.save_every": "0"}, "train.save_every=0"),
        ("few metrics, and a profile", {"train.log_every": "1"}, "train.log_every=1"),
    ],
)
def test_a_fault_of_the_configuration_is_found(healthy, name, keys, evidence):
    [point] = [point for point in checklist.judge(seen(healthy, keys)) if point.name == name]
    assert point.holds is False and evidence in point.evidence, point


@pytest.mark.parametrize(
    ("mesh", "parts"), [({"data": 4}, 1), ({"data": 2, "expert": 2}, 2), ({"fsdp": 2, "expert": 2}, 4)]
)
def test_a_gradient_is_whole_before_it_is_reduced_over_each_mesh(programs, mesh, parts):
    """The program adds up a whole gradient over 4 devices; each keeps a part of the weights."""
    for name, times in (("healthy", "1.00"), ("in_loop", "4.00")):
        given = seen(programs[name], mesh=mesh, parameter_bytes=4 * WIDTH**2 / parts)
        holds, evidence = checklist.one_reduction(given)
        assert evidence.endswith(f"of {times} times the gradient") and holds == (name == "healthy"), evidence


def test_reductions_over_context_are_not_judged(healthy):
    """Those of keys and values are of the same kind as those of weights."""
    assert checklist.one_reduction(seen(healthy, mesh={"data": 2, "context": 2}))[0] is None


def test_little_memory_to_spare_is_found(healthy):
    assert not verdicts(checklist.judge(seen(healthy, total_bytes=31.5e9)))["memory to spare"]


def test_what_is_not_about_a_cpu_is_not_judged(healthy):
    found = verdicts(checklist.judge(seen(healthy, accelerator="cpu")))
    missing = {name for name, holds in found.items() if holds is None}
    assert missing == {
        "products in bfloat16", "memory to spare", "full matrix units", "hidden collectives", "asynchronous saves",
    }  # fmt: skip


def test_only_the_process_that_compiles_imports_jax():
    """The import takes a second; one name of a scope is written twice for this."""
    assert checklist.REDUCE_SCATTER == fsdp.REDUCE_SCATTER
    program = "import sys, rehearse; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
