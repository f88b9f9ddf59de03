# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods in batches are those of a full forward pass of each sequence, on one device and on a mesh."""

import dataclasses

import jax
import numpy as np
import pytest

from configs.errors import ConfigError
from inference.batching import Request
from inference.choice import Sampling
from inference.decoding import generate
from input_pipeline.tokenization import ByteTokenizer
from parallelism import axis_rules
from parallelism.mesh import make_mesh, mesh_context
from scoring import likelihood
from scoring.likelihood import LanguageModel, Row, log_likelihoods
from tests.support import TOLERANCE, forward, make_model, model_config, one_device_mesh

V, LONGEST = 256, 100
RNG = np.random.default_rng(0)
LENGTHS = [(1, 1), (5, 3), (60, 2), (3, 60), (33, 33), (1, 100), (99, 1), (20, 12), (200, 4)]
ROWS = [Row(*(RNG.integers(0, V, size).tolist() for size in sizes)) for sizes in LENGTHS]


def language_model(**changes) -> LanguageModel:
    graph, params = make_model(model_config(vocab_size=V, max_length=LONGEST, logit_soft_cap=5.0))
    model = LanguageModel(graph, params, one_device_mesh(), ByteTokenizer(), (0,), LONGEST, tokens_per_batch=256)
    return dataclasses.replace(model, **changes)


def expected(model: LanguageModel, row: Row) -> float:
    """Return the log-likelihood of the continuation by the logits of a forward pass of one row, padded to LONGEST."""
    inputs = [*row.context, *row.continuation[:-1]][-LONGEST:]
    index = np.arange(LONGEST)[None]
    padded = np.array([inputs + [0] * (LONGEST - len(inputs))])
    batch = {"tokens": padded, "positions": index, "segments": (index < len(inputs)).astype(np.int32)}
    logits = np.asarray(forward(model.graph, model.params, batch), np.float64)[0, : len(inputs)]
    logits = logits[-len(row.continuation) :]
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return float(logits[np.arange(len(row.continuation)), row.continuation].sum())


def test_values_are_those_of_full_forward_passes_in_the_order_of_the_rows():
    model = language_model()
    found = log_likelihoods(model, ROWS)
    for row, one in zip(ROWS, found, strict=True):
        assert one.value == pytest.approx(expected(model, row), rel=TOLERANCE["float32"])
    assert not any(one.is_greedy for one in found)


def test_a_continuation_is_greedy_if_decoding_gives_it():
    model = language_model()
    request = Request([1, 2, 3], 6, Sampling(temperature=0.0))
    [decoded] = generate(model.graph, model.params, [request], vocab_size=V)
    changed = [*decoded[:-1], (decoded[-1] + 1) % V]
    found = log_likelihoods(model, [Row([1, 2, 3], decoded), Row([1, 2, 3], changed), Row([1, 2, 3], decoded[:1])])
    assert [one.is_greedy for one in found] == [True, False, True]


def test_on_a_mesh_values_are_those_of_one_device():
    sizes = {"dcn_data": 1, "data": 2, "fsdp": 1, "context": 2, "expert": 1, "model": 2}
    alone, mesh = language_model(), make_mesh(sizes)
    rows = ROWS[:6]
    with mesh_context(mesh):
        found = log_likelihoods(dataclasses.replace(alone, mesh=mesh), rows)
    for row, one in zip(rows, found, strict=True):
        assert one.value == pytest.approx(expected(alone, row), rel=TOLERANCE["float32"])
    assert axis_rules.batch_sharding(mesh).spec and len(jax.devices()) == 8


def test_few_shapes_are_compiled_and_batches_are_reported_before_they_run():
    reported = []
    model = language_model(on_batch=lambda *batch: reported.append(batch))
    before = likelihood._token_likelihoods._cache_size()
    rows = [Row([1] * length, [2] * count) for length in range(1, 90, 7) for count in (1, 9, 40)]
    log_likelihoods(model, rows)
    assert likelihood._token_likelihoods._cache_size() - before <= 2 * 3  # buckets of 32, 64 and 128 tokens
    total = reported[0][2]
    assert reported == [("log-likelihoods", done, total) for done in range(total)]


def test_a_continuation_that_no_input_holds_is_refused():
    with pytest.raises(ConfigError, match=r"^a continuation of 101 tokens exceeds model.max_length=100; shorten it$"):
        log_likelihoods(language_model(), [Row([1], [2] * 101)])
