# SPDX-License-Identifier: Apache-2.0
"""Packing and windows over documents of any lengths, in shards of any lengths, against a slow reference."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from input_pipeline.packing import KEYS
from input_pipeline.shards import TokenWindows

EOD = 0
DOCUMENTS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=12)
LENGTHS = st.integers(1, 17)


def windows_of(documents, cuts=()):
    """Return the documents as windows, in shards cut at the given places."""
    stream = np.array([token for document in documents for token in [*document, EOD]], np.uint16)
    starts = np.cumsum([0] + [len(document) + 1 for document in documents[:-1]])
    shards = np.split(stream, sorted({cut % len(stream) for cut in cuts} - {0}))
    return TokenWindows(shards, starts, num_bytes=0, end_of_document=EOD)


def everything(windows, length):
    return windows.read(np.arange(windows.num_examples(length)), length)


@given(documents=DOCUMENTS, length=LENGTHS, cuts=st.lists(st.integers(0, 200), max_size=4))
def test_every_stored_token_is_a_target_exactly_once(documents, length, cuts):
    windows = windows_of(documents, cuts)
    batch = everything(windows, length)
    stored = [token for document in documents for token in [*document, EOD]]
    real = batch["segments"] > 0
    assert batch["targets"][real].tolist() == stored
    assert windows.num_tokens == len(stored) and windows.num_documents == len(documents)
    assert not real.ravel()[len(stored) :].any()
    assert all(not batch[key][~real].any() for key in KEYS)


@given(documents=DOCUMENTS, length=LENGTHS)
def test_packed_is_unpacked(documents, length):
    """Each segment holds one run of one document, read as [EOD, tokens...] -> [tokens..., EOD]."""
    batch = everything(windows_of(documents), length)
    runs = []
    for row in range(len(batch["tokens"])):
        for segment in range(1, batch["segments"][row].max() + 1):
            at = np.flatnonzero(batch["segments"][row] == segment)
            assert batch["positions"][row, at].tolist() == list(range(len(at)))
            runs.append((at[0] == 0, batch["tokens"][row, at].tolist(), batch["targets"][row, at].tolist()))
    inputs, targets = [], []
    for first_in_window, tokens, following in runs:
        if not (first_in_window and targets and targets[-1][-1:] != ["end"]):
            inputs.append([])
            targets.append([])
        inputs[-1] += tokens
        targets[-1] += following
        done = len(targets[-1]) == len(documents[len(targets) - 1]) + 1
        targets[-1] += ["end"] if done else []
    assert inputs == [[EOD, *document] for document in documents]
    assert targets == [[*document, EOD, "end"] for document in documents]


@given(documents=DOCUMENTS, length=LENGTHS, cuts=st.lists(st.integers(0, 200), max_size=4), data=st.data())
def test_any_rows_in_any_order_are_the_same_rows(documents, length, cuts, data):
    windows = windows_of(documents, cuts)
    indices = data.draw(st.lists(st.integers(0, windows.num_examples(length) - 1), max_size=5))
    whole, some = everything(windows_of(documents), length), windows.read(np.array(indices, np.int64), length)
    for key in KEYS:
        assert some[key].dtype == np.int32 and some[key].shape == (len(indices), length)
        assert np.array_equal(some[key], whole[key][indices])


@given(documents=DOCUMENTS, length=LENGTHS, cuts=st.lists(st.integers(0, 200), max_size=4))
def test_pieces_are_the_segments_of_a_window_and_say_where_they_stand_in_their_documents(documents, length, cuts):
    windows = windows_of(documents, cuts)
    batch, found = everything(windows, length), []
    for index, (targets, segments) in enumerate(zip(batch["targets"], batch["segments"], strict=True)):
        filled = np.zeros(length, np.int32)
        for document, segment, first, count, offset in windows.pieces(index, length):
            assert count > 0 and not filled[first : first + count].any()
            filled[first : first + count] = segment
            stored = [*documents[document], EOD][offset : offset + count]
            assert targets[first : first + count].tolist() == stored
            found += [(document, offset + place) for place in range(count)]
        assert filled.tolist() == segments.tolist()
    assert found == [(number, place) for number, one in enumerate(documents) for place in range(len(one) + 1)]


def test_a_window_written_out():
    batch = everything(windows_of([[5, 6, 7], [8]]), 4)
    assert batch["tokens"].tolist() == [[0, 5, 6, 7], [0, 8, 0, 0]]
    assert batch["targets"].tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]]
    assert batch["segments"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert everything(windows_of([[5, 0], [8]]), 5)["segments"].tolist() == [[1, 1, 1, 2, 2]]
