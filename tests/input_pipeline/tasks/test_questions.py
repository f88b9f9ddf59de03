# SPDX-License-Identifier: Apache-2.0
"""Questions of reasoning-gym as rows: pure functions of their number, with held-out questions that no row trains on."""

import subprocess
import sys

import numpy as np
import pytest

from input_pipeline.errors import DataError
from input_pipeline.packing import IGNORED
from input_pipeline.tasks import questions
from input_pipeline.tasks.questions import QuestionRollouts, QuestionWindows
from tests.support import ROOT

LENGTH = 400
NAMES = ("basic_arithmetic", "letter_counting")
REASON = "reasoning-gym is not installed here: make setup EXTRAS=reasoning"


@pytest.fixture(scope="module", autouse=True)
def package():
    return pytest.importorskip("reasoning_gym", reason=REASON)


def texts_of(batch):
    """Return the text of each row."""
    return [bytes(row[row > 0].astype(np.uint8).tolist()).decode() for row in batch["tokens"]]


def test_a_row_depends_on_its_index_alone_also_in_another_process():
    name = NAMES[1]
    windows = QuestionRollouts(name, "byte", 3, "train")
    together = windows.read(np.arange(5, 9), LENGTH)
    for place, index in enumerate((5, 6, 7, 8)):
        alone = windows.read(np.array([index]), LENGTH)
        assert all((alone[key][0] == together[key][place]).all() for key in windows.fills)
    program = (
        "import numpy as np; from input_pipeline.tasks.questions import QuestionRollouts as Rows; "
        f"print(Rows({name!r}, 'byte', 3, 'train').read(np.arange(5, 9), {LENGTH})['tokens'].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"{together['tokens'].tolist()}\n"
    other = QuestionRollouts(name, "byte", 4, "train")
    assert other.digest != windows.digest and texts_of(other.read(np.arange(5, 9), LENGTH)) != texts_of(together)


@pytest.mark.parametrize("name", NAMES)
def test_no_question_is_in_both_streams_and_the_number_of_a_row_is_that_of_its_question(name):
    asked = {}
    for stream in ("train", "heldout"):
        batch = QuestionRollouts(name, "byte", 0, stream).read(np.arange(60), LENGTH)
        entries = [questions.generator(name).entry(int(number)) for number in batch["numbers"]]
        asked[stream] = {entry["question"] for entry in entries}
        assert {questions.is_heldout(question) for question in asked[stream]} == {stream == "heldout"}
        for text, entry in zip(texts_of(batch), entries, strict=True):
            assert text == f"user\n{entry['question']}assistant\n{entry['answer']}"
    assert not asked["train"] & asked["heldout"] and len(asked["train"]) > 20


def test_only_answers_are_learned_and_rows_are_filled_with_whole_questions():
    batch = QuestionWindows("basic_arithmetic", "byte", 0, "train").read(np.arange(8), LENGTH)
    assert batch.keys() == QuestionWindows.fills.keys() and batch["segments"].max(axis=1).min() >= 2
    for row in range(8):
        for number in range(1, batch["segments"][row].max() + 1):
            mine = batch["segments"][row] == number
            targets = batch["targets"][row][mine]
            assert (batch["positions"][row][mine] == np.arange(mine.sum())).all()
            answer = bytes(targets[targets > 0].astype(np.uint8).tolist()).decode()
            assert targets[-1] == 0 and (targets[targets != IGNORED][:-1] > 0).all(), "its end is learned too"
            assert float(answer) == int(answer)


def test_a_trained_tokenizer_encodes_the_same_questions(tmp_path):
    import sentencepiece

    from input_pipeline.sentencepiece_training import OPTIONS

    (tmp_path / "text").write_text("\n".join(f"Calculate {n} + {n * n} = user assistant" for n in range(300)))
    prefix = str(tmp_path / "tokenizer")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=prefix, vocab_size=300, **OPTIONS
    )
    windows = QuestionRollouts("basic_arithmetic", f"{prefix}.model", 0, "train")
    batch = windows.read(np.arange(3), LENGTH)
    for tokens, number in zip(batch["tokens"], batch["numbers"], strict=True):
        entry = questions.generator("basic_arithmetic").entry(int(number))
        found = windows.tokenizer.decode(tokens[tokens > 0].tolist())
        assert entry["question"] in found and found.rstrip().endswith(entry["answer"])


def test_answers_are_scored_by_the_package(package):
    made = questions.generator("basic_arithmetic")
    entry = made.entry(7)
    assert made.score(7, entry["answer"]) == 1 and made.score(7, f" {entry['answer']}\n") == 1
    assert made.score(7, f"<think>6 or 7</think><answer>{entry['answer']}</answer>") == 1
    for answer in ("", "no", "1e999", "<answer></answer>"):
        assert made.score(7, answer) == package.create_dataset("basic_arithmetic", seed=0, size=8).score_answer(
            answer.removeprefix("<answer>").removesuffix("</answer>"), entry
        )
    assert 0 < made.score(7, f"{entry['answer']} it is") < 1, "a part of the reward, as the package gives it"


@pytest.mark.parametrize("name", ["spiral_matrix", "countdown"])
def test_an_answer_never_runs_as_a_program(name, tmp_path, monkeypatch):
    """The package evaluates these answers as Python."""
    monkeypatch.chdir(tmp_path)
    made = questions.generator(name)
    assert made.score(3, made.entry(3)["answer"]) == 1
    for program in ("open('ran', 'w')", "__import__('pathlib').Path('ran').touch()", "[open(f, 'w') for f in ['ran']]"):
        assert made.score(3, program) == 0 and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["countdown", "puzzle24"])
def test_a_number_that_is_not_whole_is_never_computed(name):
    """The package gives 0.01 for these. It would also write out exp(9999999999), which does not end."""
    assert questions.generator(name).score(3, "24.0") == questions.generator(name).score(3, "exp(1)") == 0


@pytest.mark.skipif(not sys.flags.hash_randomization, reason="this Python was started with PYTHONHASHSEED=0")
def test_a_seed_of_hashes_that_is_set_after_python_started_is_too_late(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with pytest.raises(DataError, match="makes other questions in each process; set PYTHONHASHSEED=0 before Python "):
        questions.generator("word_ladder")


@pytest.mark.parametrize("name, tokenizer, length, said", [
    ("leg_countin", "byte", LENGTH, "is not a generator of reasoning-gym; use one of leg_counting, "),
    ("basic_arithmetic", "byte", 12, "of 1,000 questions none is of the train stream and fits in train.sequence_len"),
    ("composite", "byte", LENGTH, "data.path=composite is a generator that needs settings of its own: Must specify "),
    ("graph_color", "byte", 4000, "data.path=graph_color has questions without an answer to learn; use --config.dat"),
])  # fmt: skip
def test_what_cannot_work_is_said_in_a_line(name, tokenizer, length, said):
    with pytest.raises(DataError) as caught:
        QuestionWindows(name, tokenizer, 0, "train").check_counts(length)
    assert said in str(caught.value) and "\n" not in str(caught.value)
