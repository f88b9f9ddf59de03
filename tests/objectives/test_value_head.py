# SPDX-License-Identifier: Apache-2.0
"""The loss of the value head against its equation in float64, and what it trains."""

import jax
import numpy as np
import pytest
from flax import nnx

from input_pipeline.errors import DataError
from objectives.objective import bits_of
from objectives.value_head import ValueHead
from reasoning import rollouts
from tests.support import assert_close, make_model, model_config, packed_batch, random_weights

REWARDS = np.array([1, 0, 0.25, 1], np.float32)


def batch() -> dict:
    """Return four prompts of three tokens with answers."""
    plain = packed_batch([[9], [5], [12], [7]], 16, 37)
    return plain | {"targets": np.where(plain["positions"] < 2, -1, plain["targets"]), "rewards": bits_of(REWARDS)}


def test_the_loss_is_the_cross_entropy_of_the_reward_at_each_token_of_an_answer():
    objective = ValueHead(4, 16, vocab_size=37)
    graph, params = make_model(model_config())
    model = objective.transform(nnx.merge(graph, params), nnx.Rngs(0))
    graph, params = nnx.split(model, nnx.Param)
    params = random_weights(nnx.to_pure_dict(params))
    data = batch()
    model = nnx.merge(graph, params)
    (total, weight), (_, scalars) = objective.loss(model, {}, data, None)
    stream_BTD, _ = model(data["tokens"], data["positions"], data["segments"])
    logits_BT = np.asarray(stream_BTD, np.float64) @ np.asarray(params["value_head"]["kernel"], np.float64)[:, 0]
    v_BT, r_B1 = 1 / (1 + np.exp(-logits_BT)), REWARDS[:, None].astype(np.float64)
    mask_BT = (data["segments"] > 0) & (data["targets"] >= 0)
    wanted = -((r_B1 * np.log(v_BT) + (1 - r_B1) * np.log(1 - v_BT)) * mask_BT).sum()
    assert weight == mask_BT.sum() > 20
    assert_close(total, wanted)
    assert_close(scalars["accuracy"][0], (((v_BT > 0.5) == (r_B1 > 0.5)) * mask_BT).sum())


@pytest.mark.parametrize("reward", [-1.0, 1.5, np.nan])
def test_a_reward_that_is_no_probability_ends_the_run_in_a_line(reward):
    with pytest.raises(DataError, match=f"rewards from 0 to 1; grpo.reward gave {reward:g}"):
        rollouts.check_probabilities([0.0, 1.0, reward])


def test_the_work_of_a_token_is_a_forward_pass_without_logits():
    objective = ValueHead(4, 16, vocab_size=37, embed_dim=5)
    assert objective.flops_per_token(lambda: 3 * 1000.0, frozen=True) == 1000 - 2 * 5 * 37


def test_the_head_alone_is_trained():
    graph, params = make_model(model_config())
    model = ValueHead(4, 16, vocab_size=37).transform(nnx.merge(graph, params), nnx.Rngs(0))
    _, trained, _ = nnx.split(model, ValueHead.trainable, ...)
    assert [leaf.shape for leaf in jax.tree.leaves(trained)] == [(model.embed_dim, 1)]
