# SPDX-License-Identifier: Apache-2.0
"""Readers of checkpointing/lease.py to fuzz."""

import json

from checkpointing import lease
from tests.fuzz.harness import reader


class Refusal(Exception):
    """What was read is refused, in a line."""

    exit_status = 1


@reader("lock.json", lambda: [json.dumps({"host": "here", "pid": 7, "since": "2026-01-01 00:00:00+00:00"}).encode()])
def read_lock(content: bytes, folder) -> None:
    run = lease.read_name(content)
    if run is None:
        raise Refusal("it is not the name of a run")
    assert isinstance(run["host"], str) and isinstance(run["pid"], int) and len(lease.named(run)) < 2000
    assert lease._is_gone(run | {"host": lease.socket.gethostname()}) in (True, False)
