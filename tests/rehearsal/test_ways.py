# SPDX-License-Identifier: Apache-2.0
"""Ways of training a recipe are compared by their rehearsals; the compiler is replaced by one that counts rows."""

import types

import pytest

from pods import switches
from rehearsal.layouts import ways
from settings import loading, validation
from settings.keys import flat

GIB_OF_A_ROW = 4.0  # of a microbatch on a chip
FLOAT32 = 2.0  # times the memory and the time of bfloat16


class Imagined:
    """A compiler whose programs need memory and time by the rows of a microbatch; `compiled` has what it was given."""

    def __init__(self):
        self.compiled = []

    def compile(self, config, topology):
        self.compiled.append(flat(config))
        count = config.train.gradient_accumulation
        rows = config.train.global_batch / topology.chips
        slower = FLOAT32 if config.model.dtype == "float32" else 1.0
        total = slower * GIB_OF_A_ROW * rows / count
        figures = {
            "fits": total <= topology.hbm_gib, "step_seconds": slower * (1 + count / 10), "tokens_per_second": 1.0,
            "hbm_gib": {"total": total}, "num_microbatches": count, "mesh": dict(config.mesh),
        }  # fmt: skip
        return types.SimpleNamespace(fits=figures["fits"], figures=figures)


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setattr(ways, "estimate", lambda compiled: compiled.figures)
    return Imagined()


def load(size: str, **typed):
    loaded = loading.load(f"configs/{size}.py", "v4-8", {k.replace("__", "."): str(v) for k, v in typed.items()})
    validation.validate(loaded.config, loaded.topology.chips, loaded)
    return loaded.config, loaded.topology


def quiet(line: str) -> None:
    pass


def test_the_naive_way_has_no_optimization_and_as_few_microbatches_as_fit(compiler):
    config, topology = load("tiny", train__global_batch=32)  # 8 rows a chip
    found = ways.rehearse({"naive": ways.naive(config, topology), "launch": config}, topology, compiler, quiet)
    assert (found["launch"]["microbatches"], found["launch"]["memory_gib_per_device"]) == (1, 32)
    assert (found["naive"]["microbatches"], found["naive"]["memory_gib_per_device"]) == (2, 32)
    naive = next(one for one in compiler.compiled if one["model.dtype"] == "float32")
    assert naive.items() >= ways.NAIVE.items() and (naive["mesh.data"], naive["mesh.fsdp"]) == (4, 1)
    assert ways.factors(found, "launch", "naive") == {
        "baseline": "naive", "times_faster": pytest.approx(2 * 1.2 / 1.1), "times_less_memory": 1,
    }  # fmt: skip


def test_what_fits_in_no_way_has_its_memory_and_no_time(compiler):
    config, topology = load("tiny", train__global_batch=40, model__dtype="float32")  # 10 rows, and one needs 8 GiB
    found = ways.rehearse({"launch": config}, topology, compiler, quiet)["launch"]
    assert (found["fits"], found["step_seconds"], found["memory_gib_per_device"]) == (False, None, 80)
    assert ways.text(found) == "does not fit, it needs 80 GiB a chip"
    both = {"launch": found, "other": found | {"step_seconds": 1.0}}
    assert ways.factors(both, "other", "launch")["times_faster"] is None


def test_a_way_that_cannot_run_is_an_error_and_the_others_are_compared(compiler):
    config, topology = load("tiny")
    wrong = config.copy_and_resolve_references()
    wrong.train.global_batch = 7
    lines = []
    found = ways.rehearse({"wrong": wrong, "right": config}, topology, compiler, lines.append)
    assert "train.global_batch=7" in found["wrong"]["error"] and found["right"]["fits"]
    assert lines[0].startswith("rehearsed wrong on v4-8: train.global_batch=7")
    assert ways.factors(found, "right", "wrong")["times_less_memory"] is None


@pytest.mark.parametrize("size", ["tiny", "small", "medium", "large", "small_moe"])
def test_enable_tpu_opt_trains_with_the_program_of_the_recipe_if_that_fits(compiler, size):
    """So it is never slower; what it changes is a recipe that would not fit, or that computes in float32."""
    config, topology = load(size, train__global_batch=4)
    optimized = config.copy_and_resolve_references()
    optimized.update_from_flattened_dict(switches.SWITCHES[switches.TPU_OPT])
    ways.rehearse({"launch": config, "optimized": optimized}, topology, compiler, quiet)
    assert all(one == compiler.compiled[0] for one in compiler.compiled[1:])
