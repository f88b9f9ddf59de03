# SPDX-License-Identifier: Apache-2.0
"""JSON from outside: every mistake is one line that names the source, the key and what was expected."""

from typing import Annotated, Required

import pydantic
import pytest

from files.json_reader import JsonError, Object, Scalar, parse_json, read_json


class Report(Object, total=False):
    step: Required[Annotated[int, pydantic.Field(ge=0)]]
    seconds: dict[str, float]
    config: dict[str, Scalar]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "r.json: is not valid JSON (EOF while parsing a value at line 1 column 0)"),
        (b"{", "is not valid JSON (EOF while parsing an object"),
        (b"\xff", "is not valid JSON (expected value"),
        (b"[" * 100_000, "is not valid JSON (recursion limit exceeded"),
        (b'{"step": 1, "other": ' + b'{"a":' * 100_000, "is not valid JSON (recursion limit exceeded"),
        (b"[]", "r.json: should be an object, but is []"),
        (b"{}", "r.json: step is missing"),
        (b'{"st\\nep": 1}', "r.json: step is missing; did you mean it by st\\nep?"),
        ('{"seconds": {"größe": "x"}, "step": 1}'.encode(), "r.json: seconds.größe: should be a valid number"),
        (b'{"step": "1"}', "r.json: step: should be a valid integer, but is '1'"),
        (
            b'{"step": 1, "config": {' + b'"a": {}, ' * 99 + b'"a": {}}}',
            "r.json: config.a: should be true or false, a number or a string, but is {}",
        ),
        (b'{"step": 1e400}', "step: should be a valid integer, but is inf"),
        (b'{"step": -1}', "step: should be greater than or equal to 0, but is -1"),
        (b'{"step": true}', "step: should be a valid integer, but is True"),
        (b'{"step": 1, "seconds": {"training": "x"}}', "seconds.training: should be a valid number, but is 'x'"),
        (
            b'{"step": 1, "config": {"model.name": []}}',
            "model.name: should be true or false, a number or a string",
        ),
        (b'{"step": 1, "seconds": {"a\\nb' + b"x" * 1000 + b'": "x"}}', "seconds.a\\nbxxx"),
        (b'{"step": 1' + b"0" * 5000 + b"}", "is not valid JSON (number out of range"),
        (b'{"step": "' + b"x" * 1000 + b'"}', "..."),
        (b'{"step": 1}' + b" " * 5000, "r.json: is larger than 5,000 bytes, the limit for this file"),
    ],
)
def test_a_mistake_is_one_short_line(content, message):
    with pytest.raises(JsonError) as error:
        parse_json(content, Report, "r.json", max_bytes=5000 if content.endswith(b" ") else 1 << 20)
    assert message in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 250


def test_what_fits_is_returned_with_the_keys_that_the_schema_does_not_name():
    content = b'\xef\xbb\xbf{"step": 3, "seconds": {"a": 1}, "config": {"k": null, "f": 0.5}, "later": [1, {"x": 2}]}'
    found = parse_json(content, Report, "r.json")
    assert found == {
        "step": 3, "seconds": {"a": 1.0}, "config": {"k": None, "f": 0.5}, "later": [1, {"x": 2}],
    }  # fmt: skip


def test_a_file_is_read_no_further_than_its_limit(tmp_path):
    (tmp_path / "r.json").write_text('{"step": 1}')
    assert read_json(tmp_path / "r.json", Report)["step"] == 1
    with pytest.raises(JsonError, match="larger than 4 bytes"):
        read_json(tmp_path / "r.json", Report, max_bytes=4)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json", Report)
