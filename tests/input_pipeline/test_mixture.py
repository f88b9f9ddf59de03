# SPDX-License-Identifier: Apache-2.0
"""Mixtures: exact over any prefix, every window once a pass, and new weights without a repeat or a gap."""

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from input_pipeline.errors import DataError
from input_pipeline.mixture import Mixture, Schedule, parse, parse_stream
from input_pipeline.packing import KEYS
from input_pipeline.synthetic import MarkovWindows
from input_pipeline.windows import Windows
from tests.input_pipeline.memory import mixture_of_one

WEIGHTS = st.lists(st.integers(0, 40), min_size=1, max_size=7).filter(any).map(
    lambda shares: tuple(Fraction(share, sum(shares)) for share in shares)
)  # fmt: skip


class Numbered(Windows):
    """A window source whose window i of part k is [k, i]."""

    def __init__(self, part: int, num_windows: int):
        self.part, self.num_windows = part, num_windows

    def num_examples(self, sequence_length):
        return self.num_windows

    def read(self, indices, sequence_length):
        rows = np.stack([np.full(len(indices), self.part), indices], axis=1).astype(np.int32)
        return dict.fromkeys(("tokens", "targets", "segments", "positions"), rows)


@pytest.mark.parametrize(
    ("arrays", "found"),
    [
        (None, "NoneType"),
        (("tokens", "targets"), "tuple"),
        ({"tokens": np.zeros((2, 4), np.int32)}, r"\{'tokens': 'int32\[2\]'\}"),
        (dict.fromkeys(KEYS, np.zeros((2, 4), np.int64)), r".*'targets': 'int64\[2\]'"),
        (dict.fromkeys(KEYS, np.zeros((3, 4), np.int32)), r".*'targets': 'int32\[3\]'"),
    ],
    ids=str,
)
def test_what_a_window_source_may_not_return_is_named(arrays, found):
    """Else the step would fail, which knows neither the source nor what was wanted of it."""
    source = Numbered(0, 7)
    source.read = lambda indices, sequence_length: arrays
    with pytest.raises(TypeError, match=rf"^Numbered.read returned {found}.* must return int32\[2\] for each name of"):
        mixture_of_one(source).read(np.arange(2), 4, 0)


def windows_of(mixture, examples):
    return [tuple(row) for row in mixture.read(np.asarray(examples), 2, seed=1)["tokens"].tolist()]


@given(weights=WEIGHTS)
def test_every_prefix_has_each_part_by_its_weight_give_or_take_less_than_one(weights):
    schedule = Schedule(weights)
    parts, numbers = schedule.locate(np.arange(500))
    counts = np.cumsum(parts[:, None] == np.arange(len(weights)), axis=0)
    lengths = np.arange(1, 501)
    for k, weight in enumerate(weights):
        assert (abs(counts[:, k] * weight.denominator - lengths * weight.numerator) < weight.denominator).all()
    assert (numbers == counts[lengths - 1, parts] - 1).all()
    for n in range(1, 501, 7):
        assert schedule.taken(n).tolist() == counts[n - 1].tolist()


@given(sections=st.lists(st.tuples(st.integers(1, 90), st.permutations([0, 1, 2, 5])), min_size=1, max_size=4))
def test_new_weights_go_on_with_every_part_where_it_was(sections):
    """However often they change, each part's examples are 0, 1, 2, ... and each pass has every window once."""
    mixture, done, found = None, 0, []
    for length, shares in sections:
        weights = tuple(Fraction(share, sum(shares)) for share in shares)
        fresh = Mixture(tuple(Numbered(part, 7 + part) for part in range(4)), ((0, weights),))
        mixture = fresh.resume(json.loads(json.dumps(mixture.record())), done) if mixture else fresh
        found += windows_of(mixture, range(done, done + length))
        done += length
    assert windows_of(mixture, range(done)) == found
    for part in range(4):
        taken = [window for number, window in found if number == part]
        passes = [taken[start : start + 7 + part] for start in range(0, len(taken), 7 + part)]
        assert all(len(set(one)) == len(one) for one in passes)
        assert all(sorted(one) == list(range(7 + part)) for one in passes[:-1])


ACTIONS = st.one_of(
    st.tuples(st.just("train"), st.integers(1, 60)),
    st.tuples(st.just("weights"), st.permutations([0, 1, 2, 5])),
    st.tuples(st.just("roll back"), st.integers(0, 9), st.integers(0, 60), st.integers(0, 40)),
    st.tuples(st.just("restart"), st.integers(0, 9)),
)


class Run:
    """A run that trains, restarts and rolls back: which examples it trained on, as which windows, and left out."""

    def __init__(self):
        self.parts = tuple(Numbered(part, 7 + part) for part in range(4))
        self.weights = (Fraction(1, 4),) * 4
        self.mixture = Mixture(self.parts, ((0, self.weights),))
        self.trained, self.windows, self.left_out, self.checkpoints = [], [], set(), []
        self.save()

    def save(self):
        record = json.dumps({"mixture": self.mixture.record(), "skips": self.mixture.skips})
        self.checkpoints.append((list(self.trained), list(self.windows), set(self.left_out), record))

    def restart(self, number=-1):
        number %= len(self.checkpoints)
        del self.checkpoints[number + 1 :]
        trained, windows, left_out, record = self.checkpoints[number]
        self.trained, self.windows, self.left_out = list(trained), list(windows), set(left_out)
        fresh, stored = Mixture(self.parts, ((0, self.weights),)), json.loads(record)
        self.mixture = fresh.resume(stored["mixture"], len(trained), stored["skips"])

    def train(self, number):
        taken = np.arange(len(self.trained), len(self.trained) + number)
        self.trained += self.mixture.examples(taken).tolist()
        self.windows += windows_of(self.mixture, taken)

    def roll_back(self, number, kept, left_out):
        """Go back to a checkpoint, train on some examples again, and leave out some after them."""
        number %= len(self.checkpoints)
        del self.checkpoints[number + 1 :]
        trained, windows, _, _ = self.checkpoints[number]
        self.trained, self.windows = list(trained), list(windows)
        first, last = len(trained) + kept, len(trained) + kept + left_out
        self.left_out |= set(self.mixture.examples(np.arange(first, last)).tolist())
        self.mixture = self.mixture.skip(first, last)
        self.save()


@given(actions=st.lists(ACTIONS, max_size=14))
def test_skips_and_new_weights_leave_every_example_trained_on_once_or_left_out_once(actions):
    run = Run()
    for action, *arguments in [*actions, ("train", 50)]:
        if action == "train":
            run.train(*arguments)
            run.save()
        if action == "weights":
            run.weights = tuple(Fraction(share, 8) for share in arguments[0])
            run.restart()
        if action == "roll back":
            run.roll_back(*arguments)
        if action == "restart":
            run.restart(*arguments)
    taken = np.arange(len(run.trained))
    assert run.mixture.examples(taken).tolist() == run.trained
    assert windows_of(run.mixture, taken) == run.windows
    passed = [example for example in run.left_out if example < run.trained[-1]]
    assert sorted(run.trained + passed) == list(range(run.trained[-1] + 1))
    whole = [
        tuple(map(int, pair)) for pair in zip(*run.mixture.windows(np.arange(run.trained[-1] + 1), 2, 1), strict=True)
    ]
    for part in range(4):
        of_part = [window for number, window in whole if number == part]
        passes = [of_part[start : start + 7 + part] for start in range(0, len(of_part), 7 + part)]
        assert all(len(set(one)) == len(one) for one in passes)


def test_a_skip_is_counted_in_examples_taken_and_holds_earlier_ones_within_it():
    mixture = mixture_of_one(Numbered(0, 1000))
    once = mixture.skip(10, 15)
    assert once.skips == ((10, 5),) and once.examples([9, 10, 11]).tolist() == [9, 15, 16]
    assert once.skip(10, 12).skips == ((10, 5), (10, 2))  # it diverged again: 15 and 16 go too
    later = once.skip(20, 30)
    assert later.skips == ((10, 5), (20, 10)) and later.examples([19, 20]).tolist() == [24, 35]
    further_back = later.skip(5, 25)
    assert further_back.skips == ((5, 35),) and further_back.examples([4, 5]).tolist() == [4, 40]
    assert later.examples(25) == 40
    sooner = later.skip(12, 15)  # what was example number 20 is now number 17
    assert sooner.skips == ((10, 5), (12, 3), (17, 10)) and sooner.examples([11, 12, 16, 17]).tolist() == [
        16,
        20,
        24,
        35,
    ]
    assert mixture.examples(7) == 7 and mixture.skip(3, 3).examples(7) == 7


def test_skips_leave_out_what_a_list_leaves_out():
    """Small numbers, so that skips often begin where another one begins or ends."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        mixture, left = mixture_of_one(Numbered(0, 1000)), list(range(200))
        for first, length in rng.integers(0, 8, (6, 2)).tolist():
            mixture = mixture.skip(first, first + length)
            del left[first : first + length]
        assert mixture.examples(np.arange(100)).tolist() == left[:100], mixture.skips


def test_weights_that_change_after_a_skip_hold_from_the_next_example_on():
    old, new = (Fraction(1, 2), Fraction(1, 2)), (Fraction(1, 4), Fraction(3, 4))
    parts = (Numbered(0, 50), Numbered(1, 50))
    rolled_back = Mixture(parts, ((0, old),)).skip(10, 30)
    again = Mixture(parts, ((0, new),)).resume(rolled_back.record(), 12, json.loads(json.dumps(rolled_back.skips)))
    assert again == Mixture(parts, ((0, old), (32, new)), ((10, 20),))
    assert again.recorded(again.record(), json.loads(json.dumps(again.skips))) == again


def test_taking_up_again_and_from_an_older_checkpoint():
    old, new = ((Fraction(1, 2), Fraction(1, 2)), (Fraction(1, 4), Fraction(3, 4)))
    parts = (Numbered(0, 50), Numbered(1, 50))
    before, after = Mixture(parts, ((0, old),)), Mixture(parts, ((0, new),))
    at_ten = before.record()
    once = after.resume(at_ten, 10)
    assert once.history == ((0, old), (10, new))
    assert after.resume(once.record(), 10) == once and after.resume(once.record(), 25) == once
    assert after.resume(at_ten, 10) == once  # the checkpoint at ten again, without what came after it
    assert before.resume(once.record(), 10).history == ((0, old),)  # changed back before a step was made
    assert before.resume(once.record(), 25).history == ((0, old), (10, new), (25, old))
    assert windows_of(after.resume(at_ten, 10), range(10)) == windows_of(before, range(10))
    assert after.resume(None, 10) == after  # a run that kept no weights had these


def test_a_stream_takes_its_tasks_one_after_the_other_and_resumes_in_any_of_them():
    """A task that returns continues where it was, and the last one does not end."""
    paths, history = parse_stream("a.txt:6, b.txt:5,a.txt:4,c:1")
    assert paths == ["a.txt", "b.txt", "c"]
    stream = Mixture(tuple(Numbered(part, 50) for part in range(3)), history)
    order = windows_of(stream, range(30))
    assert [part for part, _ in order] == [0] * 6 + [1] * 5 + [0] * 4 + [2] * 15
    assert [pair for pair in order if pair[0] == 0] == windows_of(mixture_of_one(Numbered(0, 50)), range(10))
    for taken in range(0, 20):
        assert windows_of(stream.resume(json.loads(json.dumps(stream.record())), taken), range(30)) == order
    longer = Mixture(stream.parts, parse_stream("a.txt:6,b.txt:8,a.txt:4,c:1")[1])
    assert windows_of(longer.resume(stream.record(), 8), range(8)) == order[:8]
    parts = [part for part, _ in windows_of(longer.resume(stream.record(), 8), range(20))]
    assert parts[8:] == [1] * 6 + [0] * 4 + [2] * 2


@pytest.mark.parametrize("text", ["a.txt", "a.txt:0", "a.txt:5,:4", "a.txt:x", "a.txt:5,", "a.txt:-1"])
def test_a_stream_that_cannot_be_read_is_refused(text):
    with pytest.raises(DataError, match=r"must be paths with a number of examples each, such as 'a.txt:1000,b.txt"):
        parse_stream(text)


def test_a_part_is_read_in_its_own_order_and_a_single_source_in_that_of_the_seed():
    alone = mixture_of_one(Numbered(0, 100))
    order = [window for _, window in windows_of(alone, range(200))]
    assert sorted(order[:100]) == sorted(order[100:]) == list(range(100)) and order[:100] != order[100:]
    both = Mixture((Numbered(0, 100), Numbered(1, 100)), ((0, (Fraction(1, 2), Fraction(1, 2))),))
    of_parts = [[window for number, window in windows_of(both, range(200)) if number == part] for part in (0, 1)]
    assert of_parts[0] == order[:100] and of_parts[1] != order[:100]


def test_a_part_of_weight_0_is_no_part_of_an_epoch():
    parts = Numbered(0, 100), Numbered(1, 10_000)
    sections = (0, (Fraction(1), Fraction(0))), (50, (Fraction(1, 2), Fraction(1, 2)))
    assert [Mixture(parts, sections[:count]).num_examples(2) for count in (1, 2)] == [100, 10_100]


def test_no_part_of_a_run_has_the_order_of_a_part_with_the_next_seed():
    """Else runs that differ by their seeds alone, of which the spread is a figure, would see the same rows."""
    both = Mixture((Numbered(0, 100), Numbered(1, 100)), ((0, (Fraction(1, 2), Fraction(1, 2))),))
    orders = set()
    for seed in (0, 1):
        parts, windows = both.windows(np.arange(200), 2, seed)
        orders |= {tuple(windows[parts == part].tolist()) for part in (0, 1)}
    assert len(orders) == 4


def test_tokens_of_a_part_of_weight_0_are_not_among_those_to_train_on():
    parts = MarkovWindows(8, 0, 100, "train"), MarkovWindows(8, 0, 10_000, "train")
    assert Mixture(parts, ((0, (Fraction(1), Fraction(0))),)).num_tokens == 100


def test_any_example_is_found_at_once():
    mixture = Mixture((MarkovWindows(8, 0, 10**6, "train"),) * 2, ((0, parse("0.99999 a; 0.00001 b")[1]),))
    parts, numbers = mixture.locate(np.array([10**15 - 1, 10**15]))
    assert abs(numbers[0] - 0.99999 * 10**15) < 2 and parts[0] == 0
    assert mixture.read(np.array([10**15]), 16, seed=0)["tokens"].shape == (1, 16)


@pytest.mark.parametrize(
    ("text", "paths", "weights"),
    [
        ("0.7 code/**/*.py; 0.3 books.jsonl", ["code/**/*.py", "books.jsonl"], ["7/10", "3/10"]),
        ("2 a b.txt ;1 c;", ["a b.txt", "c"], ["2/3", "1/3"]),
        ("1/3 a; 1/6 b; 0 c", ["a", "b", "c"], ["2/3", "1/3", "0"]),
    ],
)
def test_weights_are_the_fractions_that_were_typed(text, paths, weights):
    assert parse(text) == (paths, tuple(map(Fraction, weights)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("books.jsonl", "data.mixture: 'books.jsonl' is not a weight and a path; write, for example, '0.7 code"),
        ("0.5", "'0.5' is not a weight and a path"),
        ("1e-99999999 a", "'1e-99999999 a' is not a weight and a path"),
        ("1 a; -1 b", "'-1 b' is not a weight and a path"),
        ("nan a", "'nan a' is not a weight and a path"),
        ("1/0 a", "'1/0 a' is not a weight and a path"),
        ("0 a; 0 b", "gives no part a weight"),
        (";", "gives no part a weight"),
        ("1 a; 2 a", "names a twice"),
        ("1e-5000 a; 1 b", "repeats only after more than 100,000 examples; use weights with fewer"),
        ("0.123457 a; 0.876543 b", "repeats only after more than 100,000 examples; use weights with fewer"),
    ],
)  # fmt: skip
def test_a_mixture_that_cannot_be_read_is_an_error(text, message):
    with pytest.raises(DataError) as caught:
        parse(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture
def two_parts(texts, tmp_path):
    """The small corpus as two sources with a mixture's text: 0.75 of one, 0.25 of the other."""
    lines = [json.dumps({"text": f"line {number} of the second part\n" * 9}) for number in range(30)]
    (tmp_path / "second.jsonl").write_text("\n".join(lines))
    return f"0.75 {texts}; 0.25 {tmp_path / 'second.jsonl'}"


def test_parts_have_their_own_shards_and_held_out_documents(corpus, two_parts, texts, tmp_path):
    mixed = corpus(source="auto", path="", mixture=two_parts)
    first, second = corpus(source="auto", path=str(texts)), corpus(source="auto", path=f"{tmp_path}/second.jsonl")
    assert [part.num_tokens for part in mixed.train.parts] == [first.train.num_tokens, second.train.num_tokens]
    assert mixed.heldout.num_documents == first.heldout.num_documents + second.heldout.num_documents
    assert mixed.heldout.num_bytes == first.heldout.num_bytes + second.heldout.num_bytes
    both = mixed.heldout.read(np.arange(mixed.heldout.num_examples(64)), 64)["targets"].ravel()[
        : mixed.heldout.num_tokens
    ]
    alone = [one.heldout.read(np.arange(one.heldout.num_examples(64)), 64)["targets"].ravel()[: one.heldout.num_tokens]
             for one in (first, second)]  # fmt: skip
    np.testing.assert_array_equal(both, np.concatenate(alone))


def test_weights_are_no_part_of_what_the_corpus_is(corpus, two_parts):
    mixed = corpus(source="auto", path="", mixture=two_parts)
    other = corpus(source="auto", path="", mixture=two_parts.replace("0.75", "0.6"), announce=pytest.fail)
    assert mixed.digest == other.digest and mixed.train.history != other.train.history
    backwards = "; ".join(reversed(two_parts.split("; ")))
    assert corpus(source="auto", path="", mixture=backwards).digest != mixed.digest
