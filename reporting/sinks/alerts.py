# SPDX-License-Identifier: Apache-2.0
"""Alerts: an HTTP POST of JSON when a run fails, stalls, diverges, loses a process or a checkpoint, or finishes."""

import http.client
import json
import logging
import os
import pathlib
import queue
import re
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

from configs.errors import ConfigError
from reporting.sink import INTERRUPTED, LAST_WORDS, Sink, is_interruption
from settings.keys import VARIABLES

VARIABLE = VARIABLES["logging.alerts"]
LOG = logging.getLogger("torus")
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # seconds between attempts; then an alert is given up
HURRIED_PAUSE = 0.2  # seconds, when the run ends
TIMEOUT_SECONDS = 5.0  # of one attempt
END_SECONDS = 10.0  # for alerts on their way when a run has finished or failed
SHORT_END_SECONDS = 2.0  # when it was interrupted, or must end at once
BLAME_SECONDS = 5.0  # after a failed collective; if another process died, `tell_end` is called meanwhile
MOST_WAITING = 100  # alerts; further ones are lost
LONGEST_TEXT = 1000  # characters
EVENTS = {  # of metrics.jsonl: (event of an alert, text)
    "update_not_taken": ("spike", "update skipped: loss {loss}, gradient norm {gradient_norm}"),
    "roll_back": ("spike", "rolled back; leaves out the batches of steps {first_step} to {last_step}"),
    "save_failed": ("failed_checkpoint", "checkpoint not saved: {error}"),
    "damaged": ("failed_checkpoint", "a checkpoint is damaged and not used"),
    "blame": ("stall", "a process delays the run; metrics.jsonl says which"),
}
ENDS = (  # parts of an error's line: the event of its alert
    ("failure", r"No space left on device|Disk quota exceeded"),  # also RESOURCE_EXHAUSTED, as tensorstore says it
    ("out_of_memory", r"RESOURCE_EXHAUSTED|MemoryError|[Oo]ut of memory|does not fit|step needs .* GiB"),
    ("stall", r"no step ended within"),
    ("lost_worker", r"^(error: )?process \d+ of \d+ \(.*\) died"),
)


def check(config) -> None:
    """Raise ConfigError for what is not a web address. The message does not show it, since it may hold a secret."""
    address = address_of(config)
    key = "logging.alerts" if config.logging.alerts else VARIABLE
    if address and not re.match(r"https?://[^/]", address):
        raise ConfigError(f"{key} is not a web address; it should begin with https:// or http://")
    try:
        urllib.parse.urlsplit(address.encode("ascii").decode()).netloc.encode("idna")
    except ValueError:
        raise ConfigError(f"{key} is not a valid web address; copy it again, in ASCII") from None


def address_of(config) -> str:
    """Return where alerts go; "": nowhere."""
    return config.logging.alerts or os.environ.get(VARIABLE, "")


def make(config, workdir: pathlib.Path, process: int) -> Sink | None:
    """Return the sink of process 0, and of process 1, which sends only if process 0 is lost."""
    address = address_of(config)
    return Alerts(address, workdir.name, process) if address and process < 2 else None


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error: urllib would follow it with a GET request, without the alert."""

    def redirect_request(self, *unused):
        """Follow nothing."""
        return None


OPENER = urllib.request.build_opener(NoRedirect)


class Alerts(Sink):
    """Sends alerts in a thread; one that is not delivered is a line of the log, which never has the address."""

    def __init__(self, address: str, run: str, process: int = 0):
        """Alert about a run from one of its processes."""
        self.address, self.run, self.process, self.step = address, run, process, 0
        self.waiting: queue.Queue[dict | None] = queue.Queue(MOST_WAITING)
        self.is_ending = threading.Event()
        self.thread = threading.Thread(target=self._deliver_all, daemon=True, name="alerts")
        self.thread.start()
        LAST_WORDS.append(self.tell_end)

    def write(self, kind, figures, step):
        """Alert about an event that someone may want to know; if updates are skipped in a row, about the first."""
        self.step = step
        if self.process or kind != "event" or figures.get("in_a_row", 1) > 1:
            return
        if known := EVENTS.get(str(figures.get("event"))):
            event, text = known
            self.send(event, text.format_map({name: _short(value) for name, value in figures.items()}))

    def close(self, error):
        """Alert about the end of the run, unless it was interrupted, and wait for alerts on their way."""
        LAST_WORDS.remove(self.tell_end)
        if is_interruption(error):
            return self._end(SHORT_END_SECONDS)
        if error is None:
            self._tell("finish", f"finished at step {self.step}")
        else:
            text = " ".join(str(error).split()) or type(error).__name__
            event = event_of(f"{type(error).__name__}: {text}")
            if event == "failure" and type(error).__module__.startswith("jax"):
                time.sleep(BLAME_SECONDS)
            self._tell(event, text)
        return self._end(END_SECONDS)

    def tell_end(self, line: str, status: int) -> None:
        """Alert about the end of a process that cannot wait."""
        said = line.removeprefix("error: ")
        is_lost = said.startswith("process 0 of") and said.endswith("died")  # else it has reported its own end
        if status not in (0, INTERRUPTED) and (not self.process or is_lost):
            self.send(event_of(said), said)
        self._end(SHORT_END_SECONDS)

    def send(self, event: str, text: str) -> None:
        """Queue an alert; it is lost, with a line of the log, if too many wait."""
        alert = {
            "run": self.run, "event": event, "text": text[:LONGEST_TEXT], "step": self.step, "time": time.time(),
            "host": socket.gethostname(),
        }  # fmt: skip
        try:
            self.waiting.put_nowait(alert)
        except queue.Full:
            LOG.error(f"the alert {event} of step {self.step} is lost: {MOST_WAITING} others wait")

    def _tell(self, event: str, text: str) -> None:
        if not self.process:
            self.send(event, text)

    def _end(self, seconds: float) -> None:
        """Give the thread this time to deliver the alerts that wait."""
        self.is_ending.set()
        try:
            self.waiting.put_nowait(None)
        except queue.Full:  # `is_ending` informs the thread that nothing follows
            LOG.error(f"{MOST_WAITING} alerts wait at the end of the run; some are lost")
        if threading.current_thread() is self.thread:  # its own failure ends the process
            return
        self.thread.join(seconds)
        if self.thread.is_alive():
            LOG.error(f"alerts are lost: the receiver did not take them within {seconds:g} s at the end of the run")

    def _deliver_all(self) -> None:
        while (alert := self.waiting.get()) is not None:
            self._deliver(alert)

    def _deliver(self, alert: dict) -> None:
        body = json.dumps(alert).encode()
        for pause in (*PAUSES, None):
            problem, may_pass = self._attempt(body)
            if not problem:
                return
            if not may_pass or pause is None:
                break
            self._rest(pause)
        LOG.error(f"the alert {alert['event']} of step {alert['step']} is lost: {problem}")

    def _rest(self, seconds: float) -> None:
        """Wait before the next attempt, shortly if the run ends."""
        if self.is_ending.wait(seconds):
            time.sleep(HURRIED_PAUSE)

    def _attempt(self, body: bytes) -> tuple[str, bool]:
        """Post an alert; return (problem, whether a retry may help), without the address, which may hold a secret."""
        headers = {"Content-Type": "application/json", "User-Agent": "torus"}
        try:
            request = urllib.request.Request(self.address, body, headers)
            with OPENER.open(request, timeout=TIMEOUT_SECONDS):
                return "", False
        except urllib.error.HTTPError as error:
            error.close()
            return f"the receiver answers with status {error.code}", error.code >= 500 or error.code in (408, 429)
        except (http.client.InvalidURL, ValueError):
            return "its address is not valid", False
        except urllib.error.URLError as error:
            return f"the receiver is out of reach ({type(error.reason).__name__})", True
        except (OSError, http.client.HTTPException) as error:
            return f"the receiver does not answer ({type(error).__name__})", True


def event_of(line: str) -> str:
    """Return the event of an alert about the error that ends a run."""
    return next((event for event, pattern in ENDS if re.search(pattern, line)), "failure")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "not finite" if value is None else str(value)
