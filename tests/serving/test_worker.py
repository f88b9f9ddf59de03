# SPDX-License-Identifier: Apache-2.0
"""A worker decodes as the batch alone does, in its thread, and compiles nothing once it is ready."""

import asyncio
import functools

import pytest

from inference import batching
from inference.batching import Request
from inference.choice import Sampling
from parallelism.mesh import mesh_context
from serving.worker import Job, Worker
from tests.inference.test_batching import GREEDY, LENGTH, alone, batch_of, prompts

SECONDS = 20  # for a job, before it counts as lost
PROGRAMS = (batching.decode, batching.extend, batching._copy)


@pytest.fixture(scope="module")
def worker(one_device):
    """A worker with three rows."""
    worker = Worker(functools.partial(batch_of, 3), functools.partial(mesh_context, one_device))
    yield worker
    worker.stop()


async def tokens_of(worker: Worker, requests: list[Request], cancelled: tuple[int, ...] = ()) -> list[list[int]]:
    """Return the tokens of each request; some are cancelled after their first update."""
    job, found, left = Job(worker, requests), [[] for _ in requests], len(requests)
    while left:
        update = await job.next()
        found[update.index] += update.tokens
        if update.index in cancelled:
            job.cancel(update.index)
        left -= bool(update.reason) or update.index in cancelled
    job.close()
    return found


def test_jobs_have_the_tokens_of_each_alone_and_compile_nothing(worker):
    before = [program._cache_size() for program in PROGRAMS]
    asked = prompts([1, 16, 17, 40, 70, 3, 33, LENGTH - 6])
    requests = [Request(prompt, 6, GREEDY) for prompt in asked]

    async def both():
        jobs = tokens_of(worker, requests), tokens_of(worker, requests[::-1], cancelled=(2, 5))
        return await asyncio.wait_for(asyncio.gather(*jobs), SECONDS)

    first, second = asyncio.run(both())
    expected = [alone(prompt, 6)[0] for prompt in asked]
    assert first == expected
    for index, (tokens, wanted) in enumerate(zip(second, expected[::-1], strict=True)):
        assert tokens == (wanted[: len(tokens)] if index in (2, 5) else wanted)
    drawn = asyncio.run(tokens_of(worker, [Request(asked[3], 4, Sampling(top_p=0.5, seed=seed)) for seed in range(4)]))
    assert len(drawn) == 4
    assert [program._cache_size() for program in PROGRAMS] == before
    assert worker.in_flight == 0 and not worker.batch.running and not worker.batch.waiting


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_batch_that_cannot_be_made_is_an_error_and_no_server_that_waits_for_ever(one_device):
    def make_batch():
        raise MemoryError("the cache needs 40 GiB")

    with pytest.raises(RuntimeError, match="ended before it was ready"):
        Worker(make_batch, functools.partial(mesh_context, one_device))
