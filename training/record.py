# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint keeps beside its arrays, as record.json."""

from typing import Annotated

import pydantic

from files.json_reader import Object, Scalar
from training.goodput import Account

MAX_BYTES = 64 << 20
Step = Annotated[int, pydantic.Field(ge=0, lt=2**31)]
Examples = Annotated[int, pydantic.Field(ge=0, lt=2**48)]
RESUMED = ("step", "examples", "config", "corpus", "losses", "total_tokens", "goodput")  # without which no run goes on


class Pin(Object):
    """Which checkpoint of another run steps take beside their own weights, see training/other_run.py."""

    folder: str
    step: Step
    digest: str


class Record(Object, total=False):
    """What is known of a run at a checkpoint; versions and tests may leave keys out.

    Keys:
      step, examples, total_tokens: done and trained on so far.
      increases: how often the batch has grown.
      config: flat, by dotted key.
      weights_only: of imported weights the keys that belong to them.
      corpus: what identifies the documents; None: any will do.
      mixture, skips: see input_pipeline/mixture.py.
      losses: held-out loss by step.
      topology: name of the preset.
      versions: of libraries, by name.
      goodput: the account of time.
      base, reference, teacher: weights that are frozen.
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
    base: Pin | None
    reference: Pin | None
    teacher: Pin | None
