# SPDX-License-Identifier: Apache-2.0
"""Readers of files/ to fuzz."""

import json

from files.json_reader import Object, Scalar, parse_json
from tests.fuzz.harness import reader


class _Schema(Object, total=False):
    step: int
    config: dict[str, Scalar]
    parts: dict[str, float]


def _good() -> list[bytes]:
    return [json.dumps({"step": 3, "config": {"a": 1, "b": "x"}, "parts": {"c": 0.5}, "more": [[1], {}]}).encode()]


@reader("json with a schema", _good)
def read_json(content: bytes, folder) -> None:
    found = parse_json(content, _Schema, "report.json")
    assert isinstance(found.get("step", 0), int) and isinstance(found.get("config", {}), dict)
