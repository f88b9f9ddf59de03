# SPDX-License-Identifier: Apache-2.0
"""What the input pipeline says to a user."""

SKIP = "Fix the file, or skip such documents with --config.data.bad_documents=skip."


class DataError(ValueError):
    """Data that cannot be used: one line with what, where, and what would work."""

    exit_status = 2


class DataLost(DataError):
    """Data that was prepared and cannot be read any more, nor made again: no mistake in what was asked for."""

    exit_status = 1


class BadDocument(DataError):
    """One document that cannot be used; data.bad_documents says whether the others can do without it.

    Attributes:
        kind: what is wrong with it, as it is counted: "3 not valid UTF-8".
        details: what else is said of it.
    """

    def __init__(self, name: str, kind: str, details: str = ""):
        super().__init__(f"{name}: {kind}{details}. {SKIP}")
        self.kind, self.details = kind, details
