# SPDX-License-Identifier: Apache-2.0
"""A receiver of alerts that may fail or hang."""

import contextlib
import http.server
import json
import threading


class Receiver:
    """A server that answers the first requests with `statuses`, and the others with 200.

    Attributes:
      attempts: number of requests.
      taken: what was answered with 200.
    """

    def __init__(self, statuses: list[int], hangs: bool = False):
        self.attempts, self.taken, self.is_over = 0, [], threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(handler):
                content = handler.rfile.read(int(handler.headers["Content-Length"]))
                assert handler.headers["Content-Type"] == "application/json"
                if hangs:
                    self.is_over.wait(10)
                    return
                self.attempts += 1
                status = statuses.pop(0) if statuses else 200
                if status == 200:
                    self.taken.append(json.loads(content))
                handler.send_response(status)
                if 300 <= status < 400:
                    handler.send_header("Location", f"{self.url}/elsewhere")
                handler.end_headers()

            def log_message(handler, *unused):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook/s3cret"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.is_over.set()
        self.server.shutdown()
        self.server.server_close()


@contextlib.contextmanager
def receiver(*statuses: int, hangs: bool = False):
    server = Receiver(list(statuses), hangs)
    try:
        yield server
    finally:
        server.close()
