# SPDX-License-Identifier: Apache-2.0
"""The errors of pod.py."""


class PodError(Exception):
    """The one-line error that ends a subcommand; `exit_status` is 2 for a usage error, before anything is called."""

    def __init__(self, message: str, exit_status: int = 1):
        super().__init__(" ".join(message.split()))
        self.exit_status = exit_status


def usage_error(message: str) -> PodError:
    """Return the error for wrong arguments, with exit status 2."""
    return PodError(message, exit_status=2)
