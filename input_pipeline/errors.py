# SPDX-License-Identifier: Apache-2.0
"""What the input pipeline says to a user."""


class DataError(ValueError):
    """Data that cannot be used: one line with what, where, and what would work."""

    exit_status = 2
