# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium for tests of pages, driven by the DevTools protocol over pipes."""

import base64
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
WAIT_SECONDS = 20
# Chromium reads from descriptor 3 and writes to 4.
TAKE_PIPES = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(pipe), fcntl.F_DUPFD, 10) for pipe in sys.argv[1:3]]
os.dup2(pipes[0], 3)
os.dup2(pipes[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def executable() -> str:
    """Return the path of Chromium; skip the test if there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return found or pytest.skip("Chromium is not installed here; Debian has it as the package chromium")


class Browser:
    """A browser with one page.

    Attributes:
      errors: what the page's console says, and every resource that its policy refused.
    """

    def __init__(self, folder: pathlib.Path):
        """Start Chromium with a profile in a folder."""
        theirs, self._to = os.pipe()
        self._from, answers = os.pipe()

        self._process = subprocess.Popen(
            [
                sys.executable, "-c", TAKE_PIPES, str(theirs), str(answers), executable(), "--headless=new",
                "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={folder}",
                "--no-first-run", "--hide-scrollbars", "--disable-background-networking", "about:blank",
            ],
            pass_fds=(theirs, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs)
        os.close(answers)
        self._numbers, self._held, self.errors, self._session = itertools.count(1), b"", [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End Chromium."""
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, **parameters) -> dict:
        """Call a method of the protocol; return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, url: str, *, width: int = 1100, height: int = 800, dark: bool = False) -> None:
        """Show a page in a window of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def value(self, expression: str):
        """Return the value of an expression of JavaScript."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + WAIT_SECONDS
        while not self.value(f"Boolean({condition})"):
            assert time.monotonic() < end, (condition, self.value("document.body.innerText"), self.errors)
            time.sleep(0.02)

    def fill(self, selector: str, text: str) -> None:
        """Type a text into a field in place of what it has."""
        self.value(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def screenshot(self, path: pathlib.Path) -> bytes:
        """Write a picture of the whole page as PNG; return its bytes."""
        content = base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])
        path.write_bytes(content)
        return content

    def _read(self) -> dict:
        while b"\0" not in self._held:
            part = os.read(self._from, 1 << 16)
            assert part, "Chromium has ended"
            self._held += part
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(event["params"]["exceptionDetails"]["exception"]["description"])
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(event["params"]["entry"]["text"])
