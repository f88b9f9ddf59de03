# SPDX-License-Identifier: Apache-2.0
"""Files of conversations and of preferences as rows: none lost, none in two, malformed lines by file and number."""

import gzip
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from input_pipeline import ledger
from input_pipeline.batches import training_batches
from input_pipeline.chat.windows import ConversationWindows
from input_pipeline.errors import DataError
from input_pipeline.packing import IGNORED
from input_pipeline.reading.formats import open_decompressed
from tests.input_pipeline.chat.conftest import CHATML, conversation, talk, write_lines

LENGTH = 128


@pytest.fixture
def chat(corpus, tmp_path):
    """Prepare 60 conversations in two files, one compressed; by default tokens are bytes."""
    folder = tmp_path / "talks"
    folder.mkdir()
    lines = [json.dumps({"messages": conversation(number), "id": number}) + "\n" for number in range(60)]
    (folder / "a.jsonl").write_text("".join(lines[:30]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[30:]).encode()))
    return lambda **changes: corpus(**{"source": "chat", "path": str(folder / "*.jsonl*")} | changes)


def segments(windows, length: int = LENGTH) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (tokens, targets) of every segment of every row, having checked that a segment is in one piece."""
    batch, found = windows.read(np.arange(windows.num_examples(length)), length), []
    for tokens, targets, numbers, positions in zip(*batch.values(), strict=True):
        filled = (numbers > 0).sum()
        assert numbers[0] == 1 and set(np.diff(numbers[:filled])) <= {0, 1} and not numbers[filled:].any()
        for number in range(1, numbers.max() + 1):
            where = np.flatnonzero(numbers == number)
            assert (positions[where] == np.arange(len(where))).all()
            found.append((tokens[where], targets[where]))
    return found


def said(tokens: np.ndarray, targets: np.ndarray) -> tuple[str, str]:
    """Return a segment of bytes as text, and what is learned of it."""
    text = bytes([*tokens.tolist(), max(0, targets[-1])]).decode()
    assert (targets[:-1] == tokens[1:])[targets[:-1] != IGNORED].all()
    return text, bytes(targets[targets != IGNORED].tolist()).decode()


def test_every_conversation_is_whole_in_one_row_and_only_answers_are_learned(chat):
    ready = chat()
    found = [said(*each) for windows in (*ready.train.parts, ready.heldout) for each in segments(windows)]
    wanted = []
    for number in range(60):
        turns = conversation(number)
        text = "\0" + "".join(f"{turn['role']}\n{turn['content']}\0" for turn in turns)
        wanted.append((text, "".join(f"{turn['content']}\0" for turn in turns if turn["role"] == "assistant")))
    assert sorted(found) == sorted(wanted)
    assert ready.heldout.num_documents + ready.train.parts[0].num_documents == 60 and ready.heldout.num_documents > 3
    assert ready.unigram_bits_per_byte is None


def test_rows_are_full_and_what_is_longer_is_cut_and_told(chat):
    (windows,) = chat().train.parts
    length, rows = 256, windows.num_examples(256)
    places = sum(len(tokens) for tokens, _ in segments(windows, length))
    assert rows <= 1 + -(-places // length)  # one more than if conversations could be cut
    full = f"{places / rows / length:.0%} full"
    assert windows.packing_summary(length) == f"{windows.num_documents} conversations in {rows} rows, {full}"
    cut = segments(windows, 60)
    longer = sum(len(tokens) == 60 for tokens, _ in cut)
    assert max(len(tokens) for tokens, _ in cut) == 60
    assert windows.packing_summary(60).endswith(f"; {longer} are longer than train.sequence_length and truncated")
    lost = sum((targets == IGNORED).all() for _, targets in segments(windows, 35))
    assert windows.packing_summary(35).endswith(f", {lost} of them before any answer, so they have no weight")
    assert 0 < lost < windows.num_documents
    windows.check_counts(35)
    with pytest.raises(DataError, match=r"train.sequence_length=20 truncates all \d+ conversations before"):
        windows.check_counts(20)


def test_the_lengths_of_many_conversations_are_no_objects_of_python():
    starts = np.arange(0, 500_000, 5)
    tracemalloc.start()
    windows = ConversationWindows([np.zeros(500_000, np.uint16)], starts, 0, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4.5 * starts.nbytes, "a few arrays"
    assert windows.packing_summary(64).startswith("100,000 conversations in ")


def test_the_split_is_by_content_and_batches_by_the_seed_alone(chat, corpus, tmp_path):
    one, other = chat(), chat(cache_dir=str(tmp_path / "other"))
    assert one.digest == other.digest
    assert sorted(map(str, segments(one.heldout))) == sorted(map(str, segments(other.heldout)))
    arguments = dict(seed=3, sequence_length=LENGTH, global_batch=4, num_steps=3)
    whole = [*training_batches(one.train, rows=np.arange(4), first_example=0, **arguments)]
    half = [*training_batches(other.train, rows=np.array([1, 3]), first_example=4, **arguments)]
    for key in whole[0]:
        np.testing.assert_array_equal(whole[1][key][[1, 3]], half[0][key])


def test_the_ledger_names_the_conversations_of_a_row(chat, tmp_path):
    ready = chat(with_documents=True)
    arguments = dict(global_batch=2, sequence_length=LENGTH, seed=0)
    section = ledger.new_section(ready, step=0, examples=0, **arguments)
    (batch,) = training_batches(ready.train, rows=np.arange(2), first_example=0, num_steps=1, **arguments)
    for row, example in enumerate(ledger.explain(section, 1, ready)):
        for excerpt in example.excerpts:
            places = slice(excerpt.first, excerpt.first + excerpt.count)
            assert set(batch["segments"][row, places]) == {excerpt.segment}
            file, _, line = excerpt.document.rpartition(":")
            with open_decompressed(Path(file)) as lines:
                turns = json.loads(lines.readlines()[int(line) - 1])["messages"]
            assert bytes(batch["tokens"][row, places].tolist()).decode().endswith(turns[-1]["content"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "hello"}', "without field 'messages' (it has 'text'). Fix the file"),
        ("[1]", "not an object (a list"),
        ("{", "not JSON at column 2"),
        ('{"messages": []}', "without messages in 'messages' ([]; a message is {'role': 'user'"),
        ('{"messages": "hello"}', "without messages in 'messages' (\"hello\";"),
        (
            '{"messages": [{"role": "bot", "content": "x"}]}',
            'with an unknown role (message 1: "bot"; roles are system,',
        ),
        ('{"messages": ["hello"]}', 'with an unknown role (message 1: "hello"'),
        ('{"messages": [{"role": "user", "content": "x"}]}', "without an assistant's turn (there is nothing to learn"),
        (
            '{"messages": [{"role": "assistant", "content": ["x"]}]}',
            "with content that is not text (message 1: a list)",
        ),
        ('{"messages": [{"role": "assistant", "content": ""}]}', "with an empty answer (message 1)"),
        ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "not valid UTF-8 (surrogates not allowed"),
        (json.dumps({"messages": talk("x", "y" * 300_000)}), "longer than 256 KiB (300,"),
    ],
)
def test_a_malformed_line_is_named_or_left_out_and_counted(corpus, tmp_path, line, message):
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": conversation(n)}) + "\n" for n in range(3)) + line + "\n")
    with pytest.raises(DataError) as caught:
        corpus(source="chat", path=str(path))
    assert str(caught.value).startswith(f"{path}:4: {message}") and "\n" not in str(caught.value)
    lines = []
    ready = corpus(source="chat", path=str(path), bad_documents="skip", announce=lines.append)
    assert ready.heldout.num_documents + ready.train.parts[0].num_documents == 3
    assert lines[0].startswith("skipped 1 of 4 documents: 1 ") and lines[0].endswith("talks.jsonl:4")


def test_a_conversation_of_which_the_template_leaves_nothing_is_named_or_left_out(corpus, tmp_path, write_tokenizer):
    tokenizer = write_tokenizer("{% for m in messages %}{{ m['content'] | trim }}{% endfor %}")
    lines = [{"messages": talk(*contents)} for contents in (("a", "b"), ("c", "d"), (" ", " "))]
    path = write_lines(tmp_path / "talks.jsonl", lines)
    with pytest.raises(DataError, match=r"talks.jsonl:3: without text \(its chat template leaves nothing of it\)"):
        corpus(vocab_size=512, source="chat", path=path, tokenizer=tokenizer)
    ready = corpus(vocab_size=512, source="chat", path=path, tokenizer=tokenizer, bad_documents="skip")
    assert ready.heldout.num_documents + ready.train.parts[0].num_documents == 2


SPOKEN = [("a a a", "a"), (" ", "  "), ("a a", "a a a"), ("  ", " "), ("a", "a a")]


@pytest.mark.parametrize("source", ["chat", "preferences"])
def test_a_text_of_which_the_tokenizer_leaves_nothing_takes_no_place(corpus, tmp_path, source):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "<e>": 1, "a": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>", "chat_template": template}))
    if source == "chat":
        lines, texts = [{"messages": talk(*pair)} for pair in SPOKEN], [" ".join(pair) for pair in SPOKEN]
    else:
        [asked], texts = talk(" "), [answer for pair in SPOKEN for answer in pair]
        sides = [[[{"role": "assistant", "content": answer}] for answer in pair] for pair in SPOKEN]
        lines = [{"prompt": [asked], "chosen": chosen, "rejected": rejected} for chosen, rejected in sides]
    path = write_lines(tmp_path / "lines.jsonl", lines)
    ready = corpus(source=source, path=path, tokenizer=str(tmp_path / "tokenizer.json"), heldout_fraction=0.4)
    expected, length = sum(max(0, len(text.split()) - 1) for text in texts), 6
    parts = [(part, range(part.num_examples(length))) for part in (*ready.train.parts, ready.heldout)]
    assert sum((part.read(np.array(rows), length)["segments"] > 0).sum() for part, rows in parts) == expected
    assert sum(piece.count for part, rows in parts for row in rows for piece in part.pieces(row, length)) == expected
    assert all((part._places() >= 0).all() for part, _ in parts), "the summary would subtract them"


def test_what_cannot_be_done_with_conversations_is_told(corpus, tmp_path, write_tokenizer):
    path = write_lines(tmp_path / "talks.jsonl", [{"messages": conversation(1)}])
    with pytest.raises(DataError, match=r"a single line cannot be split; name held-out data with --config.data.valid"):
        corpus(source="chat", path=path)
    with pytest.raises(DataError, match=r"without field 'text' .*; data.source=chat reads conversations"):
        corpus(source="auto", path=path)
    with pytest.raises(DataError, match=r"data.source=chat needs an existing tokenizer; use that of the run"):
        corpus(source="chat", path=path, tokenizer="sentencepiece", vocab_size=300)
    template = CHATML.replace(
        "{% for", "{% if messages|length > 2 %}{{ raise_exception('two at most') }}{% endif %}{% for", 1
    )
    path = write_lines(tmp_path / "talks.jsonl", [{"messages": conversation(n)} for n in (0, 6, 12, 2)])
    with pytest.raises(DataError, match=r"talks.jsonl:4: rejected by the chat template \(two at most\)"):
        corpus(source="chat", path=path, tokenizer=write_tokenizer(template), vocab_size=300)


def pair(number: int, answer: str = "") -> dict:
    return {"prompt": f"{number} + 1 = ", "chosen": answer or f"{number + 1}", "rejected": f"perhaps {number}"}


def as_messages(record: dict) -> dict:
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return {key: [{"role": roles[key], "content": text}] for key, text in record.items()}


@pytest.mark.parametrize("messages", [False, True], ids=["text", "messages"])
def test_a_pair_is_a_row_and_its_answers_are_what_counts(corpus, tmp_path, messages):
    records = [pair(number) for number in range(20)]
    lines = map(as_messages, records) if messages else records
    ready = corpus(source="preferences", path=write_lines(tmp_path / "pairs.jsonl", lines))
    found = [said(*each) for windows in (*ready.train.parts, ready.heldout) for each in segments(windows, 80)]
    wanted = []
    for record in records:
        prompt = f"\0user\n{record['prompt']}\0assistant\n" if messages else f"\0{record['prompt']}"
        wanted += [(f"{prompt}{record[side]}\0", f"{record[side]}\0") for side in ("chosen", "rejected")]
    assert sorted(found) == sorted(wanted)
    assert found[0][1] < found[1][1]  # digits come before "perhaps": what is chosen is segment 1


def test_a_pair_that_is_too_long_is_cut_where_it_is_longer(corpus, tmp_path):
    path = write_lines(tmp_path / "pairs.jsonl", [pair(1, "x" * 300), pair(2, "y" * 300)])
    (windows,) = corpus(source="preferences", path=path).train.parts
    chosen, rejected = (tokens for tokens, _ in segments(windows, 100))
    assert len(chosen) + len(rejected) == 100 and bytes(rejected.tolist()).decode().partition("perhaps ")[2]
    assert [piece.count for piece in windows.pieces(0, 100)] == [len(chosen), len(rejected)]
    assert (
        windows.packing_summary(100)
        == "1 pairs in 1 rows, 100% full; 1 are longer than train.sequence_length and truncated"
    )
    assert [len(tokens) for tokens, _ in segments(windows, 20)] == [10, 10]
    assert [len(tokens) for tokens, _ in segments(windows, 21)] == [11, 10]
    assert "before an answer" not in windows.packing_summary(20)
    with pytest.raises(DataError, match=r"train.sequence_length=10 truncates all 1 pairs before"):
        windows.check_counts(10)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "x", "chosen": "y"}, "without field 'rejected' (it has 'chosen', 'prompt')"),
        (pair(1, "perhaps 1"), "with the same answer twice (chosen and rejected are equal)"),
        (pair(1) | {"rejected": ""}, "with an empty answer"),
        (pair(1) | {"prompt": None}, "neither all text nor all messages (the three must be of one kind)"),
        (as_messages(pair(1)) | {"prompt": "x"}, "neither all text nor all messages"),
        (as_messages(pair(1)) | {"chosen": talk("no", "yes")}, "without an assistant's answer (it begins with 'user')"),
    ],
)
def test_a_pair_that_is_none_is_named(corpus, tmp_path, record, message):
    path = write_lines(tmp_path / "pairs.jsonl", [pair(0), record])
    with pytest.raises(DataError) as caught:
        corpus(source="preferences", path=path)
    assert str(caught.value).startswith(f"{path}:2: {message}")


def test_a_pair_of_which_one_answer_is_cut_off_has_no_weight(corpus, tmp_path):
    path = write_lines(tmp_path / "pairs.jsonl", [pair(1, "x" * 300), pair(2, "y" * 300)])
    (windows,) = corpus(source="preferences", path=path).train.parts
    learned = {n: [(targets != IGNORED).any() for _, targets in segments(windows, n)] for n in range(11, 99, 2)}
    length = next(n for n, sides in learned.items() if sides == [True, False])
    with pytest.raises(DataError, match="truncates all 1 pairs before"):
        windows.check_counts(length)
