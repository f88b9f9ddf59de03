# SPDX-License-Identifier: Apache-2.0
"""Connections of clients, which end if a client keeps the server waiting."""

import asyncio
from collections.abc import Callable

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_SECONDS = 30.0  # for a whole request, and until a client reads more of an answer


class Limit:
    """Calls a function MOST_SECONDS after a `begin`, unless `end` comes before."""

    def __init__(self, function: Callable[[], None]):
        self._function, self._timer = function, None

    def begin(self) -> None:
        """Begin to wait, if it does not wait already; needs a running event loop."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MOST_SECONDS, self._pass)

    def end(self) -> None:
        """Wait no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _pass(self) -> None:
        self._timer = None
        self._function()


class Connection(H11Protocol):
    """HTTP on a connection; it is cut if a request does not come to its end, or an answer is not read, in time.

    The application then sees that the client has disconnected, and frees the places of its answers.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        self._of_request, self._of_answer = Limit(self._look_at_request), Limit(self._look_at_reader)
        self._of_request.begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._of_request.end()
        self._of_answer.end()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Take what has come; wait for the rest of a request, or for the next one."""
        super().handle_events()
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._of_request.begin()
        else:
            self._of_request.end()

    def pause_writing(self) -> None:
        """Wait until the client has read what was sent."""
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._of_answer.begin()

    def resume_writing(self) -> None:
        """Send more."""
        super().resume_writing()
        self._of_answer.end()

    def _look_at_request(self) -> None:
        """Cut the connection, unless the answer to the request before is still being read."""
        if self.transport.get_write_buffer_size():
            self._of_request.begin()
        else:
            self.transport.abort()

    def _look_at_reader(self) -> None:
        """Cut the connection if the client has read nothing of a long answer since the last look."""
        before, self._unread = self._unread, self.transport.get_write_buffer_size()
        if self._unread < before:
            self._of_answer.begin()
        else:
            self.transport.abort()
