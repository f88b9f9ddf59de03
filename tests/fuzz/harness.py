# SPDX-License-Identifier: Apache-2.0
"""Fuzz the readers of foreign data: mutate good contents and watch what a reader does with each.

A reader may return, having asserted itself that what it returns is right, or raise an error of ours: one with an
`exit_status` and a message of one line. Anything else is a failure: another exception, a case that takes longer than
CASE_SECONDS, or memory of more than MEMORY_GIB above what the process had before.
"""

import dataclasses
import json
import pathlib
import random
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Callable

CASE_SECONDS = 10.0
MEMORY_GIB = 1.0
MESSAGE_CHARACTERS = 2000  # of an error that a person is to read
SAVED_FAILURES = 5  # of a reader, with their contents
TOKENS = (  # pieces that break parsers
    b"[" * 10_000, b'{"a":' * 10_000, b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"-1", b"0", b"null", b"true", b"[]",
    b"{}", b'""', b'"\\ud800"', b"\x00", b"\xff\xfe", b"\n", b"\r\n", b'"', b"\\", b"../", b"/", b"$(id)", b"%s", b"{{",
    b"18446744073709551616", b"1.5", b"\xed\xa0\x80", b"\xf0\x9f\x8c\x8d",
)  # fmt: skip
VALUES = (  # in place of a value of JSON
    None, True, 0, -1, 1.5, 2**63, 10**400, 1e308, "", "x" * 5000, "../../etc/passwd", "\ud83d", [], {}, [[]], [{}],
    {"": {}}, ["a", 1],
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Reader:
    """A function that reads foreign data: `read(content, folder)` may write below the folder, which is its own.

    Where a case takes long, of so many cases that are asked for one in `divisor` is tried.
    """

    name: str
    good: Callable[[], list[bytes]]
    read: Callable[[bytes, pathlib.Path], object]
    divisor: int = 1


READERS: dict[str, Reader] = {}


def reader(name: str, good: Callable[[], list[bytes]], divisor: int = 1) -> Callable:
    """Register a function of (content, folder) as a reader; `good` returns contents that it accepts."""

    def register(read: Callable) -> Callable:
        READERS[name] = Reader(name, good, read, divisor)
        return read

    return register


def fuzz(name: str, cases: int, seed: int = 0) -> dict:
    """Give a reader its good contents and then mutations of them; return what came of it.

    Returns:
      {"reader", "cases", "accepted", "refused", "slowest_seconds", "memory_gib", "failures": [{"error", "content"}]}.
    """
    target, rng = READERS[name], random.Random(f"{name} {seed}")
    good, cases = target.good(), -(-cases // target.divisor)
    found = {"reader": name, "cases": cases, "accepted": 0, "refused": 0, "slowest_seconds": 0.0, "failures": []}
    with tempfile.TemporaryDirectory() as folder:
        for number, content in enumerate(good):
            problem = _problem(target, content, pathlib.Path(folder, f"good{number}"))
            assert problem is None, f"{name}: good content {number} is not accepted: {problem or 'it is refused'}"
        before = _reset_peak()
        for number in range(cases):
            content, started = mutate(rng.choice(good), rng), time.monotonic()
            problem = _problem(target, content, pathlib.Path(folder, str(number)))
            found["slowest_seconds"] = max(found["slowest_seconds"], time.monotonic() - started)
            kind = "accepted" if problem is None else "refused" if problem == "" else "failures"
            if kind != "failures":
                found[kind] += 1
            elif len(found["failures"]) < SAVED_FAILURES:
                found["failures"].append({"error": problem, "content": content[:2000].decode("latin-1")})
    found["memory_gib"] = max(0.0, _peak() - before)
    if found["memory_gib"] > MEMORY_GIB:
        found["failures"].append({"error": f"{found['memory_gib']:.2f} GiB above the idle process", "content": ""})
    return found


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Return the content with one to three changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        content = rng.choice(MUTATIONS)(content, rng)
    return content


def _flip(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(max(1, len(content)))
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)] if content else []) + content[place + 1 :]


def _cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _delete(content: bytes, rng: random.Random) -> bytes:
    first = rng.randrange(len(content) + 1)
    return content[:first] + content[first + rng.randrange(20) :]


def _repeat(content: bytes, rng: random.Random) -> bytes:
    first = rng.randrange(len(content) + 1)
    part = content[first : first + rng.randrange(1, 100)]
    return content[:first] + part * rng.choice((2, 3, 50)) + content[first:]


def _insert(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content) + 1)
    return content[:place] + rng.choice(TOKENS) + content[place:]


def _change_number(content: bytes, rng: random.Random) -> bytes:
    numbers = list(re.finditer(rb"-?\d+(\.\d+)?", content))
    if not numbers:
        return _insert(content, rng)
    number = rng.choice(numbers)
    value = rng.choice((b"0", b"-1", b"1", b"1e999", b"99999999999999999999", b"4294967296", b"0.5", b"NaN", b'"1"'))
    return content[: number.start()] + value + content[number.end() :]


def _change_json(content: bytes, rng: random.Random) -> bytes:
    """Change, drop or nest one value of a JSON document, or of a line of one."""
    lines = content.split(b"\n")
    at = rng.randrange(len(lines))
    try:
        document = json.loads(lines[at] if len(lines) > 1 else content)
    except (ValueError, RecursionError):
        return _insert(content, rng)
    changed = json.dumps(_changed(document, rng)).encode()
    return b"\n".join([*lines[:at], changed, *lines[at + 1 :]]) if len(lines) > 1 else changed


def _changed(value, rng: random.Random):
    if not isinstance(value, dict | list) or not value or rng.random() < 0.2:
        return rng.choice((*VALUES, [value], {"value": value}))
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = rng.choice(keys)
    if rng.random() < 0.15:
        return type(value)([*value.items()][:-1]) if isinstance(value, dict) else value[:-1]
    copy = value.copy()
    copy[key] = _changed(value[key], rng)
    return copy


MUTATIONS = (_flip, _cut, _delete, _repeat, _insert, _change_number, _change_json, _change_json)


def _problem(target: Reader, content: bytes, folder: pathlib.Path) -> str | None:
    """Return None if the content is accepted, "" if it is refused in one line, else what went wrong."""
    folder.mkdir()
    usual = signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS)
    try:
        target.read(content, folder)
    except BaseException as error:  # any exception of a reader is a finding
        if isinstance(error, KeyboardInterrupt):
            raise
        message = str(error)
        if isinstance(getattr(error, "exit_status", None), int) and 0 < len(message) <= MESSAGE_CHARACTERS:
            return "" if "\n" not in message else f"several lines: {message[:200]!r}"
        return " / ".join(traceback.format_exception(error))[-1500:]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
    return None


class TooLong(BaseException):
    """A case took longer than CASE_SECONDS; it is not an Exception, so that no reader handles it."""


def _too_long(*unused) -> None:
    raise TooLong(f"over {CASE_SECONDS:g} s")


def _reset_peak() -> float:
    """Reset the peak of memory; return the resident GiB now."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _peak() -> float:
    return _memory("VmHWM")


def _memory(field: str) -> float:
    """Return a field of /proc/self/status, in GiB."""
    return int(re.search(rf"{field}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) / 2**20
