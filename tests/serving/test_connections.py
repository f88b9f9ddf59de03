# SPDX-License-Identifier: Apache-2.0
"""A client that keeps the server waiting loses its connection, and what it had there is free again."""

import asyncio
import contextlib
import socket
import time
import types
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("uvicorn", reason="needs the packages of `make setup EXTRAS=serve`")

from starlette.responses import PlainTextResponse

from serving import connections
from serving.server import Server
from serving.text import EventStream

SECONDS = 0.3  # that a client has
WHOLE = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nab"


@contextlib.asynccontextmanager
async def serving(app, grace_seconds: int = 1, end_requests=lambda: None) -> AsyncIterator[tuple[str, int]]:
    """Serve an application on an address of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(app, grace_seconds, lambda: False, end_requests)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield listener.getsockname()
        server.should_exit = True
        await task


async def is_cut(reader: asyncio.StreamReader) -> bool:
    """Return whether the server ends the connection, without an answer."""
    with contextlib.suppress(ConnectionResetError):
        return await asyncio.wait_for(reader.read(), 10) == b""
    return True


@pytest.mark.parametrize("sent", [b"", WHOLE[:9], WHOLE[:-1]], ids=["nothing", "half a head", "half a body"])
def test_a_request_that_does_not_come_to_its_end_is_cut_and_a_slow_answer_is_not(monkeypatch, sent):
    monkeypatch.setattr(connections, "MOST_SECONDS", SECONDS)

    async def app(scope, receive, send):
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.request":
            await asyncio.sleep(3 * SECONDS)
            await PlainTextResponse("done")(scope, receive, send)

    async def ask():
        async with serving(app) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(WHOLE)
            assert await reader.readuntil(b"done")
            writer.write(sent)  # as a next request, and as the first one of a connection
            other_reader, other_writer = await asyncio.open_connection(*address)
            other_writer.write(sent)
            assert await is_cut(reader) and await is_cut(other_reader)
            writer.close()
            other_writer.close()

    asyncio.run(ask())


def test_a_long_answer_that_is_read_slowly_arrives_whole(monkeypatch):
    monkeypatch.setattr(connections, "MOST_SECONDS", 1.0)  # in which more is read than the sockets hold

    async def app(scope, receive, send):
        await PlainTextResponse("x" * 20_000_000)(scope, receive, send)

    async def ask():
        async with serving(app) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(WHOLE)
            began, size = time.monotonic(), 0
            while size < 20_000_000:
                size += len(part := await reader.read(400_000))
                assert part, f"cut after {size:,} bytes"
                await asyncio.sleep(max(0.0, began + size / 6_000_000 - time.monotonic()))
            assert time.monotonic() - began > 3.0
            writer.close()

    asyncio.run(ask())


def test_a_stream_that_is_not_read_ends_its_job(monkeypatch):
    """Else its answers would keep their places, and others would get the error that the server is busy."""
    monkeypatch.setattr(connections, "MOST_SECONDS", SECONDS)

    async def endless():
        while True:
            yield "x" * 100_000
            await asyncio.sleep(0)

    async def ask():
        closed = asyncio.Event()

        async def app(scope, receive, send):
            await EventStream(endless(), types.SimpleNamespace(close=closed.set))(scope, receive, send)

        async with serving(app) as address:
            _, writer = await asyncio.open_connection(*address, limit=1 << 10)
            writer.write(WHOLE)
            began = time.monotonic()
            await asyncio.wait_for(closed.wait(), 20)
            assert time.monotonic() - began >= SECONDS
            writer.close()

    asyncio.run(ask())


def test_requests_that_run_at_the_end_of_the_grace_period_have_time_for_their_error():
    async def ask():
        begun, ended = asyncio.Event(), asyncio.Event()

        async def app(scope, receive, send):
            begun.set()
            await ended.wait()
            await PlainTextResponse("ask again", 503)(scope, receive, send)

        async with serving(app, 0, ended.set) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(WHOLE)
            await begun.wait()
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        writer.close()

    asyncio.run(ask())
