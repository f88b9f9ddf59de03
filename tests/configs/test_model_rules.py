# SPDX-License-Identifier: Apache-2.0
"""Options of the model that do not go together are refused in one line; the others are accepted."""

import pytest

from configs import base
from configs.errors import ConfigError
from settings import validation


def validate(**model) -> None:
    config = base.get_config()
    config.model.update(model)
    validation.validate(config, 1)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"rope_scaling": "ntk"}, "model.rope_scaling=ntk is unknown"),
        ({"rope_factor": 8.0}, "model.rope_scaling=none needs model.rope_factor=1, not 8.0"),
        ({"rope_scaling": "linear", "rope_factor": 0.5}, "model.rope_factor=0.5 must be 1 or greater"),
        ({"rope_scaling": "yarn", "rope_factor": 4.0}, "rope_scaling=yarn needs model.rope_original_length"),
        ({"rope_scaling": "llama3", "rope_factor": 8.0}, "rope_scaling=llama3 needs model.rope_original_length"),
        ({"rope_original_length": 4096}, "rope_scaling=none needs model.rope_original_length=0, not 4096"),
        (
            {"rope_scaling": "linear", "rope_original_length": 4096},
            "rope_scaling=linear needs model.rope_original_length=0, not 4096",
        ),
        ({"quantization": "int4"}, "model.quantization=int4 is unknown; did you mean int8"),
        ({"biases": "some"}, "model.biases=some is unknown"),
        ({"global_every": 2}, "model.global_every=2 needs model.sliding_window"),
        ({"sliding_window": 64, "global_every": 1}, "global_every=1 must lie between 2 and model.num_layers=6"),
        ({"sliding_window": 64, "global_every": 7}, "global_every=7 must lie between 2 and model.num_layers=6"),
        ({"activation": "gelu"}, "model.activation=gelu is unknown; did you mean gelu_tanh"),
        (
            {"local_rope_theta": 1e4},
            "model.local_rope_theta=10000.0 needs model.sliding_window",
        ),
        ({"local_rope_theta": 1.0, "sliding_window": 8}, "model.local_rope_theta=1.0 must be greater than 1"),
        ({"query_scalar": -1.0}, "model.query_scalar=-1.0 must be 0 or greater"),
        ({"dropout": 1.0}, "model.dropout=1.0 must be 0 or greater and less than 1"),
        ({"num_experts": 4, "experts_per_token": 5}, "model.experts_per_token=5 must be at most model.num_experts=4"),
        ({"num_experts": 4, "quantization": "int8"}, "model.num_experts=4 needs model.quantization=none, not int8"),
        ({"num_experts": 4, "biases": "all"}, "model.num_experts=4 needs model.biases=none, not all"),
        ({"num_experts": 4, "mup_base_dim": 64}, "model.num_experts=4 needs model.mup_base_dim=0, not 64"),
        ({"num_experts": -1}, "model.num_experts=-1 must be 0 or greater"),
        ({"num_experts": 4, "router": "relu"}, "model.router=relu is unknown"),
        ({"dropout": -0.1}, "model.dropout=-0.1 must be 0 or greater and less than 1"),
    ],
)
def test_an_inconsistent_option_is_told_in_one_line(model, words):
    with pytest.raises(ConfigError) as caught:
        validate(**model)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "model",
    [
        {"rope_scaling": "linear", "rope_factor": 8.0},
        {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 4096},
        {"sliding_window": 64, "global_every": 6},
        {"dropout": 0.99, "biases": "all", "mup_base_dim": 128},
        {"dropout": 0.5, "num_experts": 4, "qk_norm": True, "router": "sigmoid"},
    ],
)
def test_a_consistent_option_is_taken(model):
    validate(**model)


def test_experts_that_devices_cannot_share_evenly_are_refused():
    config = base.get_config()
    config.model.num_experts = 6
    config.mesh.update(expert=2, model=2)
    with pytest.raises(ConfigError, match=r"^model.num_experts=6 is not a multiple of .*=4; use 4 or 8$"):
        validation.validate(config, 4)


def test_experts_and_a_split_length_are_refused_together():
    config = base.get_config()
    config.model.num_experts, config.mesh.context = 4, 2
    with pytest.raises(ConfigError, match=r"^model.num_experts=4 needs mesh.context=1, not 2 "):
        validation.validate(config, 2)
