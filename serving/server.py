# SPDX-License-Identifier: Apache-2.0
"""Listens: a socket that is taken before the model is loaded, and a server that ends after its running requests."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from cluster.secret import FEWEST_CHARACTERS, READABLE_BY_OTHERS
from configs.errors import ConfigError, shown
from files.paths import expanded
from serving.connections import Connection

KEY_VARIABLE = "TORUS_API_KEY"
LAST_SECONDS = 5  # after the grace period, for the errors of requests that did not finish
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; clients that come early wait until the server is ready.

    Raises:
      ConfigError: the port is in use, or the host is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise ConfigError(
            f"--host={shown(host)} --port={port}: {reason}; use another --port, or an address of this machine"
        ) from None


def read_key(file: str, host: str) -> str:
    """Return the key that clients must send, "" for none.

    Args:
      file: that has the key; "": the environment may have it.

    Raises:
      ConfigError: `host` needs a key, or a longer one, or the file cannot be read, or other users can read it.
    """
    key, source = os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE
    if file:
        source = f"--api_key_file={file}"
        try:
            key, mode = expanded(file).read_text().strip(), expanded(file).stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source} cannot be read ({error}); name a text file that has only the key") from None
        if not key:
            raise ConfigError(f"{source} is empty; write the key into it")
        if mode & READABLE_BY_OTHERS:
            raise ConfigError(f"{source} can be read by other users; run chmod 600 {file}, or set {KEY_VARIABLE}")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{source}: a key has only ASCII letters, digits and signs; choose another")
    if not key and host not in LOOPBACK:
        raise ConfigError(
            f"--host={shown(host)} lets other machines in, so a key is needed: --api_key_file=FILE, "
            f"or the environment variable {KEY_VARIABLE}"
        )
    if len(key) < FEWEST_CHARACTERS and host not in LOOPBACK:
        raise ConfigError(
            f"{source} has fewer than {FEWEST_CHARACTERS} characters, so it can be guessed; make one with "
            "`openssl rand -hex 32`"
        )
    return key


class Server(uvicorn.Server):
    """Says when it is ready, and when it stops."""

    def __init__(
        self, app: ASGIApp, grace_seconds: int, has_failed: Callable[[], bool], end_requests: Callable[[], None]
    ):
        """Serve an application.

        Args:
          grace_seconds: for running requests at the end.
          has_failed: returns whether the server must end, because it can answer no more.
          end_requests: called at the end of the grace period; answers those that still run with an error.
        """
        super().__init__(
            uvicorn.Config(
                app, http=Connection, log_level="warning", access_log=False, server_header=False, lifespan="off",
                ws="none", timeout_graceful_shutdown=grace_seconds + LAST_SECONDS,
            )
        )  # fmt: skip
        self._grace_seconds, self._has_failed, self._end_requests = grace_seconds, has_failed, end_requests

    def serve_on(self, listener: socket.socket) -> None:
        """Serve until SIGINT, SIGTERM or a failure, and then at most the grace period; a second SIGINT ends at once."""
        for number in (signal.SIGINT, signal.SIGTERM):  # now, and when uvicorn raises them again at its end
            signal.signal(number, self.handle_exit)
        self.run(sockets=[listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        await super().startup(sockets)
        host, port = sockets[0].getsockname()[:2]
        print(f"ready: http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end; called ten times a second."""
        return await super().on_tick(counter) or self._has_failed()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and finish running requests, or end them after the grace period."""
        with contextlib.suppress(OSError):  # its reader may have gone
            print(f"stopping: running requests have {self._grace_seconds} s to finish", flush=True)
        end = asyncio.get_running_loop().call_later(self._grace_seconds, self._end_requests)
        await super().shutdown(sockets)
        end.cancel()
