# SPDX-License-Identifier: Apache-2.0
"""What recipes were found to cost is recorded, and a step that has become dearer is caught."""

import json

import pytest

from rehearsal import record
from rehearsal.compiler import Compiler
from rehearsal.estimate import estimate

CASES = record.cases()
SMALL = next(case for case in CASES if case.name == "tiny_remat_v4-8")
AS_IT_IS = json.loads(SMALL.path.read_text())["figures"]  # tests/test_rehearse.py compiles it
# What is done to the step before it is assembled, and by what part the figures that show it grow at least.
MORE_GATHERED = (
    "import jax; from layers import fsdp; usual, again = fsdp._all_gather_param, jax.lax.optimization_barrier; "
    "fsdp._all_gather_param = lambda x, *how: usual(x, *how) + usual(again(x), *how)"
)
NOT_DONATED = (
    "import jax; usual_jit = jax.jit; "
    "jax.jit = lambda *a, donate_argnums=None, donate_argnames=None, **k: usual_jit(*a, **k)"
)
NOT_AGAIN = "import jax; jax.checkpoint = lambda function, **options: function"
SABOTAGE = {
    "an extra all-gather and a lost donation": (
        f"{MORE_GATHERED}\n{NOT_DONATED}",
        {"all-gather over fsdp: gib": 0.9, "hbm_gib": 0.2},  # twice the gathers alone add a twentieth of that memory
    ),
    "a lost remat": (NOT_AGAIN, {"hbm_gib": 1.0}),
}


def compiled_after(program: str, folder) -> dict[str, float]:
    """Return the figures of the small step, compiled in a process that first runs a program."""
    loaded = SMALL.load()
    return record.figures(estimate(Compiler(folder, program=program).compile(loaded.config, loaded.topology)))


@pytest.mark.slow
@pytest.mark.parametrize("planted", SABOTAGE)
def test_what_makes_a_step_dearer_is_caught(planted, tmp_path):
    program, shows = SABOTAGE[planted]
    now = compiled_after(program, tmp_path)
    changes = record.changes(AS_IT_IS, now)
    for name, part in shows.items():
        assert now[name] > (1 + part) * AS_IT_IS[name], changes
        assert any(line.startswith(f"{name}: ") and "(+" in line for line in changes), changes


def test_what_is_the_same_is_not_a_change():
    near = {name: value * 1.01 if isinstance(value, float) else value for name, value in AS_IT_IS.items()}
    assert record.changes(AS_IT_IS, near) == []
    assert record.changes({"a": 1.0, "b: count": 4}, {"a": 1.0}) == ["b: count: 4 -> 0 (-100.0%)"]
    assert record.changes({}, {"b: count": 4}) == ["b: count: 0 -> 4"]


def test_what_a_plan_needs_is_recorded_with_the_figures(tmp_path):
    """The state of a chip, including moments that are kept on the host."""
    found = {
        "step_seconds": 0.5, "flops_model": 1e12, "flops_hardware": 2e12, "collectives": [], "host_gib": 0.5,
        "hbm_gib": {"total": 5.0, "parameters": 1.0, "optimizer": 2.0}, "exposed_communication_seconds": 0.125,
    }  # fmt: skip
    record.write(tmp_path / "step.json", "new recipe", found, {})
    kept = json.loads((tmp_path / "step.json").read_text())
    assert kept["not_compared"] == {"exposed_communication_seconds": 0.125, "state_gib": 3.5}
    assert kept["figures"] == record.figures(found) and kept["reason"] == "new recipe"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_recipe_is_recorded_on_the_topologies_that_it_names(case):
    recorded = json.loads(case.path.read_text())
    assert recorded["reason"] and {"step_seconds", "hbm_gib", "flops_model"} <= recorded["figures"].keys()


def test_nothing_is_recorded_of_what_is_not_there():
    assert {path.name for path in record.FOLDER.glob("*")} == {case.path.name for case in CASES}
    assert {"llama2_7b_v4-32", "medium_v4-8"} <= {case.name for case in CASES}
