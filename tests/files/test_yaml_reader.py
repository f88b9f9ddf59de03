# SPDX-License-Identifier: Apache-2.0
"""YAML from outside is plain values, and what it cannot be is one line."""

import pytest

from files.json_reader import JsonError
from files.yaml_reader import parse_yaml


def test_mappings_lists_and_plain_values_are_read():
    assert parse_yaml(b"a: {b: [1, 2.5, true, null, text]}", "x") == {"a": {"b": [1, 2.5, True, None, "text"]}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [", "x.yaml: is not YAML"),
        (b"\xff\xfe", "x.yaml: is not YAML"),
        (b"a: !!python/object/apply:os.getcwd []", "x.yaml: is not YAML"),
        (b"a: 2025-02-30", "x.yaml: is not YAML .day is out of range for month"),
        (b"a: !!int x", "x.yaml: is not YAML"),
        (b"a: !!bool x", "x.yaml: is not YAML"),
        (b"a: !!timestamp x", "x.yaml: is not YAML"),
        (b"[" * 2000, "x.yaml: is not YAML"),
        (b"a: &x [1]\nb: [*x, *x]", "x.yaml: has a YAML alias"),
    ],
)
def test_all_else_is_refused_in_a_line(content, message):
    with pytest.raises(JsonError, match=message) as error:
        parse_yaml(content, "x.yaml")
    assert "\n" not in str(error.value)
