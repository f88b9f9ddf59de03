# SPDX-License-Identifier: Apache-2.0
"""Templates that hang, take all memory, recurse or nest end in one line, and nothing else ends with them."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from input_pipeline.chat import renderer, template
from input_pipeline.chat.encoding import format_of_tokenizer
from input_pipeline.errors import DataError
from input_pipeline.tokenization import open_tokenizer
from tests.input_pipeline.chat.conftest import CHATML, conversation, talk, write_lines

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {  # and what is said of them
    "a loop of loops": (LOOP, "it takes too much time"),
    "a number that takes for ever": ("{% set n = 99999999 %}{{ 9 ** n }}", "it takes too much time"),
    "five billion characters": ("{{ 'x' * 5000000000 }}", "it takes over 1024 MiB of memory"),
    "as many of another kind": ("{{ 'x'.ljust(5000000000) }}", "it takes over 1024 MiB of memory"),
    "doubled again and again": (
        "{% set n = namespace(x='x') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "it takes (over 1024 MiB of memory|too much time)",
    ),
    "too much to read": (
        "{% set n = 20000000 %}{{ 'x' * n }}",
        "it renders 20,000,000 characters, more than 16,777,216",
    ),
    "a macro that calls itself": (
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "maximum recursion depth exceeded",
    ),
    "files": ("{% include '/etc/passwd' %}", "no loader for this environment specified"),
}
UNREADABLE = {
    "thirty loops": ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
    "a thousand loops": ("{% for a in b %}" * 1000 + "{% endfor %}" * 1000, ""),
    "ten thousand brackets": ("{{ " + "(" * 10_000 + ")" * 10_000 + " }}", ""),
    "a hundred thousand signs": ("{{ " + "-" * 100_000 + "1 }}", ""),
    "a number that is computed as it is read": ("{{ 9 ** 99999999 }}", "it takes too much time"),
    "no template": ("{% for %}", r"\(line 1\)"),
}


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch):
    monkeypatch.setattr(renderer, "SECONDS", 0.4)


@pytest.mark.parametrize(("source", "said"), HOSTILE.values(), ids=HOSTILE)
def test_a_template_that_takes_too_much_is_told_in_a_line(write_tokenizer, source, said):
    form = format_of_tokenizer(open_tokenizer(write_tokenizer(source)), "it")
    for call in (form.pieces, form.prompt):
        with pytest.raises(ValueError, match=said) as caught:
            call(talk("Hi", "yes"))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_time_is_limited_where_the_process_that_asks_ignores_the_signal(monkeypatch, write_tokenizer):
    """As one does that has loaded libtpu, on every TPU."""
    monkeypatch.setattr(renderer, "_idle", [])
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    try:
        form = format_of_tokenizer(open_tokenizer(write_tokenizer(LOOP)), "it")
        with pytest.raises(ValueError, match="it takes too much time"):
            form.prompt(talk("Hi", "yes"))
    finally:
        signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize(("source", "said"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_template_that_cannot_be_read_is_told_with_its_tokenizer(write_tokenizer, source, said):
    with pytest.raises(DataError, match=f"data.tokenizer=it: its chat template is invalid: .*{said}") as caught:
        format_of_tokenizer(open_tokenizer(write_tokenizer(source)), "it")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_line_that_takes_too_much_is_named_or_left_out_and_the_others_are_not(corpus, tmp_path, write_tokenizer):
    """Also where it is one of many that are rendered together."""
    content = "{% if messages|length > 1 and 'stop' in messages[0].content %}" + LOOP + "{% endif %}" + CHATML
    talks = [{"messages": conversation(number)} for number in range(40)]
    talks[30] = {"messages": talk("stop", "yes")}
    path, name, said = write_lines(tmp_path / "talks.jsonl", talks), write_tokenizer(content), []
    with pytest.raises(DataError, match=r"talks.jsonl:31: rejected by the chat template \(it takes too much time\)"):
        corpus(source="chat", path=path, tokenizer=name, vocab_size=300)
    ready = corpus(source="chat", path=path, tokenizer=name, vocab_size=300, bad_documents="skip", announce=said.append)
    assert ready.heldout.num_documents + ready.train.num_examples(1) >= 39
    assert said[0].startswith("skipped 1 of 40 documents: 1 rejected by the chat template; first: ")


def test_a_template_that_takes_too_much_for_each_line_is_given_up(corpus, tmp_path, write_tokenizer, monkeypatch):
    """Else a million lines would be left out one by one, for months."""
    monkeypatch.setattr(template, "MOST_DEATHS", 3)
    path = write_lines(tmp_path / "talks.jsonl", [{"messages": conversation(number)} for number in range(10)])
    with pytest.raises(
        DataError, match=r"^the chat template of data.tokenizer: it takes too much time, for 3 lines; fix it$"
    ):
        corpus(source="chat", path=path, tokenizer=write_tokenizer(LOOP), vocab_size=300, bad_documents="skip")


def test_a_file_that_breaks_off_is_named_with_its_last_whole_line(corpus, tmp_path, write_tokenizer):
    """Lines are rendered some together, and those before the break are used first."""
    import gzip

    talks = "".join(json.dumps({"messages": conversation(number)}) + "\n" for number in range(3000)).encode()
    (tmp_path / "talks.jsonl.gz").write_bytes(gzip.compress(talks)[:-5000])
    with pytest.raises(
        DataError, match=r"talks.jsonl.gz: cannot be read after .*talks.jsonl.gz:\d\d+: Compressed"
    ) as it:
        corpus(source="chat", path=str(tmp_path / "talks.jsonl.gz"), tokenizer=write_tokenizer(CHATML), vocab_size=300)
    whole = gzip.zlib.decompressobj(31).decompress(gzip.compress(talks)[:-5000]).count(b"\n")
    assert f"talks.jsonl.gz:{whole}:" in str(it.value)


def test_a_process_that_was_killed_is_replaced(write_tokenizer):
    form = format_of_tokenizer(open_tokenizer(write_tokenizer(CHATML)), "it")
    os.kill(renderer._idle[-1]._process.pid, signal.SIGKILL)
    renderer._idle[-1]._process.wait()
    assert form.prompt(talk("Hi"))[0][0].startswith("<|im_start|>user\nHi")
    answers = renderer.ask({"template": CHATML, "tokens": {}, "task": "prompt"}, [b"[]"] * 3)
    assert answers == [b'M[["<|im_start|>assistant\\n", false]]'] * 3


class Taken(list):
    """A list that another thread empties just after it was seen to have something."""

    def __bool__(self):
        return True


def test_two_threads_can_want_the_last_process(monkeypatch):
    monkeypatch.setattr(renderer, "_idle", Taken())
    answers = renderer.ask({"template": CHATML, "tokens": {}, "task": "prompt"}, [b"[]"])
    assert answers == [b'M[["<|im_start|>assistant\\n", false]]']


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of processes there")
def test_the_process_has_neither_the_environment_nor_its_secrets(write_tokenizer, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    renderer._idle.clear()
    format_of_tokenizer(open_tokenizer(write_tokenizer(CHATML)), "it")
    pid = renderer._idle[-1]._process.pid
    assert b"s3cret" not in Path(f"/proc/{pid}/environ").read_bytes()
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert "Max file size             0 " in limits and f"Max address space         {1 << 30} " in limits
    renderer._idle.clear()
    assert not Path(f"/proc/{pid}").exists()
