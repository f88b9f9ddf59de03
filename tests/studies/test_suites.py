# SPDX-License-Identifier: Apache-2.0
"""The study of the recursive model: every configuration resolves, and what a group varies changes what is computed."""

import dataclasses
import functools
import importlib
import math
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from configs.errors import ConfigError
from core.start import prepare_corpus, set_steps
from settings import cycles, loading
from settings.keys import flat, from_flat
from settings.validation import validate
from studies import suites
from studies.cost import planning
from training import optimizers, schedules
from training.step_transform import StepChange
from training.transforms import average

STUDY, NAMES = suites.find("trm")
GROUPS = [name for name, group in STUDY.groups.items() if group.counted]
SUITE = "from configs.group import Suite\nSUITE = Suite({}, 'loss', 'minimize')"
SMALLER = ("trm-mini", "trm-smoke")
REFUSED = ["exp07-precision/c-float16"]
SMALL = {  # what a test compiles in place of the sizes of the study
    "model.embed_dim": 16, "model.num_heads": 2, "model.num_kv_heads": 2, "model.mlp_dim": 16, "model.puzzle_dim": 0,
    "model.max_length": 4, "train.sequence_length": 4, "train.global_batch": 8, "train.steps": 100, "train.epochs": 0.0,
    "evaluation.every_epochs": 0.0,
}  # fmt: skip


@functools.cache
def members(asked: str, topology: str = "") -> list:
    study, names = suites.find(asked)
    return suites.members(study, names, topology=topology)


def of_group(group: str) -> dict:
    """Return the configurations of a group that run, by name, with the number of steps of the study."""
    found = {m.name: m for m in members(group) if not m.refusal}
    configs = {name: from_flat(member.values) for name, member in found.items()}
    for name, config in configs.items():
        config.train.update(steps=planning.steps_of(found[name].values), epochs=0.0)
    return configs


@pytest.mark.parametrize("base, equal", [("trm", 14), ("trm-paper", 13), ("trm-mini", 14), ("trm-smoke", 14)])
def test_all_configurations_resolve_and_those_that_equal_the_baseline_share_its_trial(base, equal):
    counted = [member for member in members(base) if member.group in GROUPS]
    assert len({member.group for member in counted}) == 14
    assert len(counted) == (28 if base in SMALLER else 67)
    assert [member.title for member in counted if member.refusal] == ([] if base in SMALLER else REFUSED)
    digests = Counter(member.digest for member in counted if not member.refusal)
    assert max(digests.values()) == equal and sorted(digests.values())[-2] == 1
    assert all(member.values or member.refusal for member in members(base))
    first = {member.digest: member.title for member in reversed(counted) if not member.refusal}
    assert {digest: member.title for digest, member in suites.owners(counted).items()} == first


def test_float16_is_refused_with_what_would_work():
    refused = next(member for member in members("trm") if member.title == REFUSED[0])
    assert refused.refusal.startswith("model.dtype=float16 is refused: ")
    assert refused.refusal.endswith("use bfloat16 or float32")


def test_the_study_fits_a_v4_64_and_known_hours_come_from_records():
    on_slice = [member for member in members("trm", "v4-64") if not member.refusal]
    baseline = planning.estimate_of(on_slice[0], "v4-64")
    assert baseline.steps == 8138
    assert baseline.hours == pytest.approx(8138 * 0.1135 / 3600, rel=0.1)
    assert baseline.cost == pytest.approx(baseline.hours * 32 * 3.22)
    wide = next(member for member in on_slice if member.title == "exp01-model-scaling/f-1536")
    assert planning.estimate_of(wide, "v4-64").hours is None, "it is not recorded, and nothing is invented"
    lines = planning.table(STUDY, on_slice, "v4-64", planning.estimates(on_slice, "v4-64"))
    assert any("not known: rehearse them first, by --rehearse" in line for line in lines)


def test_updates_are_those_of_the_study():
    steps = {member.title: planning.steps_of(member.values) for member in members("trm") if not member.refusal}
    assert [steps[f"exp06-batch-size/{name}"] for name in of_group("exp06-batch-size")] == [
        32_552, 16_276, 8138, 4069, 2034, 1017,
    ]  # fmt: skip
    assert {steps[title] for title in steps if title.startswith("exp04a")} == {8138}, "compute is held fixed"
    for member in members("trm"):
        if not member.refusal and steps[member.title] is not None:  # those of ARC are known with its data
            assert member.values["optimizer.warmup_steps"] <= steps[member.title] / 2


def test_a_plan_counts_the_smaller_batches_of_a_ramp():
    """As core/start.py does for a run; they take as long as the complete batches with as many examples."""
    ramp = {"batch.ramp": "steps", "batch.first": "4", "batch.increase_step": "50", "train.tokens": "1000000"}
    config = loading.load("configs/tiny.py", "", ramp).config
    values = flat(config)
    steps = planning.steps_of(values)
    assert set_steps(config, None, None) == (0, steps)
    of_full_batches = 1_000_000 / (values["train.sequence_length"] * values["train.global_batch"])
    assert planning.full_batches(values, steps) == pytest.approx(of_full_batches, rel=0.01)


def weights(config) -> int:
    """Return the number of a model's weights without constants."""
    module = importlib.import_module("models.trm")
    model = nnx.eval_shape(lambda: module.make(config.model, dtype=jnp.float32, scan=True, rngs=nnx.Rngs(0)))
    shapes = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return sum(math.prod(leaf.shape) for path, leaf in shapes if "puzzles" not in path and "initial" not in path)


def test_widths_have_the_parameters_of_the_study():
    found = [weights(config) / 1e6 for config in of_group("exp01-model-scaling").values()]
    assert found == pytest.approx([1.48, 2.67, 5.03, 9.75, 17.6, 38.1], rel=0.01)


def test_layers_have_the_parameters_of_the_study():
    found = [weights(config) / 1e6 for config in of_group("exp03-layer-vs-recursion").values()]
    assert found == pytest.approx([2.5, 5.0, 7.5, 10.0, 15.1], rel=0.02)


def loss_program(config) -> str:
    """Return what the loss of a step computes, with small sizes."""
    small = from_flat({**_flat(config), **SMALL, "model.dtype": config.model.dtype})
    validate(small, 1)
    objective = importlib.import_module("objectives.recursive").make(small)
    module = importlib.import_module("models.trm")
    dtype = jnp.dtype(small.model.dtype)
    model = nnx.eval_shape(lambda: module.make(small.model, dtype=dtype, scan=True, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)

    def loss(state):
        model = nnx.merge(graph, state)
        carry = objective.init_carry(model, 8, jax.random.key(0))
        batch = {name: jnp.zeros(shape, jnp.int32) for name, shape in objective.batch().items()}
        return objective.loss(model, carry, batch, None)[0][0]

    return str(jax.make_jaxpr(loss)(state))


def _flat(config) -> dict:
    return {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}


@pytest.mark.parametrize(
    "group, names",
    [
        ("exp02a-l-cycles", ("01-2", "02-4")), ("exp02b-h-cycles", ("01", "02")),
        ("exp05-supervision-steps", ("a-4", "b-8")), ("exp07-precision", ("a-float32", "b-bfloat16")),
        ("exp10-position-encodings", ("a-rope", "b-learned", "c-sinusoidal", "d-none", "e-mlp")),
        ("contrib02-adaptive-halting", ("baseline", "annealed")),
    ],
)  # fmt: skip
def test_what_a_group_varies_changes_the_loss_of_a_step(group, names):
    configs = of_group(group)
    for config in configs.values():
        config.model.low_cycles = min(config.model.low_cycles, 4)
    programs = {loss_program(configs[name]) for name in names}
    assert len(programs) == len(names)


def test_batches_change_the_rows_of_a_step_and_its_learning_rate():
    configs = of_group("exp06-batch-size").values()
    rates = [float(schedules.cosine_from_one(c.optimizer, c.train.steps)(c.train.steps - 1)) for c in configs]
    assert rates == pytest.approx([1e-4 * math.sqrt(c.train.global_batch / 6144) for c in configs], rel=1e-3)
    assert len({importlib.import_module("objectives.recursive").make(c).rows for c in configs}) == 6


def test_learning_rates_change_the_schedule():
    configs = of_group("extra-learning-rate").values()
    ends = {float(schedules.cosine_from_one(c.optimizer, c.train.steps)(c.train.steps - 1)) for c in configs}
    assert len(ends) == 5


def test_averages_have_different_weights_and_one_has_none():
    kept, declared = set(), optimizers.Weights({("w",): ("embed", "mlp")})
    for config in of_group("exp08-ema").values():
        made = average.make(config, declared, None)
        change = StepChange({"w": jnp.ones(2)}, None, jnp.bool_(True))
        kept.add(made and float(made.update(None, change, {"w": jnp.zeros(2)})[1]["w"][0]))
    assert len(kept) == 5 and None in kept


def test_each_optimizer_moves_a_weight_to_another_place():
    places = []
    for config in of_group("exp09-optimizer").values():
        declared = optimizers.Weights({("w",): ("embed", "mlp")})
        direction = getattr(optimizers, config.optimizer.name)(config.optimizer, declared)
        optimizer = optimizers.make(
            direction, config.optimizer, lambda _, c=config: c.optimizer.learning_rate, declared
        )
        weight = {"w": jnp.ones((2, 2))}
        state = optimizer.init(weight)
        for scale in (1.0, -0.3, 0.2):
            updates, state = optimizer.update({"w": jnp.full((2, 2), scale)}, state, weight)
            weight = jax.tree.map(jnp.add, weight, updates)
        places.append(float(weight["w"][0, 0]))
    assert len({round(place, 9) for place in places}) == 5


def test_every_configuration_of_the_suite_is_accepted_also_on_data_that_are_named():
    """All but the one that asks for a type which is refused on purpose, and in `mini` none."""
    for name in ("trm", "trm-mini"):
        study, _ = suites.find(name)
        named = {"data.path": "FOLDER"} if name == "trm" else {}
        refused = {one.name: one.refusal for one in suites.members(study, study.groups, overrides=named) if one.refusal}
        assert refused.keys() <= {"c-float16"}, refused


@pytest.mark.parametrize("group", ["exp04a-data-scaling", "exp04b-augmentation-scaling"])
def test_data_groups_change_what_a_step_reads(group, tmp_path):
    """Of boards of 4 x 4, which are made in no time."""
    read = set()
    for number in (0, 1):
        study, _ = suites.find("trm-mini")
        config = from_flat(suites.members(study, [group])[number].values)
        config.data.update(cache_dir=str(tmp_path), puzzle_heldout=5, puzzle_count=min(config.data.puzzle_count, 60))
        read.add(prepare_corpus(config, vocab_size_typed=False).digest)
    assert len(read) == 2


def test_a_curriculum_has_at_most_seven_programs_and_ends_with_all_cycles():
    config = of_group("contrib01-curriculum")["curriculum"]
    pairs = list(dict.fromkeys(cycles.after(config, step) for step in range(config.train.steps)))
    assert pairs == [(1, 2), (1, 3), (2, 4), (2, 5), (3, 6)]
    step = 0
    for pair in pairs:
        assert cycles.after(config, step) == pair
        assert cycles.of_pair(config, pair).model.low_cycles == pair[1]
        step = cycles.stage_end(config, step)
    assert step == config.train.steps == 8138
    assert cycles.after(config, 1627) == (2, 5) and cycles.after(config, 1628) == (3, 6), "a fifth of the steps"
    assert cycles.after(of_group("contrib01-curriculum")["baseline"], 0) is None


def test_cycles_that_cannot_grow_are_refused():
    config = of_group("contrib01-curriculum")["curriculum"]
    for keys, message in (
        ({"first_low_cycles": 0}, "belong together"),
        ({"first_low_cycles": 7}, "exceeds model.low_cycles=6; use at most 6"),
    ):
        broken = config.copy_and_resolve_references()
        broken.supervision.update(keys)
        with pytest.raises(ConfigError, match=message):
            cycles.check(broken)
    config.model.low_cycles = 12
    with pytest.raises(ConfigError, match="take 11 compilations"):
        cycles.check(config)


@pytest.mark.parametrize("asked, message", [
    ("exp08-emma", "exp08-emma is not a group or suite .*; did you mean exp08-ema?"),
    ("", "is not a group or suite"),
    ("/nowhere/trm", "/nowhere/trm is not a group or suite"),
    ("configs/trm", "configs/trm is not a group or suite"),
])  # fmt: skip
def test_an_unknown_name_is_answered_with_the_nearest(asked, message):
    with pytest.raises(ConfigError, match=message):
        suites.find(asked)
    with pytest.raises(ConfigError, match=r"--base=papr is not a base of trm; did you mean paper\?"):
        suites.find("trm", "papr")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("question = 1", "/added.py: it has no GROUP = Group(...), which configs/group.py describes"),
        ("GROUP = 1 / 0", "/added.py, line 1: division by zero"),
        (
            "from configs.group import Group\nGROUP = Group('', '', '', {'../x': {}})",
            "/added.py, line 2: the configuration '../x' cannot be the name of a folder; leave out .. and empty parts",
        ),
        (
            "from configs.group import Group\nGROUP = Group('', '', '', {}, mini={'..': {}})",
            "/added.py, line 2: the configuration '..' cannot be the name of a folder; leave out .. and empty parts",
        ),
    ],
)
def test_a_file_of_a_suite_without_a_group_is_named(tmp_path, monkeypatch, content, says):
    monkeypatch.setattr(loading, "ROOT", tmp_path)
    monkeypatch.setattr(suites, "EXPERIMENTS", tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "suite.py").write_text(SUITE)
    (tmp_path / "mine" / "added.py").write_text(content)
    with pytest.raises(ConfigError) as error:
        suites.find("mine")
    assert str(error.value) == f"mine{says}"


def test_a_direction_that_is_none_is_named_with_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "ROOT", tmp_path)
    monkeypatch.setattr(suites, "EXPERIMENTS", tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "suite.py").write_text(SUITE.replace("minimize", "min"))
    with pytest.raises(ConfigError, match=r"^mine/suite.py, line 2: direction=min is unknown.*\(all: maximize, minim"):
        suites.find("mine")


@pytest.mark.parametrize("place", ["configs/experiments/trm", str(suites.EXPERIMENTS / "trm")])
def test_a_suite_and_a_group_are_also_named_by_their_folder_and_file(place):
    assert suites.find(f"{place}/")[1] == NAMES
    assert suites.find(f"{place}/exp08_ema.py")[1] == ["exp08-ema"]


def test_a_name_that_ends_like_that_of_a_seed_stays_whole():
    group = dataclasses.replace(STUDY.groups["exp08-ema"], configurations={"a": {}, "b-seed7": {suites.SEED: 7}})
    study = dataclasses.replace(STUDY, groups={"g": group})
    (plain, named), (_, other, _, again) = (suites.members(study, ["g"], seeds=seeds) for seeds in (0, 2))
    assert [one.name for one in (plain, named, other, again)] == ["a", "b-seed7", "a-seed1", "b-seed7-seed1"]
    assert [one.plain_name for one in (plain, named, other, again)] == ["a", "b-seed7", "a", "b-seed7"]
    assert [planning.changed(study, one) for one in (named, again)] == [{suites.SEED: 7}] * 2


def test_seeds_and_a_typed_seed_contradict_each_other():
    study, names = suites.find("exp08-ema", "mini")
    with pytest.raises(ConfigError, match=r"--config\.train\.seed and --seeds=2 both set the seed; omit one"):
        suites.members(study, names, seeds=2, overrides={"train.seed": "7"})
