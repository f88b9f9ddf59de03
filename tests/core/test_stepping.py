# SPDX-License-Identifier: Apache-2.0
"""A caller's own loop begins with random weights: what needs another run is refused."""

import types

import pytest

from configs.errors import ConfigError
from core.stepping import Steps


def run(frozen=(), **train):
    config = types.SimpleNamespace(train=types.SimpleNamespace(**{"init_from": ""} | train))
    return types.SimpleNamespace(config=config, abstract_frozen={role: {} for role in frozen})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (run(init_from="runs/base"), "has no train.init_from, which train.train reads"),
        (run(["teacher"]), "has no teacher model, which train.train reads"),
    ],
)
def test_what_steps_cannot_do_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Steps(given)


def test_a_plain_run_has_steps():
    assert Steps(plain := run()).run is plain
