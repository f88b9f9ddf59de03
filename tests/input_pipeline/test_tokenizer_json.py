# SPDX-License-Identifier: Apache-2.0
"""A tokenizer.json of others' is used for data, for prompts and kept with a run."""

import json
import threading
import types

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from checkpointing.workdir import open_workdir
from input_pipeline.cache import digest
from input_pipeline.errors import DataError
from input_pipeline.tokenization import open_tokenizer

TEXT = "".join(f"def name_{k % 7}(value):\n    return value * {k}\n" for k in range(60))
END = "<|end|>"


def write(folder, eos: object = END) -> str:
    """Write a byte-level BPE of 300 tokens and what ends documents; return its path."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([TEXT], trainer)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return str(folder / "tokenizer.json")


def test_texts_go_in_and_come_back_and_documents_have_an_end(tmp_path):
    tokenizer = open_tokenizer(write(tmp_path))
    assert tokenizer.vocab_size == 300 and tokenizer.decode([tokenizer.end_of_document]) == END
    for text in ("", TEXT, "\0 \t\r\n😀e\u0301"):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text and tokenizer.end_of_document not in tokens
    batch = tokenizer.encode_batch([TEXT, "", "def"])
    assert [tokens.tolist() for tokens in batch] == [tokenizer.encode(text) for text in (TEXT, "", "def")]
    assert {tokens.dtype for tokens in batch} == {np.dtype(np.int32)}


@pytest.mark.parametrize("section", ["truncation", "padding"])
def test_texts_are_encoded_whole_whatever_the_file_says_of_training_its_model(tmp_path, section):
    name, texts = write(tmp_path), [TEXT, "a"]
    plain, asking = open_tokenizer(name), tokenizers.Tokenizer.from_file(name)
    asking.enable_truncation(8) if section == "truncation" else asking.enable_padding()
    asking.save(name)
    tokenizer = open_tokenizer(name)
    assert [tokens.tolist() for tokens in tokenizer.encode_batch(texts)] == [plain.encode(text) for text in texts]
    assert [tokens.tolist() for tokens, _ in tokenizer.encode_spans(texts)] == [plain.encode(text) for text in texts]
    assert tokenizer.encode(TEXT) == plain.encode(TEXT)
    of_files = [digest(b"\0".join(one.files.values())) for one in (plain, tokenizer)]
    assert [plain.digest, tokenizer.digest] == [of_files[0], f"{of_files[1]}-whole"]  # others' shards go on being used


def test_a_text_has_the_same_tokens_each_time_if_the_model_was_trained_with_dropout(tmp_path):
    name = write(tmp_path)
    plain, random = open_tokenizer(name), tokenizers.Tokenizer.from_file(name)
    random.model.dropout = 0.5
    random.save(name)
    tokenizer = open_tokenizer(name)
    assert [tokenizer.encode(TEXT) for _ in range(3)] == [plain.encode(TEXT)] * 3
    assert tokenizer.digest.endswith("-certain")  # shards of random tokens are not used


def test_the_last_token_of_a_prompt_may_become_one_that_begins_with_it(tmp_path):
    tokenizer = open_tokenizer(write(tmp_path, {"content": END}))
    tokens, allowed = tokenizer.open_end(tokenizer.encode("def name_1(va"))
    whole = tokenizer.encode("def name_1(va")
    assert tokens == whole[:-1] and allowed[whole[-1]] and not allowed[tokenizer.end_of_document]
    last = tokenizer.decode(whole[-1:])
    assert all(tokenizer.decode([number]).startswith(last) for number in np.flatnonzero(allowed))


def test_a_byte_is_no_token_that_begins_with_the_last_one_of_a_prompt(tmp_path):
    """The file writes it as text: <0x0A> begins with "<", but means the end of a line."""
    write(tmp_path)
    pieces = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256)), "a", "<", "/", "</"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocabulary, merges=[("<", "/")], unk_token="<unk>", byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens(["<unk>", END])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    tokens, allowed = tokenizer.open_end(tokenizer.encode("a<"))
    assert tokens == [vocabulary["a"]] and [pieces[number] for number in np.flatnonzero(allowed)] == ["<", "</"]
    tokens, allowed = tokenizer.open_end(tokenizer.encode("a\n"))
    assert tokens == [vocabulary["a"], vocabulary["<0x0A>"]] and allowed.all()


def test_a_run_keeps_what_opens_it_again(tmp_path):
    tokenizer = open_tokenizer(write(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tokenizer.model").touch()  # of an earlier attempt with another tokenizer
    open_workdir(tmp_path / "run", {}, types.SimpleNamespace(tokenizer=tokenizer))
    assert open_tokenizer(str(tmp_path / "run" / "tokenizer.json")).digest == tokenizer.digest
    assert not (tmp_path / "run" / "tokenizer.model").exists()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (
            lambda folder: write(folder, "<none>"),
            'no token ends documents: eos_token in tokenizer_config.json is "<none>", which',
        ),
        (lambda folder: write(folder, None), "no token ends documents"),
        (
            lambda folder: (folder / "tokenizer_config.json").unlink(),
            "No such file or directory (tokenizer_config.json)",
        ),
        (
            lambda folder: (folder / "tokenizer.json").write_text("{}"),
            "not a tokenizer (tokenizer.json: model is missing)",
        ),
        (
            lambda folder: (folder / "tokenizer.json").write_text("["),
            "not a tokenizer (tokenizer.json: is not valid JSON",
        ),
        (
            lambda folder: (folder / "tokenizer.json").write_text('{"model": {"type": "BPE"}}'),
            "not a tokenizer (Cannot instantiate Tokenizer from buffer: Missing vocab/merges",
        ),
        (
            lambda folder: changed(folder, "tokenizer.json", padding="x" * 5000),  # the library repeats all of it
            "xxx)",
        ),
        (
            lambda folder: (folder / "tokenizer.json").write_text('{"model": {}}', "utf-16"),
            "not a tokenizer (tokenizer.json: is not valid JSON",
        ),
    ],
)
def test_one_that_cannot_be_used_is_told_in_a_line(tmp_path, break_it, message):
    name = write(tmp_path)
    break_it(tmp_path)
    with pytest.raises(DataError) as caught:
        open_tokenizer(name)
    assert message in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def changed(folder, file: str, **changes):
    """Change keys of one of its files."""
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | changes))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "tokenizer.json").write_text("[" * 100_000), "not a tokenizer (tokenizer.json: is n"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "tokenizer_config.json: should be"),
        (
            lambda folder: changed(folder, "tokenizer_config.json", chat_template=7),
            "chat_template.str: should be",
        ),
        (lambda folder: changed(folder, "tokenizer_config.json", chat_template=["x"]), "chat_template."),
        (lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"), "not a tokenizer ('utf-8' codec"),
        (lambda folder: (folder / "chat_template.jinja").mkdir(), ""),
    ],
)
def test_json_of_another_kind_is_told_in_a_line(tmp_path, break_it, message):
    name = write(tmp_path)
    break_it(tmp_path)
    if not message:
        assert open_tokenizer(name).vocab_size
        return
    with pytest.raises(DataError) as caught:
        open_tokenizer(name)
    assert message in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_what_the_library_raises_is_a_line(tmp_path):
    """A vocabulary without a token for what it does not know, and a pattern that takes for ever."""
    words = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "[UNK]"}
    patient = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    for model, splitter, text in ((words, None, "b"), (words | {"unk_token": "a"}, patient, "a" * 1000 + "!")):
        content = {"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": splitter}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
        for encode, given in ((tokenizer.encode, text), (tokenizer.encode_batch, [text])):
            with pytest.raises(DataError, match=r"tokenizer.json: cannot be used \(") as caught:
                encode(given)
            assert "\n" not in str(caught.value)


def test_a_vocabulary_of_absurd_ids_is_refused(tmp_path):
    """A table of its texts would take as many places."""
    content = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"</s>": 4_000_000_000}, "unk_token": "</s>"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(DataError, match="has the token id 4000000000; ids below 16,777,216 are"):
        open_tokenizer(str(tmp_path / "tokenizer.json"))


def test_one_text_has_the_tokens_of_the_librarys_call_for_one(tmp_path):
    name = write(tmp_path)
    asked, theirs = open_tokenizer(name), tokenizers.Tokenizer.from_file(name)
    theirs.post_processor = None
    others = "\0 \t\r\n\U0001f600e\u0301", "\u2581 def  name_1 (\u65e5\u672c)\n\n"
    for text in ("", " ", "a", TEXT, f"a{END}b {END}", *others):
        assert asked.encode(text) == theirs.encode(text, add_special_tokens=False).ids


def test_other_threads_go_on_while_a_long_text_is_encoded(tmp_path):
    """A server encodes prompts in a thread, beside the event loop that answers other clients."""
    tokenizer, seen, ended = open_tokenizer(write(tmp_path)), [], threading.Event()
    watcher = threading.Thread(target=lambda: [seen.append(ended.is_set()) for _ in iter(lambda: ended.wait(1e-3), 1)])
    watcher.start()
    tokenizer.encode(TEXT * 500)
    during = len(seen)
    ended.set()
    watcher.join()
    assert during > 5
