# SPDX-License-Identifier: Apache-2.0
"""Ways for a tensor to lie: bytes counted by hand, none illegal, the best first, and what the axis rules say of it."""

import itertools
import math

import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from configs import topologies
from configs.errors import ConfigError
from core import models
from layers.axes import declared_axes
from objectives import language_modeling
from parallelism.axis_rules import RULES
from parallelism.mesh import make_mesh
from rehearsal import sharding
from rehearsal.assumptions import Assumptions
from settings import loading
from settings.validation import validate
from tests.support import one_device_mesh

RATES = Assumptions(1.0, 1.0, ring_bandwidth=1.0, permute_bandwidth=1.0, clock_hz=None, dcn_bandwidth=0.5)


def found(shape, role, tokens=0, **mesh) -> dict:
    """Return the legal options by their specs as text, the best first."""
    tensor = sharding.Tensor(shape, role, tokens=tokens)
    return {sharding.text(option.spec): option for option in sharding.options(tensor, mesh, RATES)}


def bytes_of(option) -> dict[str, float]:
    return {f"{move.what}, {move.axis}": move.bytes for move in option.moves}


def test_weights_over_tokens_are_gathered_twice_and_their_gradient_is_reduced():
    """96 numbers; each of four devices is sent three quarters: in bfloat16 three times, or in float32 twice."""
    options = found((8, 12), "weights", fsdp=4, context=1)
    assert list(options) == ["P('fsdp', None)", "P(None, 'fsdp')", "P()"]
    split, whole = options["P('fsdp', None)"], options["P()"]
    assert (split.held, whole.held) == (96, 384)
    assert bytes_of(split) == {"all-gather forward and backward, fsdp": 288, "reduce-scatter the gradient, fsdp": 144}
    assert bytes_of(whole) == {"all-reduce the gradient, fsdp": 576}
    assert (split.seconds, whole.seconds) == (432, 576)


def test_weights_over_model_have_their_activations_summed_or_their_products_computed_again():
    """Ten tokens of 8 numbers in and 12 out; a product takes 6 * 10 * 96 FLOPs, at one a second."""
    options = found((8, 12), "weights", tokens=10, fsdp=2, model=2)
    assert bytes_of(options["P('fsdp', 'model')"]) == {
        "all-gather forward and backward, fsdp": 96, "reduce-scatter the gradient, fsdp": 48,
        "all-reduce the gradient of the input, model": 160,
    }  # fmt: skip
    assert bytes_of(options["P('model', None)"]) == {
        "all-reduce the gradient, fsdp": 192,
        "all-reduce the output, model": 240,
    }
    again = options["P('fsdp', None)"]
    assert again.repeated == 6 * 10 * 96 / 2 and again.seconds == again.moved + again.repeated


def test_the_network_between_slices_is_crossed_while_parts_are_small():
    """Of 384 bytes in 8 parts: one to the other slice, at half the speed, then three times two over fsdp."""
    option = found((8, 12), "weights", dcn_data=2, fsdp=4)["P(('dcn_data', 'fsdp'), None)"]
    gathered = {axis: size for axis, size in bytes_of(option).items() if "all-gather" in axis}
    assert gathered == {"all-gather forward and backward, dcn_data": 48, "all-gather forward and backward, fsdp": 288}
    assert option.seconds == 1.5 * (2 * 48 + 288)


@pytest.mark.parametrize("role", ["gradients", "optimizer"])
def test_what_an_update_needs_is_reduce_scattered_and_gathered_or_all_reduced(role):
    options = found((8, 12), role, fsdp=4, model=2)
    assert len(next(iter(options.values())).moves) == 2 and options["P('fsdp', 'model')"].held == 48
    assert bytes_of(options["P('fsdp', None)"]) == {
        "all-gather after the update, fsdp": 288, "reduce-scatter the gradient, fsdp": 144,
    }  # fmt: skip
    assert bytes_of(options["P(None, 'model')"]) == {"all-reduce the gradient, fsdp": 288}


def test_activations_stay_where_their_tokens_are():
    """512 numbers; over model each of two is sent half of them four times."""
    options = found((4, 8, 16), "activations", data=4)
    assert options["P('data', None, None)"].moves == options["P(None, 'data', None)"].moves == ()
    for spec in ("P()", "P(None, None, 'data')"):
        assert bytes_of(options[spec]) == {"all-gather, and reduce-scatter the gradient, data": 1536}
    for option in found((4, 8, 16), "activations", model=2).values():
        assert bytes_of(option) == {"all-gather and reduce-scatter, also the gradient, model": 2048}


@pytest.mark.parametrize("role", ["weights", "optimizer", "activations"])
@pytest.mark.parametrize(
    ("shape", "mesh"),
    [
        ((64, 24), {"data": 2, "fsdp": 2, "model": 2}), ((6, 20), {"fsdp": 4, "context": 1, "model": 2}),
        ((7, 9), {"data": 8}), ((12, 2, 8), {"data": 2, "fsdp": 4, "expert": 1}), ((8, 1, 3), {"fsdp": 8, "model": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_options_are_all_that_jax_can_place_and_hold_what_it_would(role, shape, mesh):
    """And no others: each assignment of axes of more than one device is tried on real devices."""
    options = sharding.options(sharding.Tensor(shape, role), mesh, RATES)
    devices, axes = make_mesh(mesh), [axis for axis, size in mesh.items() if size > 1]
    held = {}
    for places in itertools.product([*range(len(shape)), None], repeat=len(axes)):
        spec = tuple(tuple(a for a, place in zip(axes, places, strict=True) if place == d) for d in range(len(shape)))
        try:
            held[spec] = 4 * math.prod(NamedSharding(devices, PartitionSpec(*spec)).shard_shape(shape))
        except ValueError:
            continue
    assert {option.spec: option.held for option in options} == held
    best = options[0]
    assert all(best.seconds <= option.seconds * (1 + 1e-9) for option in options)
    assert all(best.held <= option.held for option in options if np.isclose(option.seconds, best.seconds, rtol=1e-9))


def seven_billion(**mesh):
    overrides = {f"mesh.{axis}": str(size) for axis, size in mesh.items()}
    loaded = loading.load("configs/llama2_7b.py", "v4-32", overrides)
    validate(loaded.config, 16)
    return loaded


def by_the_rules(loaded) -> dict[str, bool]:
    """Return for each weight of a layer whether what the axis rules say of it is as good as the best."""
    objective = language_modeling.make(loaded.config)
    abstract = models.build(loaded.config, one_device_mesh(), objective).trained
    mesh, rules, agreed = loaded.config.mesh, dict(RULES), {}
    for path, (shape, names) in declared_axes(abstract).items():
        dims = [(size, rules[name]) for size, name in zip(shape, names, strict=True) if name != "layers"]
        if len(dims) < 2:
            continue
        axes = [(of,) if isinstance(of, str) else of or () for _, of in dims]
        ours = sharding.text(tuple(tuple(axis for axis in of if mesh[axis] > 1) for of in axes))
        table = sharding.advise(loaded.config, loaded.topology, tuple(size for size, _ in dims), "weights")
        as_good = [note.removeprefix("equally good: ") for note in table["notes"] if note.startswith("equally good: ")]
        agreed[".".join(map(str, path))] = ours == table["best"] or any(ours in said for said in as_good)
    return agreed


def test_the_axis_rules_are_as_good_as_the_best_for_each_weight_of_7b_on_its_slice():
    agreed = by_the_rules(seven_billion())
    assert len(agreed) == 9 and all(agreed.values()), agreed


def test_the_advice_splits_weights_over_copies_too_which_the_axis_rules_do_not():
    """It leaves out that copies are summed once a step, however many microbatches."""
    loaded = seven_billion(data=2, fsdp=4, model=2)
    assert not any(by_the_rules(loaded).values())
    assert (
        sharding.advise(loaded.config, loaded.topology, (4096, 11008), "weights")["best"]
        == "P(('data', 'fsdp'), 'model')"
    )


def test_what_does_not_fit_comes_after_what_does_and_is_told():
    """All weights, gradients and moments of 7B on one chip are 100 GiB."""
    loaded = seven_billion()
    table = sharding.advise(loaded.config, loaded.topology, (4096, 11008), "weights")
    assert [(row["spec"], row["verdict"]) for row in table["rows"]][-1] == ("P()", "does not fit")
    indivisible = sharding.advise(loaded.config, loaded.topology, (4095, 11007), "weights")
    assert indivisible["best"] is None
    assert indivisible["notes"][0].startswith("none fits: P() needs least, 100.4 of 32 GiB a chip")
    assert "dimension 0 of 4095 is not a multiple of fsdp=16" in indivisible["notes"]


@pytest.mark.parametrize(
    ("topology", "name", "shape", "message"),
    [
        ("cpu-8", "decoder_lm", (8, 8), "the speed of a CPU's links is unknown"),
        ("v4-32", "trm", (8, 8), "not of model.name=trm"),
        ("v4-32", "decoder_lm", (8,), "weights need two dimensions or more"),
    ],
)
def test_what_cannot_be_advised_is_told_in_one_line(topology, name, shape, message):
    config = seven_billion().config
    config.model.name = name
    with pytest.raises(ConfigError, match=message):
        sharding.advise(config, topologies.get(topology), shape, "weights")
