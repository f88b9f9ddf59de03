# SPDX-License-Identifier: Apache-2.0
"""The search ends near the best of all layouts after few compilations; memory's arithmetic knows the recipes."""

import dataclasses
import importlib
import math
import random
import types

import jax
import pytest

from configs.errors import ConfigError
from core import assembly
from rehearsal import report
from rehearsal.compiler import GIB, CompileError
from rehearsal.layouts import advice, compare, search, sizing
from rehearsal.sections import options
from settings import loading, validation
from tests.support import RECIPES

MODULES = {name: importlib.import_module(f"configs.{name.replace('/', '.')}") for name in RECIPES}
MODELS = {name: module.get_config().model.name for name, module in MODULES.items()}
BASE = {"train.init_from": "unused"}
TRANSFORMERS = [name for name, model in MODELS.items() if model == "decoder_lm"]


def load(recipe: str = "llama2_7b", topology: str = "v4-32", **typed):
    loaded = loading.load(f"configs/{recipe}.py", topology, {k.replace("__", "."): str(v) for k, v in typed.items()})
    validation.validate(loaded.config, loaded.topology.chips)
    return loaded


class Imagined:
    """A display whose compiler takes no time: a step is as fast and as large as `truth(config)` says."""

    def __init__(self, truth):
        self.compiler, self.truth, self.compiled, self.lines = self, truth, [], []
        self.spent, self.processes = [], 1

    def line(self, text):
        self.lines.append(text)

    def compile_all(self, pairs, what, until=None):
        for index, (config, topology) in enumerate(pairs):
            self.compiled.append(config)
            yield index, self._result(config, topology)

    def compile(self, config, topology):
        return next(iter(self.compile_all([(config, topology)], "")))[1]

    def _result(self, config, topology):
        seconds, size = self.truth(config)
        fits = size <= topology.hbm_gib * GIB
        tokens = config.train.global_batch * config.train.sequence_length
        figures = {
            "fits": fits, "step_seconds": seconds if fits else None, "mfu": 0.5 if fits else None,
            "tokens_per_second": tokens / seconds if fits else None,
            "tokens_per_second_per_device": tokens / seconds / topology.chips if fits else None,
            "exposed_communication_seconds": 0.1 * seconds if fits else None, "num_parameters": 1,
            "hbm_gib": {"total": size / GIB, "parameters": 1.0, "optimizer": 2.0}, "peak_flops": 1e15,
        }  # fmt: skip
        decoded = (128, 144) if config.train.objective == "grpo" else None
        return types.SimpleNamespace(
            config=config, topology=topology, total_bytes=size, fits=fits, figures=figures,
            facts={"mesh": {}, "decoded": decoded},
        )  # fmt: skip


@pytest.fixture
def imagined(monkeypatch):
    for room in (report, advice):
        monkeypatch.setattr(room, "estimate", lambda compiled: compiled.figures)
    return Imagined


def truth(seed: int, topology):
    """Return a world in which meshes, policies and microbatches are off their prediction, each by its own factor."""
    draws = {}

    def effect(name, value, spread):
        return draws.setdefault((name, value), random.Random(f"{seed} {name} {value}").gauss(0, spread))

    def of(config):
        mesh = (config.mesh.data, config.mesh.fsdp, config.mesh.model, config.mesh.expert)
        tokens = config.train.global_batch * config.train.sequence_length
        seconds = search._predicted_seconds(config, topology) * tokens
        off = effect("mesh", mesh, 0.15) + effect("remat", config.model.remat, 0.1)
        off += effect("rows", config.train.gradient_accumulation, 0.1)
        off += effect("itself", (mesh, config.model.remat, config.train.gradient_accumulation), 0.01)
        return seconds * math.exp(off), sizing.predict(config) * math.exp(effect("size", mesh, 0.05))

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "recipe", "topology"), [*((seed, "llama2_7b", "v4-32") for seed in range(5)), (0, "large_moe", "v4-64")]
)
def test_the_search_ends_within_3_percent_of_all_layouts(imagined, seed, recipe, topology):
    # At the 512 sequences of large_moe the search ends 11 % short in world 0, and at the best in worlds 1 to 3.
    loaded = load(recipe, topology, **({"train__global_batch": 128} if recipe == "large_moe" else {}))
    world = truth(seed, loaded.topology)
    display = imagined(world)
    found = search.fastest(loaded, loaded.topology, display, any_batch=False)
    every = [world(c.config) for c in search.layouts(loaded, loaded.topology, any_batch=False)]
    best = min(seconds for seconds, size in every if size <= loaded.topology.hbm_gib * GIB)
    assert len(display.compiled) <= search.MAX_COMPILATIONS < len(every) / 5
    assert min(row["A step"] for row in found["tried"] if row["A step"]) <= 1.03 * best


def test_every_layout_keeps_the_global_batch_and_the_chips():
    loaded = load()
    for candidate in search.layouts(loaded, loaded.topology, any_batch=False):
        assert math.prod(candidate.config.mesh.values()) == 16
        assert candidate.config.train.global_batch == 32


@pytest.mark.slow
def test_experts_have_every_axis_that_divides_them_and_pure_fsdp():
    loaded = load("large_moe", "v4-64")
    found = search.layouts(loaded, loaded.topology, any_batch=False)
    axes = {c.config.mesh.expert for c in found}
    assert axes == {n for n in (1, 2, 4, 8, 16, 32) if loaded.config.model.num_experts % n == 0} and len(axes) > 2
    assert all(math.prod(c.config.mesh.values()) == 32 and c.keys["mesh.expert"] == c.config.mesh.expert for c in found)
    assert {c.config.mesh.expert for c in search.layouts(load(), load().topology, any_batch=False)} == {1}


def test_splitting_experts_trades_gathers_for_exchange():
    """Few tokens: gathering the experts takes longer than the exchange. Many: the reverse."""
    seconds = {}
    for rows, expert in ((1, 1), (1, 8), (64, 1), (64, 8)):
        keys = dict(
            train__global_batch=64 * rows, train__gradient_accumulation=1, mesh__expert=expert, mesh__fsdp=64 // expert
        )
        loaded = load("mixtral_8x7b", "v5p-128", **keys)
        seconds[rows, expert] = search._predicted_seconds(loaded.config, loaded.topology)
    assert seconds[1, 8] < seconds[1, 1] and seconds[64, 1] < seconds[64, 8]


def test_the_command_of_the_winner_has_all_that_was_typed(imagined):
    loaded = load(model__remat="full", optimizer__name="lion", data__path="my texts/*.txt")
    found = search.fastest(loaded, loaded.topology, imagined(truth(0, loaded.topology)), any_batch=True)
    command = found["notes"][-1]
    assert "python train.py --config=configs/llama2_7b.py --topology=v4-32" in command
    assert command.count("--config.model.remat=") == 1 and "--config.optimizer.name=lion" in command
    assert "--config.train.global_batch=" in command
    assert "'--config.data.path=my texts/*.txt'" in command and "data.mixture" not in command


def test_what_was_typed_holds_in_the_search(imagined):
    loaded = load(model__remat="full", mesh__fsdp=8, mesh__data=2)
    found = search.layouts(loaded, loaded.topology, any_batch=False)
    assert {(c.config.mesh.fsdp, c.config.mesh.data, c.config.model.remat) for c in found} == {(8, 2, "full")}


def test_where_nothing_fits_it_says_so(imagined):
    loaded = load(train__sequence_length=4096, model__num_layers=2048)
    with pytest.raises(ConfigError, match="no layout of llama2_7b fits v4-32"):
        search.fastest(loaded, loaded.topology, imagined(truth(0, loaded.topology)), any_batch=False)


@pytest.mark.slow
@pytest.mark.parametrize("grows", [0.0, 1 / 200])
def test_the_largest_model_fits_and_the_next_does_not(imagined, grows):
    """Also where the prediction is the further off the deeper the model."""
    loaded = load("small", "v4-8")

    def world(config):
        return 1.0, (1.1 + grows * config.model.num_layers) * sizing.predict(config)

    rows = search.largest_model(loaded, loaded.topology, imagined(world))["rows"]
    assert {row["Sequence"] for row in rows} == {512, 1024, 2048}
    for row in rows:
        assert 0.9 * 32 < row["GiB"] <= 32
    widest = [row["Width"] for row in rows if row["size"] == "widest"]
    assert widest == sorted(widest, reverse=True)  # longer sequences leave less room


def test_slices_are_compared_by_what_a_token_costs(imagined):
    def world(config):
        return 1.0, 1.0

    def load_for(name):
        return loading.load("configs/llama_1b.py", name, {})

    wanted = [load_for(name).topology for name in ("v4-8", "v5e-8", "v4-32")]
    found = compare.slices(load_for, wanted, imagined(world))
    assert [row["topology"] for row in found["rows"]] == ["v5e-8", "v4-8", "v4-32"]
    assert found["best"] == "v5e-8"
    tokens = 256 * 2048
    assert found["rows"][0]["$ a billion tokens"] == pytest.approx(8 * 1.2 / 3600 * 1e9 / tokens)


def test_slices_that_cost_nothing_are_compared_by_their_speed(imagined):
    """As under a grant, for which --price=0 is given."""

    def load_for(name):
        return loading.load("configs/llama_1b.py", name, {})

    wanted = [dataclasses.replace(load_for(name).topology, price_per_chip_hour=0.0) for name in ("v4-8", "v4-32")]
    found = compare.slices(load_for, wanted, imagined(lambda config: (16 / config.mesh.fsdp, 1.0)))
    assert (found["best"], found["rows"][0]["$ a billion tokens"]) == ("v4-32", 0)


def test_slices_are_compared_with_the_rollout_of_a_step(imagined, monkeypatch):
    """Drawing the answers takes most of such a step. Where it is not estimated, there is no cost to compare."""

    def load_for(name):
        return loading.load("configs/countdown_grpo.py", name, {})

    def rehearsed(loaded, compiled, figures, display):
        found = {"fits": True, "hbm_gib": {"total": 3.0}}
        step = figures["step_seconds"] + 9.0
        spent = report.cost({"tokens_per_second": 7.0, "step_seconds": step}, 10, compiled.topology)
        on_tpu = compiled.topology.accelerator == "tpu"
        return {"fits": True, "rollout": found, "update_and_rollout_seconds": step} | spent if on_tpu else {}

    monkeypatch.setattr(compare.rollout, "rehearse", rehearsed)
    wanted = [load_for(name).topology for name in ("v4-8", "h200-1")]
    found = compare.slices(load_for, wanted, imagined(lambda config: (1.0, GIB)))
    tpu, gpu = found["rows"]
    assert (tpu["topology"], tpu["A step"], tpu["A run"], tpu["GiB"]) == ("v4-8", 10.0, 100.0, 3.0)
    assert tpu["$ a billion tokens"] == pytest.approx(4 * 3.22 / 3600 * 1e9 / 7)
    assert (gpu["A step"], gpu["$ a billion tokens"], gpu["$ a run"]) == (1.0, None, None)
    assert found["best"] == "v4-8" and "without a cost, the step is the update alone" in found["notes"][1]


def test_a_slice_that_the_configuration_cannot_run_on_says_why(imagined):
    def load_for(name):
        return loading.load("configs/llama_1b.py", name, {"train.global_batch": "8"})

    wanted = [load_for(name).topology for name in ("v4-8", "v4-32")]
    rows = compare.slices(load_for, wanted, imagined(lambda config: (1.0, 1.0)))["rows"]
    assert rows[-1]["topology"] == "v4-32" and "train.global_batch=8" in rows[-1]["verdict"]


def test_scaling_keeps_the_batch_of_a_chip(imagined):
    loaded = load("llama_1b", "v4-8")
    display = imagined(lambda config: (1.0, 1.0))
    rows = compare.scaling(loaded, loaded.topology, display)["rows"]
    assert [(row["Data"], row["Fsdp"]) for row in rows] == [(d, f) for f in (1, 2, 4) for d in (1, 2, 4, 8)]
    assert {c.train.global_batch // (c.mesh.data * c.mesh.fsdp) for c in display.compiled} == {64}


def test_scaling_stops_at_the_largest_slice_of_a_kind(imagined):
    loaded = load("llama_1b", "v6e-8")
    rows = compare.scaling(loaded, loaded.topology, imagined(lambda config: (1.0, 1.0)))["rows"]
    assert max(row["Chips"] for row in rows) == 8


@pytest.mark.parametrize("recipe", TRANSFORMERS)
def test_parameters_are_counted_by_arithmetic(recipe):
    config = loading.load(f"configs/{recipe}.py", "", {}).config
    validation.resolve_mesh(config, 1)
    run = assembly.assemble(config, devices=jax.devices()[:1])
    assert sizing.num_parameters(config) == run.models.num_parameters


@pytest.mark.parametrize(
    "typed",
    [
        BASE | {"lora.rank": "8", "model.num_kv_heads": "2"},
        BASE | {"lora.rank": "4", "lora.targets": "query, key,value,out,gate,up,down", "model.head_dim": "16"},
        BASE | {"train.objective": "error_correction"},
        {"train.objective": "error_correction", "error_correction.joint_weight": "0.1"},
        {"train.objective": "value_head", "data.source": "countdown"},
        BASE | {"train.objective": "dpo", "data.source": "preferences"},
        BASE | {"train.objective": "grpo", "grpo.kl": "0.1", "data.source": "countdown_rollouts"},
        {},
    ],
)
def test_frozen_weights_have_neither_gradient_nor_moments(typed):
    """`--search` took each layout of adapters for one of a whole fine-tuning, which may fit nowhere."""
    config = loading.load("configs/tiny.py", "", typed).config
    validation.resolve_mesh(config, 1)
    run = assembly.assemble(config, devices=jax.devices()[:1])
    trained, frozen = (
        sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (run.abstract_state.params, run.abstract_frozen)
    )
    assert sizing.num_trained(config) == trained
    whole = sizing.num_parameters(config)
    assert frozen == (whole if config.lora.rank else whole - trained + sizing._reference(config))


def test_a_frozen_weight_takes_two_bytes_where_a_trained_one_takes_sixteen():
    whole, adapted = (load(lora__rank=rank, train__init_from="unused").config for rank in (0, 8))
    number = sizing.num_parameters(whole) / 16  # devices
    a_weight = 4 + 4 + 8 + sizing.WORKING["copies"] * 2
    assert sizing.predict(whole) - sizing.predict(adapted) == pytest.approx(number * (a_weight - 2), rel=0.01)


def moments_of(recipe: str, typed: dict[str, str]) -> tuple[float, float]:
    """Return how many numbers the optimizer keeps for a weight, as predicted and as its state has them."""
    config = loading.load(f"configs/{recipe}.py", "", typed).config
    validation.resolve_mesh(config, 1)
    state = assembly.assemble(config, devices=jax.devices()[:1]).abstract_state
    kept, weights = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (state.optimizer, state.params))
    return sizing.moments(config), kept / weights


@pytest.mark.parametrize(("recipe", "heads"), [("small", 4), ("small", 8), ("mixtral_8x7b", 32), ("deepseek_like", 16)])
def test_adafactors_second_moments_are_counted_by_arithmetic(recipe, heads):
    """`small` with 8 heads has 64 entries a head, so optax does not factor its projections."""
    predicted, kept = moments_of(recipe, {"optimizer.name": "adafactor", "model.num_heads": str(heads)})
    assert predicted == pytest.approx(kept, abs=3e-4)  # norms are not counted
    assert (kept > 0.1) == (heads == 8)


@pytest.mark.parametrize(("recipe", "tied"), [("small", True), ("small", False), ("mixtral_8x7b", False)])
def test_muons_moments_are_counted_by_arithmetic(recipe, tied):
    """One of each matrix, and Adam's two of embedding and head."""
    predicted, kept = moments_of(recipe, {"optimizer.name": "muon", "model.tie_embeddings": str(tied)})
    assert predicted == pytest.approx(kept, abs=1e-3)  # norms and routers are not counted


@pytest.mark.parametrize(
    "more",
    [{"train__global_batch": 64}, {"model__remat": "dots"}, {"optimizer__ema_decay": 0.9}, {"model__num_layers": 40},
     {"mesh__data": 2, "mesh__fsdp": 8}],
)  # fmt: skip
def test_what_needs_more_memory_is_predicted_to(more):
    assert sizing.predict(load(**more).config) > sizing.predict(load().config)


def test_a_head_that_is_the_embedding_saves_only_its_own_weights():
    """A layer that is all-gathered has as many parameters as before."""
    untied, tied = (load(model__tie_embeddings=tied).config for tied in (False, True))
    a_weight = 4 + 4 + 8 + sizing.WORKING["copies"] * 2  # itself, its gradient, two moments and copies in bfloat16
    head = untied.model.vocab_size * untied.model.embed_dim / 16
    assert sizing.predict(untied) - sizing.predict(tied) == pytest.approx(head * a_weight)


def test_a_remedy_is_the_smallest_change_of_its_kind_that_fits(imagined):
    loaded = load(train__global_batch=256, model__remat="dots")
    display = imagined(lambda config: (1.0, sizing.predict(config)))
    compiled = display.compile(loaded.config, loaded.topology)
    rows = advice.Study(compiled, {"fits": False}, display, until=math.inf).remedies()
    assert [row["what"].partition(",")[0] for row in rows] == [
        "smaller microbatches", "fewer activations saved for the backward pass", "moments in the hosts' memory",
        "shorter sequences",
    ]  # fmt: skip
    keys = rows[0]["keys"]
    assert list(keys) == ["train.gradient_accumulation"] and rows[0]["fits"] and rows[0]["verified"]
    fewer = validation.changed(
        loaded.config, {"train.gradient_accumulation": keys["train.gradient_accumulation"] // 2}, 16
    )
    assert sizing.predict(fewer) > 32 * GIB
    assert rows[0]["gives_gib"] == pytest.approx(compiled.total_bytes / GIB - rows[0]["total_gib"])


@pytest.mark.parametrize(("mlp_dim", "first"), [(11_008, "up"), (1_024, "query")])
def test_fewer_saved_activations_are_by_the_memory_of_this_model(imagined, mlp_dim, first):
    """Where an MLP is narrower than the heads together, "hidden" saves less than "up" and "attention"."""
    loaded = load(model__mlp_dim=mlp_dim, model__remat="hidden")
    rows = advice._levers(imagined(lambda config: (1.0, 0)).compile(loaded.config, loaded.topology))
    offered = [row["model.remat"] for row in rows["fewer activations saved for the backward pass"]]
    assert offered[0] == first
    memory = [sizing.predict(load(model__mlp_dim=mlp_dim, model__remat=policy).config) for policy in offered]
    assert [sizing.predict(loaded.config), *memory] == sorted([sizing.predict(loaded.config), *memory], reverse=True)


def test_a_remedy_that_the_compiler_finds_too_small_gives_way_to_the_next(imagined):
    loaded = load(train__global_batch=128, model__remat="up")

    def world(config):
        return 1.0, sizing.predict(config) * (1.4 if config.train.gradient_accumulation else 1.0)

    display = imagined(world)
    compiled = display.compile(loaded.config, loaded.topology)
    verified, predicted = (
        advice.Study(compiled, {"fits": False}, display, until).remedies()[0] for until in (math.inf, -math.inf)
    )
    assert verified["verified"] and verified["fits"] and not predicted["verified"]
    assert verified["keys"]["train.gradient_accumulation"] == 2 * predicted["keys"]["train.gradient_accumulation"]


def before(**more) -> dict:
    return {
        "fits": True, "step_seconds": 2.0, "tokens_per_second": 32 * 4096 / 2.0, "exposed_communication_seconds": 0.4,
        "seconds_by_pass": {"recomputed": 0.2}, "seconds_by_category": {"element-wise": 0.1},
        "collectives": [{"source": "layers/cross_entropy.py:9", "exposed_seconds": 0.1}],
    } | more  # fmt: skip


def test_advice_is_what_was_compiled_and_faster_the_best_first(imagined):
    loaded = load(train__loss_chunk_tokens=0)

    def world(config):
        faster = 0.2 * (config.mesh.fsdp == 8 and config.mesh.data == 2) + 0.1 * (config.train.loss_chunk_tokens > 0)
        slower = 0.5 * (config.mesh.model > 1)
        return 2.0 - faster + slower, 20 * GIB

    display = imagined(world)
    compiled = display.compile(loaded.config, loaded.topology)
    rows = advice.Study(compiled, before(), display, math.inf).faster()
    mesh, chunk = {"mesh.data": 2, "mesh.fsdp": 8}, {"train.loss_chunk_tokens": 8192}
    assert [row["keys"] for row in rows] == [mesh | chunk, mesh, chunk]
    assert [row["gain"] for row in rows] == [pytest.approx(2.0 / after - 1) for after in (1.7, 1.8, 1.9)]
    assert all(row["verified"] for row in rows)


def test_advice_that_was_not_compiled_says_so(imagined):
    loaded = load()
    display = imagined(lambda config: (2.0, 20 * GIB))
    compiled = display.compile(loaded.config, loaded.topology)
    rows = advice.Study(compiled, before(), display, -math.inf).faster()
    assert rows and not any(row["verified"] or row["gain"] for row in rows)
    expected = {options(row["keys"]): row["expected"] for row in rows}
    assert expected["--config.mesh.data=2 --config.mesh.fsdp=8"] == pytest.approx(1 / (1 - 0.2 / 3) - 1), "a rate"


def test_a_change_that_the_compiler_refuses_is_no_advice(imagined, monkeypatch):
    loaded = load()
    display = imagined(lambda config: (2.0, 20 * GIB))
    compiled = display.compile(loaded.config, loaded.topology)
    monkeypatch.setattr(display, "_result", lambda config, topology: CompileError("no"))
    assert advice.Study(compiled, before(), display, math.inf).faster() == []
