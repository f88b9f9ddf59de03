# SPDX-License-Identifier: Apache-2.0
"""A worker decodes as the batch alone does, in its thread, and compiles nothing once it is ready."""

import asyncio
import concurrent.futures
import contextlib
import functools
import time
import types

import pytest

pytest.importorskip("starlette", reason="needs the packages of `make setup EXTRAS=serve`")

from starlette.testclient import TestClient

from inference.batching import Batch, Request
from inference.choice import Sampling
from input_pipeline.chat.template import PlainFormat
from input_pipeline.tokenization import open_tokenizer
from parallelism.mesh import mesh_context
from puzzles import solving
from serving.app import make_app
from serving.errors import ApiError
from serving.puzzles import PuzzleService
from serving.text import TextService
from serving.worker import Job, Worker
from tests.inference.test_batching import GREEDY, LENGTH, V, alone, batch_of, engine, prompts
from tests.support import compilations

SECONDS = 20  # for a job, before it counts as lost


@pytest.fixture(scope="module")
def worker(one_device):
    """A worker with four rows, whose programs are those of tests/inference/test_batching.py."""
    worker = Worker(functools.partial(batch_of, 4), functools.partial(mesh_context, one_device))
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
    asked = prompts([1, 16, 17, 40, 70, 3, 33, LENGTH - 6])
    requests = [Request(prompt, 6, GREEDY) for prompt in asked]

    async def both():
        jobs = tokens_of(worker, requests), tokens_of(worker, requests[::-1], cancelled=(2, 5))
        return await asyncio.wait_for(asyncio.gather(*jobs), SECONDS)

    with compilations() as compiled:
        first, second = asyncio.run(both())
    expected = [alone(prompt, 6)[0] for prompt in asked]
    assert first == expected
    for index, (tokens, wanted) in enumerate(zip(second, expected[::-1], strict=True)):
        assert tokens == (wanted[: len(tokens)] if index in (2, 5) else wanted)
    requests = [Request(asked[3], 4, Sampling(top_p=0.5, seed=seed)) for seed in range(5)]
    with compilations() as of_draws:
        drawn = asyncio.run(tokens_of(worker, requests))
    assert len(drawn) == 5
    assert (
        not compiled
        and not of_draws
        and worker.in_flight == 0
        and not worker.batch.running
        and not worker.batch.waiting
    )


@pytest.mark.parametrize(
    ("path", "asked"),
    [("completions", {"prompt": ["a", "b"]}), ("chat/completions", {"messages": [{"role": "user", "content": "a"}]})],
)
def test_a_prompt_that_finds_no_room_is_refused_before_it_is_encoded(worker, monkeypatch, path, asked):
    """A long one takes time, also of the clients that are not refused."""
    tokenizer, encoded = open_tokenizer("byte"), []
    monkeypatch.setattr(type(tokenizer), "encode", lambda self, text: encoded.append(text) or [1])
    service = TextService("m", tokenizer, PlainFormat(), [], worker, max_waiting=0)
    client = TestClient(make_app(service, ""), base_url="http://localhost")
    monkeypatch.setattr(worker, "in_flight", 4)
    assert client.post(f"/v1/{path}", json=asked).status_code == 429
    assert client.post(f"/v1/{path}", json=asked | {"n": 5}).status_code == 400
    assert not encoded


def test_a_batch_that_cannot_be_made_is_an_error_and_no_server_that_waits_for_ever(one_device):
    def make_batch():
        raise MemoryError("the cache needs 40 GiB")

    with pytest.raises(MemoryError, match="the cache needs 40 GiB"):
        Worker(make_batch, functools.partial(mesh_context, one_device))


def test_requests_of_a_worker_that_fails_end_with_an_error_and_so_do_later_ones(one_device):
    """The first step succeeds, so that a request is running, and the second one fails."""

    class Failing(Batch):
        num_steps = 0

        def compile(self):
            """Leave it to the steps."""

        def step(self):
            self.num_steps += 1
            if self.num_steps > 1:
                raise FloatingPointError("planted")
            return super().step()

    make_batch = functools.partial(Failing, engine(), num_rows=1, vocab_size=V)
    worker = Worker(make_batch, functools.partial(mesh_context, one_device))
    running, waiting = (Request(prompt, 6, GREEDY) for prompt in prompts([3, 5]))

    async def ask():
        with pytest.raises(ApiError, match="the server failed and ends"):
            await asyncio.wait_for(tokens_of(worker, [running, waiting]), SECONDS)
        assert worker.has_failed
        with pytest.raises(ApiError, match="the server failed and ends"):
            await asyncio.wait_for(tokens_of(worker, [running]), SECONDS)

    asyncio.run(ask())
    with pytest.raises(FloatingPointError, match="planted"):
        worker.stop()


@pytest.mark.parametrize("prompt", ["a" * (LENGTH + 1), [1] * (LENGTH + 1)])
def test_a_prompt_that_is_too_long_is_refused_before_it_is_decoded(worker, monkeypatch, prompt):
    """Which would keep the event loop waiting."""
    tokenizer = open_tokenizer("byte")
    monkeypatch.setattr(type(tokenizer), "encode", lambda self, text: [1] * len(text))
    monkeypatch.setattr(type(tokenizer), "decode", lambda self, tokens: pytest.fail("decoded"))
    service = TextService("m", tokenizer, PlainFormat(), [], worker, max_waiting=0)
    client = TestClient(make_app(service, ""), base_url="http://localhost")
    answer = client.post("/v1/completions", json={"prompt": prompt})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_requests_that_go_on_when_the_server_ends_and_later_ones_end_with_an_error(one_device):
    worker = Worker(functools.partial(batch_of, 4), functools.partial(mesh_context, one_device))
    requests = [Request(prompt, LENGTH - 9, GREEDY) for prompt in prompts([3, 5])]

    async def ask():
        job = Job(worker, requests)
        await asyncio.wait_for(job.next(), SECONDS)
        worker.end_requests()
        for one in (job, Job(worker, requests[:1])):
            with pytest.raises(ApiError, match="the server ends; ask again") as raised:
                while True:
                    await asyncio.wait_for(one.next(), SECONDS)
            assert (raised.value.status, raised.value.code) == (503, "ending")
            one.close()

    asyncio.run(ask())
    worker.stop()
    assert worker.in_flight == 0 and not worker.has_failed and not worker.batch.running


def test_a_puzzle_that_is_in_work_when_the_server_ends_ends_with_an_error():
    def solve(tokens, steps, is_wanted):
        while steps > 1 and is_wanted():
            time.sleep(0.01)
        return [solving.Answer(tokens.ravel(), 0.0)]

    config = types.SimpleNamespace(
        data=types.SimpleNamespace(source="sudoku"), model=types.SimpleNamespace(max_length=16, vocab_size=6)
    )
    service = PuzzleService("m", config, solve, contextlib.nullcontext, 1)
    client, asked = TestClient(make_app(service, ""), base_url="http://localhost"), {"puzzle": "1...\n" + "....\n" * 3}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # one puzzle is solved and one waits
        post = functools.partial(client.post, "/v1/puzzles", json=asked | {"supervision_steps": 9})
        answers = [pool.submit(post) for _ in range(2)]
        deadline = time.monotonic() + SECONDS
        while service.in_flight < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        service.end_requests()
        assert {answer.result().status_code for answer in answers} == {503}
    service.stop()
