# SPDX-License-Identifier: Apache-2.0
"""What of a conversation is learned, token by token, by each kind of template."""

import json

import pytest

from input_pipeline.chat.encoding import IDS, LEARNED, ChatTokenizer, format_of_tokenizer
from input_pipeline.errors import DataError
from input_pipeline.tokenization import open_tokenizer
from tests.input_pipeline.chat.conftest import CHATML, talk

HELLO = talk("what is\n it?", "    I think 😀  so ", "why?", "é\n", system="Be brief.")
TAGGED = CHATML.replace(
    "+ message['content'] + '<|im_end|>' + '\n' }}",
    "}}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}",
)
STRIPPING = (  # as Llama 3's: content stripped, the first token said by the template
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n\n' + message.content | trim"
    " + eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
FORGETFUL = CHATML.replace("message['content']", "(message['content'] if loop.last else '...')")
CHECKING = "{% if messages[0].role == 'system' %}{{ raise_exception('No system, please') }}{% endif %}" + CHATML


def learned(name: str, messages) -> tuple[str, list[str]]:
    """Return the whole text, and each run of it that is learned."""
    tokenizer = open_tokenizer(name)
    pieces = format_of_tokenizer(tokenizer, name).pieces(messages)
    (stored,) = ChatTokenizer(tokenizer).encode_batch([json.dumps([pieces])])
    runs, last = [], False
    for token in stored.tolist():
        if token & LEARNED and not last:
            runs.append([])
        last = bool(token & LEARNED)
        if last:
            runs[-1].append(token & IDS)
    return tokenizer.decode((stored & IDS).tolist()), [tokenizer.decode(run) for run in runs]


def written(*turns: tuple[str, str], lines: str = "\n", after: str = "\n") -> str:
    return "".join(f"<|im_start|>{role}{lines}{content}<|im_end|>{after}" for role, content in turns)


BY_TURNS = written(*[(message["role"], message["content"]) for message in HELLO])
STRIPPED = written(*[(message["role"], message["content"].strip()) for message in HELLO], lines="\n\n", after="")


@pytest.mark.parametrize(
    ("template", "whole", "answers"),
    [
        (CHATML, BY_TURNS, ["\n    I think 😀  so <|im_end|>\n", "é\n<|im_end|>\n"]),
        (TAGGED, BY_TURNS, ["\n    I think 😀  so <|im_end|>", "é\n<|im_end|>"]),
        (STRIPPING, "<s>" + STRIPPED, ["I think 😀  so<|im_end|>", "é<|im_end|>"]),
    ],
    ids=["prompt by prompt", "generation tags", "stripped"],
)
def test_what_the_assistant_says_is_learned_and_nothing_else(write_tokenizer, template, whole, answers):
    assert learned(write_tokenizer(template), HELLO) == (whole, answers)


def test_a_template_in_a_file_of_its_own_goes_before_and_with_the_tokenizer(write_tokenizer, tmp_path):
    name = write_tokenizer([{"name": "default", "template": CHATML}])
    assert learned(name, HELLO)[1][0].endswith("<|im_end|>\n")
    before = open_tokenizer(name).digest
    (tmp_path / "chat_template.jinja").write_text(STRIPPING)
    assert learned(name, HELLO)[1][1] == "é<|im_end|>"
    assert open_tokenizer(name).digest != before and "chat_template.jinja" in open_tokenizer(name).files


def test_of_several_templates_one_has_to_be_the_default(write_tokenizer):
    """Else conversations would be in the plain format, which the model does not know."""
    name = write_tokenizer([{"name": "tool_use", "template": CHATML}])
    with pytest.raises(DataError, match="none of its chat templates is named default; rename one"):
        format_of_tokenizer(open_tokenizer(name), name)


@pytest.mark.parametrize("kind", ["byte", "json"])
def test_without_a_template_each_turn_is_its_role_and_a_line_end(kind, write_tokenizer):
    name = "byte" if kind == "byte" else write_tokenizer(None)
    end = "\0" if kind == "byte" else "<|im_end|>"
    whole, answers = learned(name, talk("Hi\n", " there", "bye", "so long", system="Be brief."))
    turns = ("system\nBe brief.", "user\nHi\n", "assistant\n there", "user\nbye", "assistant\nso long")
    assert whole == end + "".join(turn + end for turn in turns)
    assert answers == [f" there{end}", f"so long{end}"]


def test_a_token_with_a_character_of_the_answer_is_learned(write_tokenizer):
    """The line's end before "    I" is one token with three of these spaces, here and in the test above."""
    name = write_tokenizer(CHATML)
    tokens = open_tokenizer(name).encode_spans(["assistant\n    I"])[0]
    assert tokens[1].tolist() == [[0, 9], [9, 13], [13, 15]]
    assert learned(name, talk("so?", "    I"))[1] == ["\n    I<|im_end|>\n"]
    assert learned(name, talk("so?", "I   "))[1] == ["I   <|im_end|>\n"]


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (FORGETFUL, HELLO, "it renders the first 3 messages differently if more follow"),
        (CHECKING, HELLO, "No system, please"),
        ("{{ messages[0].content.nothing() }}", HELLO, "has no attribute 'nothing'"),
        ("{{ messages[9].content }}", HELLO, "has no element 9"),
        ("{{ ().__class__.__base__ }}", HELLO, "access to attribute '__class__'"),
        ("{{ messages.append(1) }}", HELLO, "access to attribute 'append'"),
        (CHATML, talk("\ufdd0", "what?"), "a message contains U+FDD0, which is not a character"),
    ],
)
def test_what_a_template_does_not_take_is_told(write_tokenizer, template, messages, said):
    """Nor does one reach the program that renders it: the sandbox lets it compute text alone."""
    form = format_of_tokenizer(open_tokenizer(write_tokenizer(template)), "it")
    with pytest.raises(ValueError) as caught:
        form.pieces(messages)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_template_that_is_none_is_told_with_its_tokenizer(write_tokenizer):
    name = write_tokenizer("{% for %}")
    with pytest.raises(DataError, match=r"data.tokenizer=.*: its chat template is invalid: .*\(line 1\); fix it"):
        format_of_tokenizer(open_tokenizer(name), name)


def test_the_prompt_for_an_answer_is_the_beginning_of_the_conversation(write_tokenizer):
    for name in ("byte", write_tokenizer(CHATML), write_tokenizer(TAGGED)):
        tokenizer = open_tokenizer(name)
        form, encoder = format_of_tokenizer(tokenizer, name), ChatTokenizer(tokenizer)
        whole, prompt = encoder.encode(form.pieces(HELLO)), encoder.encode(form.prompt(HELLO[:4]))
        assert whole[: len(prompt)] == prompt
        (stored,) = encoder.encode_batch([json.dumps([form.pieces(HELLO, first=4)])])
        assert not (stored[: len(prompt)] & LEARNED).any() and (stored[len(prompt) :] & LEARNED)[:2].all()
