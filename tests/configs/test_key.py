# SPDX-License-Identifier: Apache-2.0
"""A key is declared once, and what it declares is what the code does."""

import pytest

from configs.base import KEYS, get_config, keys_of
from configs.key import EXECUTION, MACHINE, PER_HOST, RESUME, TRANSFER, Key, Section
from input_pipeline.puzzles import arc
from layers import block, mlp, products
from layers.experts import experts
from objectives import recursive
from settings import ramp, ranges
from settings.keys import flat

IMPLEMENTED = {  # the tables that the choices of a key are looked up in
    "model.remat": ("none", *reversed(block.REMAT)),
    "model.quantization": ("none", *products.QUANTIZED),
    "model.activation": tuple(mlp.ACTIVATIONS),
    "model.router": tuple(experts.LOG_SCORES),
    "supervision.loss": tuple(recursive.LOSSES),
    "batch.learning_rate": tuple(ramp.RATES),
    "data.puzzle_set": tuple(arc.SUBSETS),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_default_is_one_of_the_values_that_its_key_may_have_and_has_a_meaning(name):
    key = KEYS[name]
    ranges.check(flat(get_config()) | {name: key.default})
    assert len(key.meaning) > 10 and key.meaning[-1] != "." and "\n" not in key.meaning
    if not isinstance(key.default, bool) and isinstance(key.default, int | float):
        assert key.contains(key.default) and not key.contains(float("nan")) and not key.contains(float("inf"))


@pytest.mark.parametrize("name", IMPLEMENTED)
def test_the_choices_of_a_key_are_those_that_the_code_has(name):
    assert KEYS[name].choices == IMPLEMENTED[name]


def test_scopes_do_not_contradict_each_other():
    assert keys_of(PER_HOST) <= keys_of(MACHINE) <= keys_of(RESUME)
    model = {name for name in KEYS if name.startswith("model.")}
    assert keys_of(EXECUTION) | keys_of(TRANSFER) <= model and not keys_of(EXECUTION) & keys_of(TRANSFER)


def test_a_range_is_said_in_words():
    assert Key(1, "devices", least=1, also=-1).rule() == "1 or greater, or -1"
    assert Key(0.5, "a part", above=0, below=1).rule() == "greater than 0 and less than 1"
    base = Key(0.0, "a base", above=1, also=0)
    assert [base.contains(value) for value in (0, 0.5, 1, 1.5)] == [True, False, False, True]


def test_a_key_has_the_scope_of_its_section_and_is_declared_once():
    keys = {}
    section = Section(keys, "some", MACHINE)
    section.size = Key(1, "a size", scope=RESUME)
    assert keys["some.size"].scope == MACHINE | RESUME
    with pytest.raises(ValueError, match=r"^some.size is declared twice"):
        section.size = Key(2, "another size")
