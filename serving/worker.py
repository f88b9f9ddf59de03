# SPDX-License-Identifier: Apache-2.0
"""The thread that owns a batch: requests come to it through a queue, and their tokens go back to the event loop."""

import asyncio
import concurrent.futures
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from inference.batching import Batch, Continuation, Request
from serving.errors import ENDING, ApiError, ending

FAILED = "failed"  # the reason of an update that ends a request because the thread has met an error


class Update(NamedTuple):
    """New tokens of the request `index` of a job.

    `reason` is a continuation's, or FAILED or ENDING; "" while it goes on.
    """

    index: int
    tokens: list[int]
    log_probs: list[float]
    tops: list[dict[int, float]]
    reason: str


@dataclasses.dataclass(eq=False)
class Part:
    """A request of a job; `num_sent` of its tokens were sent to the event loop."""

    request: Request
    send: Callable[[list[int], list[float], list[dict[int, float]], str], None]
    continuation: Continuation | None = None
    num_sent: int = 0
    ended: bool = False


class Job:
    """Requests that are decoded for one client; belongs to the event loop."""

    def __init__(self, worker: "Worker", requests: Sequence[Request]):
        """Queue the requests."""
        self._worker, self._updates, loop = worker, asyncio.Queue(), asyncio.get_running_loop()

        def send(index: int, *new) -> None:
            loop.call_soon_threadsafe(self._updates.put_nowait, Update(index, *new))

        self._parts = [Part(request, functools.partial(send, index)) for index, request in enumerate(requests)]
        worker.in_flight += len(self._parts)
        for part in self._parts:
            worker.call(functools.partial(worker.add, part))

    async def next(self) -> Update:
        """Return the next update of a request that goes on; ApiError if the worker has failed or ends."""
        while True:
            update = await self._updates.get()
            if update.reason == FAILED:
                raise ApiError(500, "the server failed and ends; its last line says why", code=FAILED)
            if update.reason == ENDING:
                raise ending()
            if not self._parts[update.index].ended:
                if update.reason:
                    self._end(self._parts[update.index])
                return update

    def cancel(self, index: int) -> None:
        """End a request and free its row, if it goes on."""
        part = self._parts[index]
        if not part.ended:
            self._end(part)
            self._worker.call(functools.partial(self._worker.cancel, part))

    def close(self) -> None:
        """End all requests that go on."""
        for index in range(len(self._parts)):
            self.cancel(index)

    def _end(self, part: Part) -> None:
        part.ended = True
        self._worker.in_flight -= 1


class Worker:
    """A thread that steps a batch while there are requests.

    Attributes:
      in_flight: requests that have not ended; belongs to the event loop.
      batch: belongs to the thread; others may only look.
      has_failed: whether the thread has met an error. Then it ends all requests, and waits for `stop`, which raises it.
    """

    def __init__(self, make_batch: Callable[[], Batch], mesh: Callable[[], AbstractContextManager]):
        """Start the thread, and return when all programs are compiled; raise the error that prevents it.

        Args:
          make_batch: called in the thread, in the mesh.
          mesh: returns the context of the mesh that the batch needs.
        """
        self.in_flight = 0
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._parts: dict[Continuation, Part] = {}
        self._refusal = ""  # FAILED or ENDING, once no request is answered any more
        self.has_failed, self._stopping, ready = False, False, threading.Event()
        self._end = concurrent.futures.ThreadPoolExecutor(1, "decode").submit(self._run, make_batch, mesh, ready)
        while not ready.wait(timeout=0.1):
            if self.has_failed:
                self.stop()

    def call(self, function: Callable[[], None]) -> None:
        """Have a function called in the thread."""
        self._calls.put(function)

    def end_requests(self) -> None:
        """End all requests, and later ones, because the server ends."""
        self.call(functools.partial(self._refuse, ENDING))

    def stop(self) -> None:
        """End the thread after its current step; raise the error that it has met."""
        self.call(functools.partial(setattr, self, "_stopping", True))
        self._end.result()

    def add(self, part: Part) -> None:
        """Add a request to the batch; in the thread."""
        if part.ended:
            return
        if self._refusal:
            part.send([], [], [], self._refusal)
            return
        part.continuation = self.batch.add(part.request)
        self._parts[part.continuation] = part

    def cancel(self, part: Part) -> None:
        """Cancel a request; in the thread."""
        if part.continuation and not self.has_failed:
            self.batch.cancel(part.continuation)
            self._parts.pop(part.continuation, None)

    def _run(self, make_batch, mesh, ready: threading.Event) -> None:
        try:
            self._work(make_batch, mesh, ready)
        finally:
            if not self._stopping:
                self.has_failed = True
                self._refuse(FAILED)
                while not self._stopping:  # so that no client waits for an answer that does not come
                    self._calls.get()()

    def _refuse(self, reason: str) -> None:
        """End all requests from now on; `reason` is FAILED or ENDING."""
        self._refusal = reason
        for part in self._parts.values():
            if not part.ended:
                part.send([], [], [], reason)

    def _work(self, make_batch, mesh, ready: threading.Event) -> None:
        with mesh():
            self.batch = make_batch()
            self.batch.compile()
            ready.set()
            while not self._stopping:
                if self.batch.running or self.batch.waiting:
                    self._step()
                else:
                    self._calls.get()()
                while not self._calls.empty():
                    self._calls.get()()

    def _step(self) -> None:
        """Step the batch, and send what is new."""
        for one in self.batch.step():
            part = self._parts[one]
            start, part.num_sent = part.num_sent, len(one.tokens)
            if one.reason:
                del self._parts[one]
            if not part.ended:  # else the event loop may be gone
                part.send(one.tokens[start:], one.log_probs[start:], one.tops[start:], one.reason)
