# SPDX-License-Identifier: Apache-2.0
"""Which examples come when: the same for any number of processes, any stop, any batch."""

import functools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from input_pipeline import batches as pipeline
from input_pipeline.batches import _known, evaluation_batches, importing_tensorflow, training_batches
from input_pipeline.errors import DataError
from input_pipeline.packing import KEYS
from input_pipeline.synthetic import MarkovWindows
from tests.input_pipeline.memory import mixture_of_one

LENGTH = 32


@pytest.fixture
def train(corpus):
    """The batches of a run over the small corpus, as a list."""
    mixture = corpus().train

    def batches(rows=range(12), first_example=0, num_steps=5, global_batch=12, seed=1):
        return list(
            training_batches(
                mixture,
                seed=seed,
                sequence_length=LENGTH,
                global_batch=global_batch,
                rows=np.array(rows),
                first_example=first_example,
                num_steps=num_steps,
            )
        )

    return batches


def joined(batches):
    """Return the examples of a list of batches, end to end."""
    return {key: np.concatenate([batch[key] for batch in batches]) for key in KEYS}


def same(one, other):
    return all(np.array_equal(one[key], other[key]) for key in KEYS)


def test_batches_are_int32_rows(train):
    for batch in train(rows=[3, 4, 8]):
        assert tuple(batch) == KEYS
        assert all(values.shape == (3, LENGTH) and values.dtype == np.int32 for values in batch.values())


@pytest.mark.parametrize("split", [[range(6), range(6, 12)], [[0, 2], [11, 3, 1], [4, 5, 6, 7, 8, 9, 10]]])
def test_processes_read_together_what_one_reads(train, split):
    whole, order = train(), np.argsort(np.concatenate([np.array(rows) for rows in split]))
    for step, parts in enumerate(zip(*(train(rows=rows) for rows in split), strict=True)):
        assert same({key: values[order] for key, values in joined(parts).items()}, whole[step])


@pytest.mark.parametrize("global_batch", [12, 4, 5])
def test_a_stopped_run_goes_on_with_the_next_example(train, global_batch):
    whole = joined(train(num_steps=10))
    rest = joined(
        train(first_example=60, num_steps=60 // global_batch, rows=range(global_batch), global_batch=global_batch)
    )
    assert same(rest, {key: values[60:] for key, values in whole.items()})


def test_a_pass_has_every_window_once_and_the_next_another_order(corpus):
    mixture = corpus().train
    (windows,) = mixture.parts
    number = windows.num_examples(LENGTH)
    arguments = {"sequence_length": LENGTH, "global_batch": number, "rows": np.arange(number)}
    one, two = training_batches(mixture, seed=0, first_example=0, num_steps=2, **arguments)
    (stored,) = evaluation_batches(windows, num_batches=None, **arguments)
    for batch in (one, two):
        assert sorted(map(bytes, batch["targets"])) == sorted(map(bytes, stored["targets"]))
    assert not np.array_equal(one["targets"], two["targets"])
    assert (one["segments"] > 0).sum() == windows.num_tokens


@pytest.mark.parametrize(("readers", "prefetch"), [(1, 1), (3, 2), (8, 20)])
def test_threads_and_prefetch_change_no_batch(train, corpus, readers, prefetch):
    importing_tensorflow().result()
    arguments = {"sequence_length": LENGTH, "global_batch": 12, "rows": np.arange(12), "num_steps": 5, "seed": 1}
    batches = training_batches(corpus().train, first_example=0, readers=readers, prefetch=prefetch, **arguments)
    assert same(joined(list(batches)), joined(train()))


class ImportedLater:
    """What `importing_tensorflow` returns, if the import ends when it was asked for so many times."""

    def __init__(self, times: int):
        self.left = times

    def __call__(self):
        return self

    def done(self):
        self.left -= 1
        return self.left < 0

    def result(self):
        return importing_tensorflow().result()


@pytest.mark.parametrize("times", [0, 1, 2, 100])
def test_no_batch_waits_for_tensorflow_and_none_is_lost_or_read_twice_when_it_comes(train, monkeypatch, times):
    whole = train(num_steps=9)
    monkeypatch.setattr(pipeline, "importing_tensorflow", ImportedLater(times))
    found = train(num_steps=9)
    assert len(found) == 9 and same(joined(found), joined(whole))


def test_the_import_of_tensorflow_is_under_way_from_its_beginning_to_its_end(monkeypatch):
    """What waits for it is no sign of slow data."""
    goes_on = threading.Event()
    importing = functools.cache(pipeline.importing_tensorflow.__wrapped__)
    monkeypatch.setattr(pipeline, "importing_tensorflow", importing)
    monkeypatch.setattr(pipeline, "_tensorflow", goes_on.wait)
    seen = [pipeline.is_importing_tensorflow()]
    future = importing()
    seen.append(pipeline.is_importing_tensorflow())
    goes_on.set()
    future.result()
    assert [*seen, pipeline.is_importing_tensorflow()] == [False, True, False]


def test_a_run_at_step_a_million_finds_its_place_at_once(corpus, train):
    train()  # whatever is loaded once
    mixture, arguments = corpus().train, {"sequence_length": LENGTH, "global_batch": 12, "rows": np.arange(12)}
    started = time.monotonic()
    batch = next(training_batches(mixture, first_example=12_000_000, num_steps=10**9, seed=1, **arguments))
    assert time.monotonic() - started < 1
    assert same(batch, mixture.read(np.arange(12_000_000, 12_000_012), LENGTH, seed=1))


def test_seeds_differ(train):
    assert same(joined(train()), joined(train())) and not same(joined(train()), joined(train(seed=2)))


@pytest.mark.parametrize("rows", [[*range(7)], [6, 1], [5]])
def test_evaluation_reads_each_window_once_in_order(corpus, rows):
    windows = corpus().heldout
    number = windows.num_examples(LENGTH)
    batches = list(
        evaluation_batches(windows, sequence_length=LENGTH, global_batch=7, rows=np.array(rows), num_batches=None)
    )
    assert len(batches) == -(-number // 7) and number % 7
    indices = np.arange(len(batches) * 7).reshape(-1, 7)[:, rows].ravel()
    found, inside = joined(batches), indices < number
    assert same({key: values[inside] for key, values in found.items()}, windows.read(indices[inside], LENGTH))
    assert all(not values[~inside].any() for values in found.values())


def test_evaluation_of_a_fixed_subset_is_evenly_spread(corpus):
    windows, arguments = corpus().heldout, {"sequence_length": LENGTH, "global_batch": 7, "rows": np.arange(7)}
    number = windows.num_examples(LENGTH)
    assert number > 14  # or every window is one of these
    subset = list(evaluation_batches(windows, num_batches=2, **arguments))
    assert len(subset) == 2
    assert same(joined(subset), windows.read(np.arange(14) * number // 14, LENGTH))
    everything = list(evaluation_batches(windows, num_batches=None, **arguments))
    assert len(list(evaluation_batches(windows, num_batches=10_000, **arguments))) == len(everything)
    assert list(evaluation_batches(windows, num_batches=0, **arguments)) == []


def test_evaluation_of_so_many_windows_that_their_square_is_no_index_reads_the_last_one():
    count = 1 << 33
    windows, rows = MarkovWindows(16, 0, count * LENGTH, "heldout"), np.array([0, count - 1])
    (batch,) = evaluation_batches(windows, sequence_length=LENGTH, global_batch=count, rows=rows, num_batches=None)
    assert same(batch, windows.read(rows, LENGTH))


def test_fewer_tokens_than_a_sequence_are_an_error():
    mixture, rows = mixture_of_one(MarkovWindows(16, 0, 1_000, "train")), np.arange(1)
    with pytest.raises(
        DataError, match=r"train.sequence_length=1001 is longer than the 1,000 tokens .*; use at most 1000"
    ):
        training_batches(mixture, seed=0, sequence_length=1001, global_batch=1, rows=rows, first_example=0, num_steps=1)


def test_fewer_tokens_than_a_batch_are_an_error():
    mixture = mixture_of_one(MarkovWindows(16, 0, 1_000, "train"))
    arguments = {"seed": 0, "sequence_length": 100, "first_example": 0, "num_steps": 1}
    assert len(list(training_batches(mixture, global_batch=10, rows=np.arange(10), **arguments))) == 1
    message = "train.global_batch=11 is more than the 10 rows of train.sequence_length=100 to train on; use --config.tr"
    with pytest.raises(DataError, match=message):
        training_batches(mixture, global_batch=11, rows=np.arange(11), **arguments)


class Broken(MarkovWindows):
    """A window source that raises when some windows are read."""

    def __init__(self, error: Exception):
        super().__init__(16, 0, 4_000, "train")
        self.error = error

    def read(self, indices, sequence_length):
        if indices.max() > 40:
            raise self.error
        return super().read(indices, sequence_length)


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_batch_comes_once_as_many_later_ones_as_asked_were_read(ahead):
    """So that the processes of a group still have batches up to the step at which all stop."""
    read, given = [], iter(range(9))
    batches = _known(({"number": read.append(number)} for number in given), ahead, str)
    for number in range(3):
        next(batches)
        assert len(read) == number + 1 + ahead


@pytest.mark.parametrize("readers", [1, 4])
def test_an_error_in_the_data_arrives_after_the_batches_before_it_as_the_line_that_it_is(readers, capfd):
    importing_tensorflow().result()
    error, arguments = DataError("shard: what, where, and what to do"), {"sequence_length": 8, "global_batch": 8}
    arguments |= {"rows": np.arange(8), "readers": readers}
    batches = evaluation_batches(Broken(error), num_batches=None, **arguments)
    taken = []
    with pytest.raises(DataError) as caught:
        taken.extend(batches)
    assert caught.value is error and len(taken) == 5
    with pytest.raises(DataError) as caught:
        list(training_batches(mixture_of_one(Broken(error)), seed=0, first_example=0, num_steps=50, **arguments))
    assert caught.value is error
    assert capfd.readouterr() == ("", "")


def test_an_error_of_ours_in_a_reader_is_not_taken_for_one_of_the_data():
    batches = evaluation_batches(
        Broken(KeyError("a mistake")), sequence_length=8, global_batch=8, rows=np.arange(8), num_batches=None
    )
    with pytest.raises(Exception, match="a mistake") as caught:
        list(batches)
    assert not isinstance(caught.value, DataError)


@pytest.mark.slow
def test_an_unfinished_iterator_can_be_closed_and_does_not_keep_the_process():
    script = """
import numpy as np
from input_pipeline.batches import importing_tensorflow, training_batches
from input_pipeline.synthetic import MarkovWindows
from tests.input_pipeline.memory import mixture_of_one
arguments = dict(seed=0, sequence_length=64, global_batch=4, rows=np.arange(4), first_example=0, num_steps=10**12)
closed, kept = (training_batches(mixture_of_one(MarkovWindows(16, 0, 10**6, "train")), **arguments) for _ in range(2))
for iterator in (closed, kept):
    next(iterator), next(iterator), importing_tensorflow().result(), next(iterator)
closed.close()
print("done")
"""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, env=bare, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
