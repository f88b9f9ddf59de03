# SPDX-License-Identifier: Apache-2.0
"""The layout proof: it holds for every mesh of the presets, and catches faults planted in a hand-sharded step."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cluster.hub import RunError
from configs.base import MESH_AXES
from core import assembly, layout_proof
from core.layout_proof import Layout, differences
from parallelism.mesh import make_mesh
from settings import loading
from tests import warm
from training.state import TrainState

B, T, D, F, V = 4, 10, 6, 14, 22
BETA, RATE, CLIP = 0.9, 0.5, 0.05
SPECS = {  # where a hand-written step keeps its weights
    "embedding": P("model", "fsdp"), "scale": P(), "up": P("fsdp", "model"), "up_bias": P("model"),
    "down": P("model", "fsdp"), "down_bias": P(), "head": P("fsdp", "model"),
}  # fmt: skip
SHAPES = {
    "embedding": (V, D), "scale": (D,), "up": (D, F), "up_bias": (F,), "down": (F, D), "down_bias": (D,), "head": (D, V)
}  # fmt: skip
SPLIT_BY_FSDP = {"embedding": 1, "up": 0, "down": 1, "head": 0}
FAULTS = (
    "embedding: rows of other shards are not masked",
    "embedding: shards begin one row late",
    "embedding: parts are not summed",
    "attention: keys of other shards are not seen",
    "attention: keys are gathered in another order",
    "attention: positions begin anew in each shard",
    "mlp: parts are not summed",
    "mlp: parts are summed over the wrong axis",
    "mlp: bias is added in every shard",
    "mlp: gradient of the input is not summed",
    "mlp: gradient of the output is summed",
    "head: partition function of one shard",
    "head: target's logit of every shard",
    "loss: mean of means",
    "loss: weights of one shard",
    "weights: gathered in another order",
    "gradients: not summed over the batch",
    "gradients: not summed over the length",
    "gradients: summed over the wrong axis",
    "gradients: doubled",
    "gradients: averaged",
    "gradients: of biases not summed",
    "gradients: summed in bfloat16",
    "gradients: scattered to the wrong shard",
    "clipping: by each shard's own norm",
    "optimizer: momentum of the gradient before the sum",
    "update: on the first replica alone",
    "state: examples of one shard",
    "batch: targets of another shard",
    "batch: half of it left out",
)


def initial_state() -> TrainState:
    rng = np.random.default_rng(0)
    params, momentum = ({k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()} for _ in range(2))
    return TrainState(np.int32(3), np.uint32(12), params, {k: 0.1 * m for k, m in momentum.items()}, {})


def token_batch() -> dict:
    rng = np.random.default_rng(1)
    weights = (rng.random((B, T)) < np.linspace(0.3, 1, B)[:, None]).astype(np.float32)
    return {"tokens": rng.integers(0, V, (B, T)), "targets": rng.integers(0, V, (B, T)), "weights": weights}


def attend(x, keys, positions):
    """Causal attention of the stream to itself."""
    scores = jnp.einsum("btd,bsd->bts", x, keys)
    seen = positions[:, None] >= jnp.arange(keys.shape[1])
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.where(seen, scores, -1e30)), keys)


def momentum_update(state, gradients, norm):
    """Clip, add momentum, go down."""
    gradients = jax.tree.map(lambda g: g * jnp.minimum(1, CLIP / norm), gradients)
    momentum = jax.tree.map(lambda m, g: BETA * m + g, state.optimizer, gradients)
    params = jax.tree.map(lambda p, m: p - RATE * m, state.params, momentum)
    return TrainState(state.step + 1, state.examples + B, params, momentum, {})


@jax.jit
def plain_step(state, batch):
    """The step as one would write it for one device."""

    def loss(w):
        x = w["embedding"][batch["tokens"]] * w["scale"]
        x = x + attend(x, x, jnp.arange(T))
        x = x + jax.nn.relu(x @ w["up"] + w["up_bias"]) @ w["down"] + w["down_bias"]
        logits = x @ w["head"]
        picked = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        return jnp.sum(batch["weights"] * (jax.nn.logsumexp(logits, axis=-1) - picked)) / batch["weights"].sum()

    value, gradients = jax.value_and_grad(loss)(state.params)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients.values()))
    return momentum_update(state, gradients, norm), {"loss": value, "norm": norm}, gradients


def both_ways(forward, backward):
    """Return a function with this value and this gradient."""
    function = jax.custom_vjp(forward)
    function.defvjp(lambda x: (forward(x), None), lambda _, gradient: (backward(gradient),))
    return function


def identity(x):
    return x


def model_sum(x):
    return lax.psum(x, "model")


class HandSharded:
    """The same step with every collective written out, batch over fsdp, length over context, the rest over model.

    With the fault of this number in FAULTS, or none; it is chosen as the program runs, which is compiled once.
    """

    def __init__(self, fault: jax.Array):
        self.fault = fault
        self.enter = both_ways(identity, self.unless("mlp: gradient of the input is not summed", model_sum, identity))
        self.leave = both_ways(model_sum, self.unless("mlp: gradient of the output is summed", identity, model_sum))

    def unless(self, fault: str, right, wrong):
        """Return what is right, or with this fault what is wrong: arrays, or functions to them."""
        planted = self.fault == FAULTS.index(fault)
        if callable(right):
            return lambda x: jnp.where(planted, wrong(x), right(x))
        return jax.tree.map(lambda wrong, right: jnp.where(planted, wrong, right), wrong, right)

    def embed(self, w, tokens):
        rows = w["embedding"].shape[0]
        begin = lax.axis_index("model") * rows + self.unless("embedding: shards begin one row late", 0, 1)
        inside = (tokens >= begin) & (tokens < begin + rows)
        x = w["embedding"][jnp.clip(tokens - begin, 0, rows - 1)]
        x = self.unless("embedding: rows of other shards are not masked", jnp.where(inside[..., None], x, 0), x)
        return self.unless("embedding: parts are not summed", self.leave, identity)(x)

    def attention(self, x):
        begin = lax.axis_index("context") * x.shape[1]
        keys = lax.all_gather(x, "context", axis=1, tiled=True)
        own = lax.dynamic_update_slice(jnp.zeros_like(keys), x, (0, begin, 0))
        keys = self.unless("attention: keys of other shards are not seen", keys, own)
        keys = self.unless("attention: keys are gathered in another order", keys, jnp.roll(keys, x.shape[1], axis=1))
        begin = self.unless("attention: positions begin anew in each shard", begin, 0)
        return attend(x, keys, begin + jnp.arange(x.shape[1]))

    def mlp(self, w, x):
        leave = self.unless("mlp: parts are not summed", self.leave, identity)
        leave = self.unless("mlp: parts are summed over the wrong axis", leave, lambda y: lax.psum(y, "fsdp"))
        y = jax.nn.relu(self.enter(x) @ w["up"] + w["up_bias"]) @ w["down"]
        bias = w["down_bias"]
        return self.unless("mlp: bias is added in every shard", leave(y) + bias, leave(y + bias))

    def token_losses(self, w, x, targets):
        logits = self.enter(x) @ w["head"]
        largest = lax.pmax(lax.stop_gradient(logits).max(-1), "model")
        parts = jnp.exp(logits - largest[..., None]).sum(-1)
        parts = self.unless("head: partition function of one shard", self.leave, identity)(parts)
        local = targets - lax.axis_index("model") * logits.shape[-1]
        inside = (local >= 0) & (local < logits.shape[-1])
        inside = self.unless("head: target's logit of every shard", inside, True)
        picked = jnp.take_along_axis(logits, jnp.clip(local, 0, logits.shape[-1] - 1)[..., None], -1)[..., 0]
        return largest + jnp.log(parts) - self.leave(jnp.where(inside, picked, 0))

    def local_loss(self, w, batch):
        x = self.embed(w, batch["tokens"]) * w["scale"]
        x = x + self.attention(x)
        x = x + self.mlp(w, x)
        return jnp.sum(batch["weights"] * self.token_losses(w, x, batch["targets"]))

    def total_weight(self, weights):
        total = lax.psum(weights.sum(), ("fsdp", "context"))
        total = self.unless("loss: weights of one shard", total, weights.sum())
        return self.unless("loss: mean of means", total, 4 * weights.sum())

    def summed(self, name, gradient):
        rounded = self.unless("gradients: summed in bfloat16", identity, lambda x: lax.reduce_precision(x, 8, 7))
        along_length = rounded(lax.psum(rounded(gradient), "context"))
        along_length = self.unless("gradients: not summed over the length", along_length, rounded(gradient))
        over_batch = rounded(lax.psum(along_length, "fsdp"))
        over_model = lax.psum(along_length, "model")
        over_batch = self.unless("gradients: summed over the wrong axis", over_batch, over_model)
        over_batch = self.unless("gradients: doubled", over_batch, 2 * over_batch)
        over_batch = self.unless("gradients: averaged", over_batch, over_batch / 2)
        total = self.unless("gradients: not summed over the batch", over_batch, along_length)
        is_bias = name.endswith("bias")
        return self.unless("gradients: of biases not summed", total, gradient) if is_bias else total

    def scattered(self, name, gradient):
        if name not in SPLIT_BY_FSDP:
            return gradient
        dim, parts = SPLIT_BY_FSDP[name], lax.axis_size("fsdp")
        index = lax.axis_index("fsdp") + self.unless("gradients: scattered to the wrong shard", 0, 1)
        size = gradient.shape[dim] // parts
        return lax.dynamic_slice_in_dim(gradient, index % parts * size, size, dim)

    def gathered(self, name, weight):
        if name not in SPLIT_BY_FSDP:
            return weight
        dim = SPLIT_BY_FSDP[name]
        whole = lax.all_gather(weight, "fsdp", axis=dim, tiled=True)
        return self.unless("weights: gathered in another order", whole, jnp.roll(whole, weight.shape[dim], dim))

    def squares(self, name, gradient):
        split = tuple(axis for axis in SPECS[name] if axis)
        own = jnp.sum(gradient**2)
        return self.unless("clipping: by each shard's own norm", lax.psum(own, split) if split else own, own)

    def misplaced(self, batch):
        targets = lax.ppermute(batch["targets"], "fsdp", [(0, 1), (1, 0)])
        weights = batch["weights"] * (lax.axis_index("fsdp") == 0)
        batch = self.unless("batch: targets of another shard", batch, batch | {"targets": targets})
        return self.unless("batch: half of it left out", batch, batch | {"weights": weights})

    def __call__(self, state, batch):
        batch = self.misplaced(batch)
        w = {name: self.gathered(name, weight) for name, weight in state.params.items()}
        loss, local = jax.value_and_grad(self.local_loss)(w, batch)
        weight = self.total_weight(batch["weights"])
        loss, local = lax.psum(loss / weight, ("fsdp", "context")), jax.tree.map(lambda g: g / weight, local)
        gradients = {name: self.scattered(name, self.summed(name, g)) for name, g in local.items()}
        norm = jnp.sqrt(sum(self.squares(name, g) for name, g in gradients.items()))
        after = momentum_update(state, gradients, norm)
        unsummed = momentum_update(state, {name: self.scattered(name, g) for name, g in local.items()}, norm).optimizer
        momentum = self.unless("optimizer: momentum of the gradient before the sum", after.optimizer, unsummed)
        first = lax.axis_index("context") == 0
        kept = jax.tree.map(lambda new, old: jnp.where(first, new, old), after.params, state.params)
        params = self.unless("update: on the first replica alone", after.params, kept)
        examples = self.unless("state: examples of one shard", after.examples, state.examples + B // 2)
        after = dataclasses.replace(after, params=params, optimizer=momentum, examples=examples)
        return after, {"loss": loss, "norm": norm}, gradients


def layout(mesh, step) -> Layout:
    """Put the state where a hand-written step keeps it."""
    specs = TrainState(P(), P(), SPECS, SPECS, {}), dict.fromkeys(token_batch(), P("fsdp", "context"))
    return Layout(mesh, step, *jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))


@pytest.fixture(scope="module")
def found():
    """Return a function to what the proof says of the hand-written step with a fault."""
    one = make_mesh(dict(data=1, fsdp=1, context=1, expert=1, model=1), jax.devices()[:1])
    many = make_mesh(dict(data=1, fsdp=2, context=2, expert=1, model=2))
    state, batch = TrainState(P(), P(), SPECS, SPECS, {}), P("fsdp", "context")
    sharded = jax.jit(
        jax.shard_map(
            lambda fault, state, batch: HandSharded(fault)(state, batch), mesh=many, in_specs=(P(), state, batch),
            out_specs=(state, P(), SPECS), check_vma=False,
        )
    )  # fmt: skip

    def of(fault: str) -> list[str]:
        number = np.int32(FAULTS.index(fault) if fault else -1)
        candidate = layout(many, lambda state, batch: sharded(number, state, batch))
        return differences(layout(one, plain_step), candidate, initial_state(), token_batch())

    return of


def test_a_right_step_written_by_hand_passes(found):
    assert found("") == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(found, fault):
    assert found(fault)


def test_a_layout_of_another_recipe_is_told_by_the_names_of_its_arrays():
    one = make_mesh(dict(data=1, fsdp=1, context=1, expert=1, model=1), jax.devices()[:1])

    def other(state, batch):
        after, scalars, gradients = plain_step(state, batch)
        return after, scalars, {"weight": gradients["up"]}

    lines = differences(layout(one, plain_step), layout(one, other), initial_state(), token_batch())
    assert len(lines) == 1 and "gradient" in lines[0] and "'weight'" in lines[0]


def test_a_gradient_of_rounding_errors_is_not_compared(found):
    """An optimizer makes a whole step of it, in another direction on another layout."""
    one = make_mesh(dict(data=1, fsdp=1, context=1, expert=1, model=1), jax.devices()[:1])

    def with_rounding(sign):
        def step(state, batch):
            _, scalars, gradients = plain_step(state, batch)
            gradients |= {"scale": sign * 1e-9 * jnp.ones(D)}
            return momentum_update(state, jax.tree.map(jnp.sign, gradients), 1.0), scalars, gradients

        return layout(one, step)

    assert differences(with_rounding(1), with_rounding(-1), initial_state(), token_batch()) == []


def test_a_step_that_is_not_finite_on_one_device_proves_nothing():
    one = make_mesh(dict(data=1, fsdp=1, context=1, expert=1, model=1), jax.devices()[:1])

    def diverges(state, batch):
        after, scalars, gradients = plain_step(state, batch)
        return after, scalars, gradients | {"up": gradients["up"] * jnp.nan}

    reference = layout(one, diverges)
    with pytest.raises(RunError, match="gradient up is not finite on one device either"):
        differences(reference, reference, initial_state(), token_batch())


def test_what_depends_on_the_layout_by_design_is_left_out_and_named():
    keys = {"model.quantization": "int8", "model.dropout": "0.1", "train.init_from": "runs/x", "lora.rank": "4"}
    config = tiny(**keys)
    assert layout_proof.not_proved(config) == ["lora.rank=4", "model.quantization=int8", "model.dropout=0.1"]
    assert layout_proof.not_proved(tiny()) == []
    config.train.objective = "dpo"
    assert layout_proof.not_proved(config)[0] == "train.objective=dpo"


@pytest.mark.slow
def test_meshes_of_presets_compute_what_one_device_does():
    """And a run on other meshes has the same losses; on 16 simulated devices, in a process of their own."""
    process = warm.start(["benchmarks/layouts.py", "--quick"], dict(os.environ))
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    figures = json.loads(out.splitlines()[-1])["figures"]
    assert figures["layouts_proved"] == 1 and figures["layouts_that_differ"] == 0, out
    assert figures["meshes"] == 2 and figures["largest_loss_difference"] <= 1e-5, out


def tiny(**changes: str):
    """Return the smallest recipe, with mesh axes of 1 except for the changes; scanned layers compile fastest."""
    typed = {f"mesh.{axis}": "1" for axis in MESH_AXES} | {"model.layer_loop": "scan"} | changes
    return loading.load("configs/tiny.py", "", typed).config


BACKWARDS = "dcn_data,model,expert,context,fsdp,data"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {
            "mesh.dcn_data": "2", "mesh.fsdp": "2", "mesh.model": "2", "layout.axis_order": BACKWARDS,
            "train.gradient_accumulation": "2", "optimizer.name": "muon",
        },
        {"mesh.fsdp": "2", "mesh.context": "2", "mesh.expert": "2", "optimizer.name": "adafactor"},
        {"mesh.dcn_data": "2", "mesh.fsdp": "4", "optimizer.name": "lion", "optimizer.ema_decay": "0.9"},
    ],
    ids=lambda changes: "-".join(changes.values()),
)  # fmt: skip
def test_a_recipes_own_step_passes_on_mixed_meshes_with_every_optimizer(changes):
    """Of slices too, and of axes in another order."""
    assert layout_proof.layout_differences(tiny(**changes)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"mesh.fsdp": "4", "mesh.data": "2", "model.puzzle_dim": "64", "model.num_puzzles": "32"},
        {
            "mesh.data": "1", "mesh.fsdp": "8", "model.mixer": "attention", "model.positions": "rope",
            "model.high_cycles": "1", "optimizer.name": "sgd", "optimizer.ema_decay": "0",
        },
    ],
    ids=lambda changes: "-".join(changes.values()),
)  # fmt: skip
def test_the_step_of_a_recursive_model_passes_on_its_meshes(changes):
    small = {"model.high_cycles": "2", "model.low_cycles": "1", "model.num_layers": "1"}  # each is compiled again
    config = loading.load("configs/trm/sudoku_mini.py", "", small | changes).config
    assert layout_proof.layout_differences(config) == []


@pytest.mark.slow
@pytest.mark.parametrize("recipe, changes", [
    ("countdown_value_head", {}),
    ("countdown_grpo", {"grpo.kl": "0.1", "train.init_from": "runs/countdown"}),
])  # fmt: skip
def test_a_step_that_reads_frozen_weights_is_proved_without_them(recipe, changes):
    """They are not restored for a proof."""
    config = loading.load(f"configs/{recipe}.py", "", {"mesh.fsdp": "2"} | changes).config
    assert layout_proof.layout_differences(config) == []


def test_a_fault_in_our_own_step_is_told_by_name(monkeypatch):
    """The gradient of the last norm is summed twice over the devices."""
    config = tiny(**{"mesh.fsdp": "8", "optimizer.name": "sgd"})
    gradient_of = assembly.shard_map_gradient

    def faulty(*arguments, **options):
        gradient = gradient_of(*arguments, **options)

        def doubled(*inputs):
            gradients, weight, carry, scalars = gradient(*inputs)
            gradients["norm"]["scale"] *= 2
            return gradients, weight, carry, scalars

        return doubled

    monkeypatch.setattr(assembly, "shard_map_gradient", faulty)
    lines = layout_proof.layout_differences(config)
    assert any(line.startswith("gradient norm.scale: relative error 1.0") for line in lines), lines
