# SPDX-License-Identifier: Apache-2.0
"""The GRPO loss against its equations in float64, and the gradient that it gives."""

import functools
import math

import jax
import numpy as np
import pytest
from flax import nnx

from configs.base import MESH_AXES, get_config
from configs.errors import ConfigError
from core.assembly import assemble
from objectives.grpo import GRPO, make
from objectives.objective import bits_of
from parallelism.mesh import mesh_context
from tests.support import assert_close, forward, make_model, model_config, packed_batch, random_weights

CLIP, CLIP_HIGH, KL = 0.2, 0.4, 0.1
PROMPTS, ANSWERS = (3, 2, 5, 4), (6, 9, 2, 7)
ADVANTAGES = np.array([1.5, -0.5, 0.25, -2.0], np.float32)


@functools.cache
def models():
    """Return the graph of a decoder, its parameters, those that drew the answers, and those of a reference."""
    graph, params = make_model(model_config())
    nearby = jax.tree.map(lambda a, b: a + 0.05 * b, params, random_weights(params, seed=2))
    return graph, params, nearby, random_weights(params, seed=1)


@functools.cache
def batch() -> dict:
    """Return four prompts with answers, as the nearby parameters drew them."""
    plain = packed_batch([[sum(sizes)] for sizes in zip(PROMPTS, ANSWERS, strict=True)], 16, 37)
    is_prompt = plain["positions"] < np.array(PROMPTS)[:, None]
    plain |= {"targets": np.where(is_prompt, -1, plain["targets"])}
    old = np.where(mask(plain), log_p(models()[2], plain), 0).astype(np.float32)
    return plain | {
        "advantages": bits_of(ADVANTAGES), "rewards": bits_of(np.arange(4.0)), "old_log_probs": bits_of(old),
    }  # fmt: skip


def mask(batch) -> np.ndarray:
    return (batch["segments"] > 0) & (batch["targets"] >= 0)


def log_p(params, batch, temperature: float = 1.0) -> np.ndarray:
    """Return the log-probability of each target, in float64."""
    logits = np.asarray(forward(models()[0], params, batch), np.float64) / temperature
    all_log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.take_along_axis(all_log_p, np.maximum(batch["targets"], 0)[..., None], axis=-1)[..., 0]


def loss(params, reference, **how):
    graph = models()[0]
    objective = GRPO(4, 16, num_chunks=4, vocab_size=37, clip=CLIP, clip_high=CLIP_HIGH, **how)
    others = {"reference": nnx.merge(graph, reference)} if reference else {}
    (total, weight), (_, scalars) = objective.loss(nnx.merge(graph, params), {}, batch(), None, **others)
    return total / weight, scalars


@pytest.mark.parametrize(
    ("average", "kl", "temperature"),
    [("token", 0.0, 1.0), ("sequence", 0.0, 1.0), ("token", KL, 0.8), ("sequence", KL, 1.0)],
)
def test_the_loss_is_that_of_the_paper(average, kl, temperature):
    """The old log-probabilities are those of the draws, whatever their temperature."""
    _, params, nearby, reference = models()
    batch()  # outside of the jit
    how = dict(average=average, kl=kl, temperature=temperature)
    found, scalars = jax.jit(functools.partial(loss, **how))(params, reference if kl else None)
    counts, p = mask(batch()), log_p(params, batch(), temperature)
    ratio, advantage = np.exp(p - log_p(nearby, batch())), ADVANTAGES[:, None]
    clipped = np.clip(ratio, 1 - CLIP, 1 + CLIP_HIGH)
    assert 0.02 < (ratio != clipped)[counts].mean() < 0.98, "some tokens must be clipped, and some not"
    behind = log_p(reference, batch(), temperature) - p
    of_token = -np.minimum(ratio * advantage, clipped * advantage) + kl * (np.exp(behind) - behind - 1)
    means = [of_token[row][counts[row]].mean() for row in range(4)]
    assert_close(found, of_token[counts].mean() if average == "token" else np.mean(means))
    told = {name: float(total / weight) for name, (total, weight) in scalars.items() if name != "tokens"}
    assert told["reward"] == 1.5 and told["mismatch"] == pytest.approx(np.abs(np.log(ratio))[counts].mean(), rel=1e-4)
    assert told["clipped"] == pytest.approx((ratio != clipped)[counts].mean())
    if kl:
        assert told["kl"] == pytest.approx((np.exp(behind) - behind - 1)[counts].mean(), rel=1e-4)
    assert float(scalars["tokens"][0]) == counts.sum()


def scalars_on(mesh: dict[str, int], average: str) -> dict:
    """Return the scalars of a step; short answers lie in one shard of the length, long ones in both."""
    config = get_config()
    config.model.update(num_layers=1, embed_dim=32, num_heads=2, num_kv_heads=2, mlp_dim=32, vocab_size=64)
    config.model.update(max_length=16, dtype="float32")
    config.train.update(objective="grpo", global_batch=4, sequence_length=16)
    config.data.update(source="countdown_rollouts", tokenizer="byte")
    config.grpo.average = average
    is_answer = np.zeros((4, 16), bool)
    is_answer[:2, 2:6] = is_answer[2:, 2:14] = True
    config.mesh.update(dict.fromkeys(MESH_AXES, 1) | mesh)
    run = assemble(config, devices=jax.devices()[: math.prod(mesh.values())])
    rows = jax.device_get(run.objective.random_batch(jax.random.key(0)))
    rows |= {"segments": np.ones_like(rows["segments"]), "rewards": bits_of(np.array([0.0, 0, 1, 1]))}
    rows |= {"advantages": bits_of(ADVANTAGES)}
    rows["targets"] = np.where(is_answer, np.maximum(rows["targets"], 0), -1)
    with mesh_context(run.mesh):
        rows = {name: jax.device_put(rows[name], leaf.sharding) for name, leaf in run.abstract_batch.items()}
        return run.train_step_with_grads(run.init(), rows, {})[1]


@pytest.mark.slow
def test_the_reward_counts_each_answer_once_however_the_rows_are_sharded():
    for shards in (1, 2):
        assert float(scalars_on({"model": shards}, "token")["reward"]) == 0.5


def test_a_row_without_an_answer_has_no_part_in_the_reward_and_the_reference_has_no_dropout():
    keys, rows = {}, batch()
    targets = np.where(np.arange(4)[:, None] == 3, -1, rows["targets"])

    class Keys(GRPO):
        def log_probabilities(self, model, batch, key, temperature):
            keys[model] = key
            return np.zeros((4, 16), np.float32)

    objective = Keys(4, 16, vocab_size=37, kl=KL)
    _, (_, scalars) = objective.loss("trained", {}, rows | {"targets": targets}, "key", reference="reference")
    assert keys == {"trained": "key", "reference": None}
    total, weight = scalars["reward"]
    assert (float(total), float(weight)) == (0 + 1 + 2, 3)


@pytest.mark.slow
def test_each_answer_has_the_same_weight_however_its_tokens_are_sharded():
    expected = scalars_on({"model": 1}, "sequence")["loss"]
    for axis in ("model", "context"):
        assert_close(scalars_on({axis: 2}, "sequence")["loss"], expected)


@pytest.mark.parametrize("apart", [-200.0, 200.0])
def test_answers_that_the_model_finds_impossible_spoil_no_gradient(apart):
    """exp(200) is infinite in float32; the value is clipped, and so must be the gradient."""
    _, params, _, reference = models()
    rows = batch() | {"old_log_probs": bits_of(np.full((4, 16), apart, np.float32))}
    worse = jax.tree.map(lambda leaf: 30 * leaf, reference)  # some divergences overflow

    def of_rows(params):
        objective = GRPO(4, 16, num_chunks=4, vocab_size=37, clip=CLIP, clip_high=CLIP_HIGH, kl=KL)
        graph = models()[0]
        (total, _), _ = objective.loss(nnx.merge(graph, params), {}, rows, None, reference=nnx.merge(graph, worse))
        return total

    value, gradient = jax.jit(jax.value_and_grad(of_rows))(params)
    assert np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_the_gradient_of_fresh_answers_is_that_of_reinforce():
    """The ratio is 1 where the answers were just drawn: the gradient is that of -A log p."""
    graph, _, nearby, _ = models()
    batch()  # outside of the jit
    found = jax.jit(jax.grad(lambda params: loss(params, None)[0]))(nearby)

    def reinforce(params):
        stream, _ = nnx.merge(graph, params)(batch()["tokens"], batch()["positions"], batch()["segments"])
        logits = nnx.merge(graph, params).logits(stream)
        targets = np.maximum(batch()["targets"], 0)[..., None]
        p = jax.numpy.take_along_axis(jax.nn.log_softmax(logits), targets, axis=-1)[..., 0]
        return -(p * ADVANTAGES[:, None] * mask(batch())).sum() / mask(batch()).sum()

    jax.tree.map(assert_close, found, jax.jit(jax.grad(reinforce))(nearby))


def test_training_needs_the_recipe_of_its_reward_and_reading_does_not():
    config = get_config()
    config.train.objective, config.grpo.reward = "grpo", "is_short"
    objective = make(config)
    with pytest.raises(ConfigError, match=r"grpo.reward=is_short is not .*; name that recipe by --config"):
        objective.check_to_train()
    config.grpo.reward = "random"
    make(config).check_to_train()


def test_without_a_higher_clip_both_sides_are_clipped_alike():
    config = get_config()
    config.grpo.update(clip=0.3, temperature=0.7)
    made = make(config)
    assert (made.clip, made.clip_high, made.temperature, made.sampler.temperature) == (0.3, 0.3, 0.7, 0.7)
    config.grpo.clip_high = 0.5
    assert (make(config).clip, make(config).clip_high) == (0.3, 0.5)
