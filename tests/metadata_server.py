# SPDX-License-Identifier: Apache-2.0
"""A server that answers as Compute Engine's metadata server does."""

import http.server
import threading
import urllib.parse


class Metadata(http.server.ThreadingHTTPServer):
    """Holds the values of instance/...; a request may hang until its value changes."""

    daemon_threads = True

    def __init__(self):
        """Serve on a free port of this machine, once `serve_forever` is called."""
        self.values = {"maintenance-event": "NONE", "preempted": "FALSE"}
        self.changed, self.failing, self.num_requests = threading.Condition(), False, 0
        super().__init__(("localhost", 0), Answer)

    @property
    def host(self) -> str:
        return "localhost:{1}".format(*self.server_address)

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def wait_for_requests(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.num_requests >= number, 10)


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        url, server = urllib.parse.urlsplit(self.path), self.server
        asked = dict(urllib.parse.parse_qsl(url.query))
        key = url.path.removeprefix("/computeMetadata/v1/instance/")
        with server.changed:
            server.num_requests += 1
            server.changed.notify_all()
            if server.failing or self.headers["Metadata-Flavor"] != "Google":
                self.send_error(503 if server.failing else 403)
                return
            if key not in server.values:
                self.send_error(404)
                return
            if asked.get("wait_for_change") == "true":
                server.changed.wait_for(
                    lambda: server.values[key] != asked["last_etag"], timeout=float(asked["timeout_sec"])
                )
            value = server.values[key]
        self.send_response(200)
        self.send_header("ETag", value)  # here the ETag is the value itself
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value.encode())

    def log_message(self, *unused):
        """Keep quiet."""
