# SPDX-License-Identifier: Apache-2.0
"""The ledger against reality: what it says of a step is what the batches of that step held."""

import json
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from input_pipeline import ledger, shards
from input_pipeline.batches import training_batches
from input_pipeline.errors import DataError
from reporting.display import aligned
from tests.input_pipeline.conftest import make_text

LENGTH, SEED = 48, 3
CORPORA = {
    "text": {"source": "text"},
    "jsonl": {"source": "auto", "path": "LINES"},
    "mixture": {"source": "auto", "path": "", "mixture": "0.75 TEXTS; 0.25 LINES"},
    "pieces": {"source": "text", "tokenizer": "sentencepiece", "vocab_size": 400},
}


class Run:
    """A run without a model: what it was fed at each step, and its ledger."""

    def __init__(self, folder, corpus):
        self.folder, self.corpus = folder, corpus
        self.step, self.taken, self.fed, self.taken_at = 0, 0, {}, {0: 0}

    def train(self, num_steps: int, global_batch: int, sequence_length: int = LENGTH) -> None:
        """Begin a section, and train some steps."""
        arguments = {"global_batch": global_batch, "sequence_length": sequence_length, "seed": SEED}
        section = ledger.new_section(self.corpus, step=self.step, examples=self.taken, **arguments)
        ledger.append(self.folder, section)
        batches = training_batches(
            self.corpus.train, rows=np.arange(global_batch), first_example=self.taken, num_steps=num_steps, **arguments
        )
        for batch in batches:
            self.step, self.taken = self.step + 1, self.taken + global_batch
            self.fed[self.step], self.taken_at[self.step] = batch, self.taken

    def back_to(self, step: int) -> None:
        """Be where a checkpoint was."""
        self.step, self.taken = step, self.taken_at[step]

    def restart(self, fresh) -> None:
        """Go on with a newly prepared corpus."""
        record = {"examples": self.taken, "mixture": self.corpus.train.record(), "skips": self.corpus.train.skips}
        self.corpus = fresh.resume(json.loads(json.dumps(record)))

    def leave_out(self, step: int, kept: int = 0) -> None:
        """Roll back to the end of a step, and leave out all later examples except the first `kept`."""
        last = self.taken
        self.back_to(step)
        self.corpus = replace(self.corpus, train=self.corpus.train.skip(self.taken + kept, last))

    def explained(self, step: int) -> list[ledger.Example]:
        return ledger.explain(ledger.section_of(self.folder, step, self.step), step, self.corpus)


@pytest.fixture
def make_corpus(corpus, texts, tmp_path, monkeypatch):
    """Prepare one of CORPORA with its documents, over several shards; `mixture` in other weights where given."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 3_000)
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": make_text(n, 9)[: 30 + n * 7]}) + "\n\n" for n in range(50, 110)))

    def make(name: str, **changes):
        settings = CORPORA[name] | changes
        settings = {
            key: value.replace("TEXTS", str(texts)).replace("LINES", str(lines)) if isinstance(value, str) else value
            for key, value in settings.items()
        }
        return corpus(with_documents=True, **settings)

    return make


def text_of(name: str) -> str:
    """Return the document of a name, read by other means than the pipeline's."""
    path, _, line = name.partition(".jsonl:")
    return (
        json.loads(Path(path + ".jsonl").read_text().split("\n")[int(line) - 1])["text"]
        if line
        else Path(path).read_text()
    )


def check_step(run: Run, step: int) -> None:
    """Assert that the ledger's words on a step are what its batch held."""
    batch, tokenizer, told = run.fed[step], run.corpus.tokenizer, run.explained(step)
    assert [example.row for example in told] == list(range(len(batch["targets"])))
    for example in told:
        targets, segments = batch["targets"][example.row], np.zeros_like(batch["segments"][example.row])
        for document, segment, first, count, offset in example.excerpts:
            stored = [*tokenizer.encode(text_of(document)), tokenizer.end_of_document]
            assert targets[first : first + count].tolist() == stored[offset : offset + count]
            assert document.startswith(example.part) and count > 0
            segments[first : first + count] = segment
        assert segments.tolist() == batch["segments"][example.row].tolist()


@pytest.mark.parametrize("name", CORPORA)
def test_each_row_is_the_documents_that_the_ledger_says_whatever_the_run_went_through(make_corpus, tmp_path, name):
    run = Run(tmp_path, make_corpus(name))
    run.train(4, global_batch=8)
    run.restart(make_corpus(name))
    run.train(5, global_batch=12)  # another batch
    run.leave_out(7)
    run.train(6, global_batch=12)
    run.back_to(11)  # killed, and taken up from an older checkpoint
    run.restart(make_corpus(name, mixture="1 TEXTS; 2 LINES") if name == "mixture" else make_corpus(name))
    run.train(4, global_batch=5, sequence_length=20)
    run.leave_out(9)
    run.leave_out(6, kept=30)
    run.train(7, global_batch=8)
    assert len(ledger.sections(tmp_path)) == 5 and run.step == 13
    for step in range(1, 14):
        check_step(run, step)
    told = [run.explained(step) for step in range(1, 14)]
    examples = [example.example for step in told for example in step]
    assert len(set(examples)) == len(examples) and examples == sorted(examples)
    assert len({excerpt.document for step in told for example in step for excerpt in example.excerpts}) > 20
    assert len({example.part for step in told for example in step}) == (2 if name == "mixture" else 1)


def test_a_document_over_several_shards_is_one_document_with_offsets_that_go_on(make_corpus, tmp_path):
    text = "".join(f"{number} bottles\n" for number in random.Random(0).sample(range(5_000), 2_000))
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "long.txt").write_text(text)
    run = Run(tmp_path, make_corpus("text", path=str(tmp_path / "long")))
    run.train(20, global_batch=16)
    offsets = []
    for step in range(1, 21):
        check_step_of_prefix(run, step, text)
        offsets += [excerpt.offset for example in run.explained(step) for excerpt in example.excerpts]
    assert max(offsets) > 12_000 and len(set(offsets)) == len(offsets)


def check_step_of_prefix(run: Run, step: int, text: str) -> None:
    """As check_step, of a corpus of one document whose last tenth is held out."""
    for example in run.explained(step):
        (excerpt,) = example.excerpts
        targets = bytes(run.fed[step]["targets"][example.row][: excerpt.count].astype(np.uint8))
        assert targets.rstrip(b"\0") == text.encode()[excerpt.offset : excerpt.offset + len(targets.rstrip(b"\0"))]
        assert excerpt.segment == 1 and excerpt.first == 0


def test_documents_have_numbers_where_their_names_were_not_kept_and_synthetic_windows_too(
    make_corpus, corpus, tmp_path
):
    run = Run(tmp_path, make_corpus("text"))
    run.train(1, global_batch=8)
    named, (documents,) = run.explained(1), run.corpus.documents
    run.corpus = replace(run.corpus, documents=None)
    for with_names, without in zip(named, run.explained(1), strict=True):
        numbers = [int(excerpt.document.removeprefix("document ")) for excerpt in without.excerpts]
        assert [documents[number].name for number in numbers] == [excerpt.document for excerpt in with_names.excerpts]
    (tmp_path / "synthetic").mkdir()
    run = Run(tmp_path / "synthetic", corpus(source="synthetic", path="", vocab_size=16))
    run.train(2, global_batch=4)
    for example in run.explained(2):
        assert example.part == "synthetic"
        assert example.excerpts == (ledger.Excerpt(f"document {example.window}", 1, 0, LENGTH, 0),)
        (windows,) = run.corpus.train.parts
        told = windows.read(np.array([example.window]), LENGTH)["targets"][0]
        assert np.array_equal(told, run.fed[2]["targets"][example.row])


def section(step: int, seed: int = 0) -> dict:
    """Return a section that begins after a step."""
    return {
        "step": step, "seed": seed, "examples": 0, "global_batch": 8, "sequence_length": LENGTH, "corpus": "",
        "mixture": [(0, ["1"])], "skips": [],
    }  # fmt: skip


def test_the_last_section_that_covers_a_step_holds(tmp_path):
    for step, seed in ((0, 0), (10, 1), (25, 2), (5, 3), (12, 4)):
        ledger.append(tmp_path, section(step, seed))
    found = [ledger.section_of(tmp_path, step, 30)["seed"] for step in (1, 5, 6, 12, 13, 30)]
    assert found == [0, 0, 3, 3, 4, 4]


def test_a_step_that_was_not_trained_is_an_error_that_says_which_were(tmp_path):
    with pytest.raises(DataError, match=r"ledger.jsonl is missing or empty; every run writes it"):
        ledger.section_of(tmp_path, 1, 5)
    ledger.append(tmp_path, section(20))
    for step in (20, 0, -1, 31):
        with pytest.raises(DataError, match=rf"ledger.jsonl covers steps 21 to 30, not step {step}$"):
            ledger.section_of(tmp_path, step, 30)
    with pytest.raises(DataError, match=r"ledger.jsonl covers no step yet, not step 21$"):
        ledger.section_of(tmp_path, 21, 20)


def test_another_corpus_is_an_error(make_corpus, tmp_path, texts):
    run = Run(tmp_path, make_corpus("text"))
    run.train(1, global_batch=8)
    (texts / "01.txt").write_text("something else\n")
    run.corpus = make_corpus("text")
    with pytest.raises(
        DataError, match=r"step 1 was trained on another corpus \(\w+, now \w+\); restore its documents"
    ):
        run.explained(1)


def test_wherever_a_killed_process_left_a_line_unfinished_the_next_one_begins_afresh(tmp_path):
    whole = [section(0), section(7, 2)]
    for one in whole:
        ledger.append(tmp_path, one)
    path = tmp_path / ledger.NAME
    content = path.read_bytes()
    first_line = content.index(b"\n") + 1
    for end in range(len(content) + 1):
        path.write_bytes(content[:end])
        before = whole[: (end >= first_line) + (end == len(content))]
        assert ledger.sections(tmp_path) == before
        ledger.append(tmp_path, section(9))
        assert ledger.sections(tmp_path) == [*before, section(9)]


def test_a_process_killed_while_it_writes_sections_leaves_a_ledger_that_can_be_read_and_gone_on_with(tmp_path):
    script = (
        "import sys, pathlib; from input_pipeline import ledger\n"
        "section = eval(sys.argv[2]) | {'filling': 'x' * 5000}\n"
        "for step in range(10**9): ledger.append(pathlib.Path(sys.argv[1]), section | {'step': step})\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), repr(section(0))]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    while len(ledger.sections(tmp_path)) < 20 and process.poll() is None:
        pass
    process.kill()
    assert process.wait() == -signal.SIGKILL
    number = len(ledger.sections(tmp_path))
    ledger.append(tmp_path, section(number))
    assert [section["step"] for section in ledger.sections(tmp_path)] == list(range(number + 1))


def test_a_line_that_somebody_spoilt_is_an_error_that_names_it(tmp_path):
    for step in (0, 7, 9):
        ledger.append(tmp_path, section(step))
    path = tmp_path / ledger.NAME
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"\0" * len(second) + b"\n" + third)
    with pytest.raises(DataError, match=r"ledger.jsonl:2: is not valid JSON \(.*\); fix the line, or remove it$"):
        ledger.sections(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": "7"}, "ledger.jsonl:2: step: should be a valid integer, but is '7'"),
        ({"step": -7}, "ledger.jsonl:2: step: should be greater than or equal to 0, but is -7"),
        ({"mixture": [[0, [1]]]}, "ledger.jsonl:2: mixture.0.1.0: should be a valid string, but is 1"),
        ({"global_batch": 10**12}, "global_batch: should be less than or equal to 1000000000, but is 1000000000000"),
        ({"sequence_length": 0}, "sequence_length: should be greater than or equal to 1, but is 0"),
    ],
)
def test_a_line_of_other_types_or_sizes_is_an_error_that_names_it(tmp_path, changes, message):
    """And no KeyError, nor an array of a million million rows."""
    ledger.append(tmp_path, section(0))
    ledger.append(tmp_path, section(7) | changes)
    with pytest.raises(DataError) as caught:
        ledger.sections(tmp_path)
    assert message in str(caught.value) and str(caught.value).endswith("; fix the line, or remove it")


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ([[0, ["1/0"]]], "has the weight '1/0', which is not a fraction"),
        ([[0, ["1/2", "1/2"]]], "has invalid weights for 1 parts: "),
        ([[0, ["1/2"]]], "has invalid weights for 1 parts: "),
        ([[5, ["1"]]], r"has sections that begin at \[5\]; they must ascend from 0"),
        ([], r"has sections that begin at \[\]; they must ascend from 0"),
    ],
)
def test_a_mixture_that_is_none_is_an_error(make_corpus, tmp_path, mixture, message):
    run = Run(tmp_path, make_corpus("text"))
    run.train(1, global_batch=8)
    (written,) = ledger.sections(tmp_path)
    with pytest.raises(DataError, match=message):
        ledger.explain(written | {"mixture": mixture}, 1, run.corpus)


def test_a_ledger_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / ledger.NAME).mkdir()
    for call in (lambda: ledger.append(tmp_path, section(0)), lambda: ledger.sections(tmp_path)):
        with pytest.raises(DataError, match=r"ledger.jsonl: Is a directory"):
            call()


def test_a_table_lists_excerpts_by_row_or_by_loss():
    first = ledger.Excerpt("texts/a.txt", segment=1, first=0, count=30, offset=100)
    second = ledger.Excerpt("texts/long name.txt", segment=2, first=30, count=18, offset=0)
    other = ledger.Excerpt("lines.jsonl:7", segment=1, first=0, count=48, offset=5)
    examples = [ledger.Example(0, 20, "texts", 5, (first, second)), ledger.Example(1, 21, "lines.jsonl", 2, (other,))]
    assert aligned(ledger.table(examples)) == [
        "row  part         document             tokens",
        "0    texts        texts/a.txt          100..129",
        "0    texts        texts/long name.txt  0..17",
        "1    lines.jsonl  lines.jsonl:7        5..52",
    ]
    assert aligned(ledger.table(examples, {(0, 1): 2.5, (0, 2): 11.25, (1, 1): 3.0})) == [
        "loss     row  part         document             tokens",
        "11.2500  0    texts        texts/long name.txt  0..17",
        "3.0000   1    lines.jsonl  lines.jsonl:7        5..52",
        "2.5000   0    texts        texts/a.txt          100..129",
    ]
    nothing_counts = aligned(ledger.table(examples, {(0, 1): float("nan"), (0, 2): 0.5, (1, 1): 3.0}))
    assert [line.split()[0] for line in nothing_counts] == ["loss", "3.0000", "0.5000", "-"]
