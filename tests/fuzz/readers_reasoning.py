# SPDX-License-Identifier: Apache-2.0
"""Readers of reasoning/ and of the caches of rehearsal/ to fuzz."""

import gzip
import json
import pathlib

import numpy as np

from puzzles.voting import Votes
from rehearsal import sealed
from tests.fuzz.harness import reader


def _votes() -> Votes:
    votes, given = Votes(), np.array([[1, 2]], np.uint8)
    for colour in (3, 4):
        for probability in (0.5, 0.1):
            votes.add("one", given, np.full((2, 3), colour, np.uint8), probability)
    votes.add("two", given, np.zeros((0, 0), np.uint8), 1.0)
    return votes


@reader("votes", lambda: [_votes().to_bytes()])
def read_votes(content: bytes, folder: pathlib.Path) -> None:
    """What is accepted can be ranked and merged, and is the same when it is written and read again."""
    (folder / "votes.gz").write_bytes(content)
    votes = Votes.load(folder / "votes.gz")
    for task, given in votes.table:
        ranked = votes.ranked(task, np.frombuffer(given, np.uint8, offset=2).reshape(given[0], given[1]))
        assert ranked and all(candidate.count > 0 for candidate in ranked)
    assert len(votes.merge([votes])) == 2 * len(votes) and Votes.from_bytes(votes.to_bytes()) == votes


@reader("votes, unpacked", lambda: [gzip.decompress(_votes().to_bytes())])
def read_unpacked_votes(content: bytes, folder: pathlib.Path) -> None:
    """The same of what is in the file."""
    read_votes(gzip.compress(content, compresslevel=1), folder)


class Refusal(Exception):
    """A damaged file of the cache counts for nothing, and is made again."""

    exit_status = 1


CACHED = {"step_seconds": 0.25, "mesh": {"fsdp": 4}, "notes": ["a"], "out_of_memory": None}


def _sealed() -> list[bytes]:
    return [json.dumps({"sha256": sealed.digest_of(CACHED), "content": CACHED}).encode()]


@reader("a file of the rehearsals' cache", _sealed)
def read_sealed(content: bytes, folder: pathlib.Path) -> None:
    """What is accepted is what was written."""
    (folder / "facts.json").write_bytes(content)
    found = sealed.read(folder / "facts.json")
    if found is None:
        raise Refusal("it is damaged")
    assert found == CACHED
