# SPDX-License-Identifier: Apache-2.0
"""Does serve.py answer right under load? 200 requests of 16 concurrent `openai` clients; needs EXTRAS=serve.

Requests have random lengths; some are cancelled and some are wrong. Each answer is compared with the engine alone, in
this process, at temperature 0. A client repeats a request only if the server says that it is busy (status 429 or 503).
Any other error is a lost answer. None may be wrong or lost, and the server's memory may not grow after the first 50.
"""

import concurrent.futures
import contextlib
import dataclasses
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import support

from core import command_line  # noqa: F401, which chooses the platform before jax is imported

import httpx2
import openai

from inference.batching import Batch
from inference.choice import Sampling
from inference.engine import Engine
from inference.prompts import text_prompt
from parallelism.mesh import mesh_context
from trained_run import TrainedRun, open_run

REQUESTS, CLIENTS = (60 if support.QUICK else 200), 16
SETTLED = 50  # requests after which memory may not grow
LIMIT_MB = 20.0
BUSY, MOST_RETRIES, PAUSE_SECONDS = (429, 503), 300, 0.5
LENGTH = 256  # tokens of a row
KINDS = {"whole": 0.4, "stream": 0.3, "cancelled": 0.15, "wrong": 0.15}
WRONG = (
    {"max_tokens": LENGTH + 1}, {"temperature": "hot"}, {"n": 0}, {"extra_body": {"temprature": 1}}, {"prompt": []}
)  # fmt: skip
KEYS = support.QUIET | {
    "model.num_layers": 2, "model.embed_dim": 64, "model.num_heads": 2, "model.num_kv_heads": 2, "model.mlp_dim": 96,
    "model.vocab_size": 256, "model.max_length": LENGTH, "train.sequence_length": 64, "train.global_batch": 8,
    "train.steps": 40, "data.tokenizer": "byte", "optimizer.learning_rate": 0.01, "optimizer.warmup_steps": 2,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request: what kind, the prompt, the most tokens, and after how many parts it is cancelled."""

    kind: str
    prompt: str
    max_tokens: int
    parts: int
    changes: dict


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a request: whether it is right, the seconds to the first part of a stream, and repetitions.

    `lost` is the error by which there is no answer, "" if there is one.
    """

    ask: Ask
    right: bool
    first: float | None = None
    retries: int = 0
    lost: str = ""


def asks(count: int, length: int, seed: int = 0) -> list[Ask]:
    """Return random requests that fit in `length` tokens, a byte each."""
    rng = random.Random(seed)
    kinds = rng.choices(list(KINDS), list(KINDS.values()), k=count)
    sizes = [(rng.randint(1, length // 2), rng.randint(1, length // 3)) for _ in kinds]
    return [
        Ask(
            kind, "".join(rng.choices("0123456789 is times;\n", k=size)), most, rng.randint(1, 8),
            rng.choice(WRONG) if kind == "wrong" else {},
        )
        for kind, (size, most) in zip(kinds, sizes, strict=True)
    ]  # fmt: skip


def expected(trained: TrainedRun, given: Sequence[Ask], length: int) -> list[str]:
    """Return the greedy continuation of each, by the engine alone."""
    tokenizer = trained.tokenizer
    prompts = [text_prompt(tokenizer, ask.prompt) for ask in given]
    with mesh_context(trained.run.mesh):
        batch = Batch(Engine(trained.run.graph, trained.params, length), num_rows=4, vocab_size=tokenizer.vocab_size)
        done = batch.run([
            prompt.request(ask.max_tokens, Sampling(temperature=0.0))
            for prompt, ask in zip(prompts, given, strict=True)
        ])  # fmt: skip
    streams = [prompt.text(tokenizer) for prompt in prompts]
    return ["".join([*map(stream.add, one.tokens), stream.end()]) for stream, one in zip(streams, done, strict=True)]


def while_busy(send: Callable, **given) -> tuple:
    """Return (the result of `send`, repetitions); repeat while the server is busy. Raises its other errors."""
    for retries in range(MOST_RETRIES):
        try:
            return send(**given), retries
        except openai.APIStatusError as error:
            if error.status_code not in BUSY:
                raise
        time.sleep(PAUSE_SECONDS)
    return send(**given), MOST_RETRIES


def answered(client: openai.OpenAI, ask: Ask, text: str) -> Outcome:
    """Return what came of a request, which may be lost."""
    try:
        return outcome(client, ask, text)
    except (openai.OpenAIError, httpx2.HTTPError) as error:
        print(f"lost: {ask.kind}: {error!r}", flush=True)
        return Outcome(ask, False, lost=repr(error))


def outcome(client: openai.OpenAI, ask: Ask, text: str) -> Outcome:
    """Send a request; compare its answer with `text`. Raises what the client raises for another one than expected."""
    models, retries = while_busy(client.models.list)
    given = {"model": models.data[0].id, "prompt": ask.prompt, "max_tokens": ask.max_tokens}
    given |= {"temperature": 0} | ask.changes
    create = client.completions.create
    if ask.kind == "wrong":
        try:
            _, more = while_busy(create, **given)
        except openai.BadRequestError as error:
            return Outcome(ask, set(error.body) == {"message", "type", "param", "code"}, retries=retries)
        return Outcome(ask, False, retries=retries + more)
    if ask.kind == "whole":
        answer, more = while_busy(create, **given)
        return Outcome(ask, answer.choices[0].text == text, retries=retries + more)
    start, first, parts = time.perf_counter(), None, []
    stream, more = while_busy(create, **given, stream=True)
    with stream:
        for part in stream:
            parts += [choice.text for choice in part.choices]
            first = first or time.perf_counter() - start
            if ask.kind == "cancelled" and len(parts) >= ask.parts:
                break
    said = "".join(parts)
    right = text.startswith(said) if ask.kind == "cancelled" else said == text
    return Outcome(ask, right, first, retries + more)


def load(
    url: str, given: Sequence[Ask], texts: Sequence[str], clients: int, done: Callable[[int], None] = lambda count: None
) -> list[Outcome]:
    """Send all requests by some concurrent clients; `done` gets the number of requests that have ended."""
    found = []
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(clients) as pool:
        connected = [
            stack.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
            for _ in range(clients)
        ]
        futures = [
            pool.submit(answered, connected[index % clients], ask, text)
            for index, (ask, text) in enumerate(zip(given, texts, strict=True))
        ]
        for future in concurrent.futures.as_completed(futures):
            found.append(future.result())
            done(len(found))
    return found


def memory_mb(pid: int) -> float:
    """Return the resident memory of a process."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def main() -> None:
    """Train, serve, load, compare."""
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder, "run")
        support.train(KEYS | {"data.path": support.write_texts(pathlib.Path(folder), 40)}, workdir=workdir)
        given = asks(REQUESTS, LENGTH)
        answers = expected(open_run(workdir), given, LENGTH)
        memory = {}
        with support.served(workdir) as (pid, url):
            start = time.perf_counter()
            found = load(url, given, answers, CLIENTS, lambda count: memory.update({count: memory_mb(pid)}))
            seconds = time.perf_counter() - start
    firsts = sorted(one.first for one in found if one.first is not None)
    lost = sum(bool(one.lost) for one in found)
    wrong = sum(not one.right for one in found) - lost
    growth = max(value for count, value in memory.items() if count >= SETTLED) - memory[SETTLED]
    figures = {
        "requests": len(found), "clients": CLIENTS, "lost": lost, "wrong": wrong,
        "retries": sum(one.retries for one in found),
        "cancelled": sum(one.ask.kind == "cancelled" for one in found),
        "bad_requests": sum(one.ask.kind == "wrong" for one in found),
        "growth_after_50_mb": round(growth, 1), "seconds": round(seconds, 1),
        "first_token_median_ms": round(1000 * statistics.median(firsts)),
        "first_token_95th_percentile_ms": round(1000 * statistics.quantiles(firsts, n=20)[-1]),
    }  # fmt: skip
    support.finish("serving", figures)
    if wrong or lost or growth > LIMIT_MB:
        sys.exit("serving: an answer is wrong or lost, or memory grows")


if __name__ == "__main__":
    main()
