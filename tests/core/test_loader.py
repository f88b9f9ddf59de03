# SPDX-License-Identifier: Apache-2.0
"""A caller's loader gives each run the rows that follow those it has seen, and mistakes in it are one line."""

import types

import numpy as np
import pytest

from cluster import processes
from configs.errors import ConfigError
from core import loader as loaders
from core.loader import Loader, LoaderLoss, as_ours

JOB = types.SimpleNamespace(stages=types.SimpleNamespace(rows=2))


def batches(count=20, rows=2, length=4):
    return [{"tokens": np.full((rows, length), n), "targets": np.full((rows, length), n)} for n in range(count)]


def firsts(loader, count):
    return [int(next(loader)["tokens"][0, 0]) for _ in range(count)]


def test_a_second_run_of_a_loader_goes_on_where_the_first_stopped():
    """A notebook calls the same trainer again after Ctrl-C; one batch was read ahead and never used."""
    loader = Loader(batches())
    loader.on_start(JOB, None)
    assert firsts(loader, 5) == [0, 1, 2, 3, 4]
    loader.on_start(JOB, {"examples": 8})
    assert firsts(loader, 3) == [4, 5, 6]


def test_loaders_that_differ_between_processes_are_refused(monkeypatch):
    """Each process takes its share of the rows, so of a sampler for one process most rows would never be read."""
    given = []

    def gathered(topic, value):
        given.append(value)
        return given[-2:]

    monkeypatch.setattr(processes, "gather", gathered)
    Loader(batches()).on_start(JOB, None)
    Loader(batches()).on_start(JOB, None)
    with pytest.raises(ConfigError, match=r"process 0.* differ in the first batch of their loaders: checksum is"):
        Loader(batches()[1:]).on_start(JOB, None)
    with pytest.raises(ConfigError, match=r"differ in the rows of eval_loader: amount is 0 on process 1, 1 on process"):
        loaders._same_everywhere([])


def test_what_can_be_read_once_serves_one_run():
    loader = Loader(iter(batches()))
    loader.on_start(JOB, None)
    assert firsts(loader, 2) == [0, 1]
    with pytest.raises(ConfigError, match="the loader can be read only once; give a list or a data loader"):
        loader.on_start(JOB, {"examples": 4})
    with pytest.raises(ConfigError, match="eval_loader can be read only once"):
        LoaderLoss(4, iter(batches()))


def test_rows_of_several_lengths_are_refused_by_their_lengths():
    loader = Loader([*batches(1, rows=1), *batches(1, rows=1, length=5)])
    loader.on_start(JOB, None)
    with pytest.raises(ConfigError, match="a loader has rows of 4 and 5 tokens; pad them to one length"):
        next(loader)


def test_a_loader_without_rows_ends_and_ids_are_integers():
    with pytest.raises(ConfigError, match="the loader has no rows, or can be read only once"):
        next(Loader([{"input_ids": np.zeros((0, 4), int)}])._rows)
    with pytest.raises(ConfigError, match="a batch has tokens of float64; ids are integers"):
        Loader([{"input_ids": np.random.random((2, 4))}])
    assert Loader([{"epoch": 3, "input_ids": np.ones((2, 4), int)}]).length == 4


@pytest.mark.parametrize("kind", [np.int64, np.uint64, np.uint32])
def test_ids_that_32_bits_do_not_hold_are_refused_and_not_wrapped(kind):
    with pytest.raises(ConfigError, match="a batch has 4294967291 in tokens; numbers are from -2147483648 to 2"):
        Loader([{"input_ids": np.full((2, 4), 2**32 - 5, kind), "attention_mask": np.ones((2, 4), bool)}])
    assert Loader([{"input_ids": np.ones((2, 4), kind)}]).length == 4


def test_rows_of_a_dataset_are_no_batches():
    with pytest.raises(ConfigError, match=r"input_ids of shape \[3\]; it needs \[rows, length\]"):
        Loader([{"input_ids": [1, 2, 3]}])
    for batch, said in (
        (([[1, 2]], [[2, 3]]), "a batch is a tuple; it needs to be a dictionary"),
        ({"input_ids": [[1, 2], [3]]}, "input_ids with rows of several lengths; pad them"),
        ({"tokens": [[1, 2]] * 2, "targets": [[2, 3]]}, r"targets of shape \[1, 2\]; it needs \[2, 2\] as the ids"),
        ({"tokens": [[1]], "targets": [[2]], "attention_mask": [[1]]}, "attention_mask without input_ids; leave it"),
    ):
        with pytest.raises(ConfigError, match=said):
            Loader([batch])
    with pytest.raises(ConfigError, match=r"a Loader gives batches only within a run: train\.train"):
        next(Loader(batches()))


def test_documents_in_a_row_of_input_ids_stay_apart():
    ids = np.array([[5, 6, 7, 8, 9, 0]])
    packed = {"input_ids": ids, "segments": [[1, 1, 1, 2, 2, 2]], "position_ids": [[0, 1, 2, 0, 1, 2]]}
    found = as_ours(packed | {"attention_mask": [[1, 1, 1, 1, 1, 0]]})
    assert found["segments"].tolist() == [[1, 1, 1, 2, 2, 0]] and found["positions"].tolist() == [[0, 1, 2, 0, 1, 2]]
    assert found["targets"].tolist() == [[6, 7, -1, 9, -1, -1]], "no token follows one of another document"
    alone = as_ours({name: packed[name] for name in ("input_ids", "position_ids")})  # as of DataCollatorWithFlattening
    assert alone["segments"].tolist() == packed["segments"] and alone["targets"].tolist() == [[6, 7, -1, 9, 0, -1]]
    within = as_ours({"input_ids": ids, "position_ids": [[2, 3, 4, 0, 1, 2]]})  # of a row that begins in a document
    assert within["segments"].tolist() == packed["segments"]
    ours = {"tokens": ids, "targets": ids, "labels": [1]}  # the last is not read
    assert as_ours(ours)["segments"].tolist() == [[1] * 6]


def test_a_batch_of_other_shapes_is_one_line():
    with pytest.raises(ConfigError, match=r"tokens of shape \[3\]; it needs \[rows, length\]"):
        Loader([{"tokens": [1, 2, 3], "targets": [2, 3, 4]}])
    ids = np.ones((1, 4), np.int32)
    for mask in (np.full((1, 4), 0.5), np.full((1, 4), np.nan)):
        with pytest.raises(ConfigError, match="a batch has attention_mask with numbers that are not whole"):
            Loader([{"input_ids": ids, "attention_mask": mask, "labels": ids}])
    assert Loader([{"input_ids": ids, "attention_mask": np.ones((1, 4))}]).length == 4
    with pytest.raises(ConfigError, match="a batch has attention_mask of <U1; it needs numbers"):
        Loader([{"input_ids": ids, "attention_mask": np.full((1, 4), "1")}])


class Weighs:
    """An objective's figures as a step would report them: a sum and its weight."""

    def __init__(self, weight):
        self.weight = weight

    def run(self):
        objective = types.SimpleNamespace(summary=lambda figures: figures)
        step = lambda params, batch, frozen: {"loss": (3.0, self.weight)}  # noqa: E731
        config = types.SimpleNamespace(model=types.SimpleNamespace(vocab_size=20, max_length=4))
        return types.SimpleNamespace(
            batch_sharding=None, eval_rows=2, eval_step=step, objective=objective, config=config
        )  # fmt: skip


@pytest.mark.parametrize(("weight", "expected"), [(2.0, 1.5), (0.0, np.nan)])
def test_a_mean_over_no_labels_is_no_perfect_loss(monkeypatch, weight, expected):
    monkeypatch.setattr("core.loader.place", lambda batches, sharding, rows: batches)
    monkeypatch.setattr("core.loader.local_rows", lambda sharding, rows: slice(None))
    context = types.SimpleNamespace(run=Weighs(weight).run(), params=None, frozen=None, stop=lambda: False)
    np.testing.assert_equal(LoaderLoss(4, batches(1)).evaluate(context), {"loss": expected})
    with pytest.raises(ConfigError, match="eval_loader has no batches"):
        LoaderLoss(4, []).evaluate(context)
    with pytest.raises(ConfigError, match=r"eval_loader has rows of 5 tokens, more than model\.max_length=4"):
        list(LoaderLoss(4, batches(1, length=5))._local(context.run))
