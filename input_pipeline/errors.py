# SPDX-License-Identifier: Apache-2.0
"""The errors of the input pipeline."""

SKIP = "Fix the file, or skip such documents with --config.data.bad_documents=skip."


class DataError(ValueError):
    """Data cannot be used; one line says what, where, and what would work."""

    exit_status = 2


class DataLost(DataError):
    """Prepared data can no longer be read or rebuilt; the configuration is not at fault."""

    exit_status = 1


class BadDocument(DataError):
    """One document cannot be used; data.bad_documents says whether to skip it.

    Attributes:
        kind: the error in a form that can be counted: "3 not valid UTF-8".
        details: more about this document.
    """

    def __init__(self, name: str, kind: str, details: str = ""):
        super().__init__(f"{name}: {kind}{details}. {SKIP}")
        self.kind, self.details = kind, details
