# SPDX-License-Identifier: Apache-2.0
"""A file of questions is read line by line; what cannot be scored is named with file and line."""

import pytest

from configs.errors import ConfigError
from files.json_reader import JsonError
from scoring.questions import read_files

CHOICE = '{"question": "q", "choices": ["a", "b"], "answer": 1, "id": "kept"}'
EXACT = '{"prompt": "p", "exact": "e", "stop": ["\\n"], "max_tokens": 3}'
PLAIN = '{"text": "t"}'


@pytest.fixture
def file(tmp_path):
    def file(*lines: str, name: str = "mine.jsonl") -> str:
        (tmp_path / name).write_text("\n".join(lines))
        return str(tmp_path / name)

    return file


def test_keys_tell_the_kind_and_empty_lines_are_passed_over(file):
    items = read_files([file(CHOICE, "", EXACT, PLAIN), file(PLAIN, PLAIN, name="other.jsonl")], "--questions")
    assert [(item.task, item.line, item.kind) for item in items] == [
        ("mine", 1, "choices"), ("mine", 3, "exact"), ("mine", 4, "text"), ("other", 1, "text"), ("other", 2, "text"),
    ]  # fmt: skip
    assert len(read_files([file(CHOICE, EXACT), file(PLAIN, PLAIN, name="other.jsonl")], "--questions", limit=1)) == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"question": "q"', "is not valid JSON (EOF while parsing an object at line 1 column 16)"),
        ('{"question": "q", "choices": ["a", "b"]}', "answer is missing"),
        (
            '{"question": "q", "choices": ["a", "b"], "answer": "b"}',
            "answer: should be a valid integer, but is 'b'",
        ),
        (
            '{"question": "q", "choices": ["a", "b"], "answer": 2}',
            "answer=2 is not the index of one of the 2 choices; ",
        ),
        ('{"question": "q", "choices": ["a"], "answer": 0}', "choices: should have at least 2 items"),
        ('{"question": "q", "choices": ["a", ""], "answer": 0}', "choices.1: should have at least 1 character"),
        ('{"exact": "q"}', "prompt is missing"),
        ('{"exact": "e", "promt": "q"}', "prompt is missing; did you mean it by promt?"),
        ('{"prompt": "p", "exact": "e", "max_tokens": 0}', "max_tokens: should be greater than or equal to 1"),
        ('{"prompt": "p", "exact": "a\\nb"}', "exact has '\\n', at which answers stop, so "),
        ('{"prompt": "p", "exact": "END", "stop": ["x", "N"]}', "exact has 'N', at which answers stop"),
        ('{"sentence": "q"}', "has no key choices, exact or text"),
        ("[1, 2]", "should be an object"),
        ('{"text": "\\ud800"}', "is not valid JSON"),
    ],
)
def test_a_malformed_line_is_named(file, line, says):
    path = file(CHOICE, line)
    with pytest.raises(JsonError) as error:
        read_files([path], "--questions")
    assert str(error.value).startswith(f"{path}, line 2: {says}") and error.value.exit_status == 2


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["none.jsonl"], "No such file or directory; name a file with a JSON object per line"),
        (["empty.jsonl"], "has no items; give it a JSON object per line"),
        (["a/mine.jsonl", "mine.jsonl"], "mine.jsonl would both be the task mine; rename one"),
    ],
)
def test_a_file_without_items_or_without_a_name_of_its_own_is_refused(file, tmp_path, names, says):
    (tmp_path / "a").mkdir()
    file(CHOICE), file(CHOICE, name="a/mine.jsonl"), file("", name="empty.jsonl")
    with pytest.raises(ConfigError) as error:
        read_files([str(tmp_path / name) for name in names], "--questions")
    assert str(error.value).startswith("--questions") and str(error.value).endswith(says)
