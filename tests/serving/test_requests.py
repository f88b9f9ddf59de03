# SPDX-License-Identifier: Apache-2.0
"""A wrong body costs the server little, whatever its size, since all clients wait while it is read."""

import json

import pytest

pytest.importorskip("starlette", reason="needs the packages of `make setup EXTRAS=serve`")

import pydantic

from serving.errors import of_validation
from serving.requests import FIELDS, ChatRequest, CompletionRequest, PuzzleRequest

MANY = range(3000)


@pytest.mark.parametrize(
    ("schema", "body", "said"),
    [
        (CompletionRequest, {"prompt": [-1 for _ in MANY]}, "prompt should be a string"),
        (CompletionRequest, {"prompt": "a"} | {f"k{n}": 1 for n in MANY}, "k0 is not a parameter"),
        (CompletionRequest, {"prompt": "a", "metadata": {str(n): 1 for n in MANY}}, "at most 1024 entries"),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(n): 1 for n in MANY}}, "up to 1,024 token ids"),
        (CompletionRequest, {"prompt": "a", "stop": "a" * 1025}, "of 1 to 1,024 characters each"),
        (CompletionRequest, {"prompt": "a", "stream_options": {f"k{n}": 1 for n in MANY}}, "k0 is not a parameter"),
        (ChatRequest, {"messages": [{"role": "user", "content": [1 for _ in MANY]}]}, "content should be a string"),
        (ChatRequest, {"messages": [{"role": "user", "content": [1, 2]} for _ in MANY]}, "content should be a string"),
        (PuzzleRequest, {"puzzle": "1"} | {f"k{n}": 1 for n in MANY}, "k0 is not a parameter"),
    ],
)
def test_of_many_wrong_values_few_are_errors(schema, body, said):
    with pytest.raises(pydantic.ValidationError) as caught:
        schema.model_validate_json(json.dumps(body))
    assert caught.value.error_count() <= 4
    assert said in str(of_validation(caught.value, FIELDS))


def test_what_asks_for_nothing_is_accepted():
    options = {"include_usage": True, "include_obfuscation": False}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [], "stream_options": options, "logit_bias": None}
    given = ChatRequest.model_validate_json(json.dumps(body))
    assert given.wants_usage and given.sampling().logit_bias == {}
