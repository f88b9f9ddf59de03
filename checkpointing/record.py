# SPDX-License-Identifier: Apache-2.0
"""The record of a checkpoint, record.json: all that it saves except arrays."""

from typing import Annotated

import pydantic

from files.json_reader import Object, Scalar
from reporting.goodput import Account

MAX_BYTES = 64 << 20
Step = Annotated[int, pydantic.Field(ge=0, lt=2**31)]
Examples = Annotated[int, pydantic.Field(ge=0, lt=2**48)]
RESUMED = ("step", "examples", "config", "corpus", "losses", "total_tokens", "goodput")  # required to resume


class CheckpointRef(Object):
    """A reference to the checkpoint of frozen weights, see checkpointing/source_run.py."""

    folder: str
    step: Step
    digest: str


class Record(Object, total=False):
    """The progress of a run at a checkpoint; versions and tests may leave keys out.

    Keys:
      step, examples, total_tokens: number of them so far.
      increases: number of increases of the batch size.
      config: flat, by dotted key.
      weights_only: for imported weights, the configuration keys that belong to them.
      corpus: digest of the documents; None: any documents.
      mixture, skips: see input_pipeline/mixture.py.
      losses: held-out loss by step.
      topology: name of the preset.
      versions: of libraries, by name.
      goodput: the account of time.
      frozen: references of the checkpoints of frozen weights, by role.
      base, reference, teacher: the same references, in records of earlier versions.
    """

    step: Step
    examples: Examples
    total_tokens: Examples
    increases: Annotated[int, pydantic.Field(ge=0, le=100_000)]
    config: dict[str, Scalar]
    weights_only: list[str]
    corpus: str | None
    mixture: list[tuple[Examples, list[str]]]
    skips: list[tuple[Examples, Examples]]
    losses: dict[Annotated[str, pydantic.Field(pattern="^[0-9]{1,10}$")], float]
    topology: str | None
    versions: dict[str, str]
    goodput: Account
    base: CheckpointRef | None
    reference: CheckpointRef | None
    teacher: CheckpointRef | None
    frozen: dict[str, CheckpointRef]


def frozen_refs(record: dict) -> dict[str, dict]:
    """Return the references of the checkpoints of a record's frozen weights, by role; {} if there are none."""
    earlier = {role: record[role] for role in ("base", "reference", "teacher") if record.get(role)}
    return record.get("frozen", earlier)
