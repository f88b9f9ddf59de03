# SPDX-License-Identifier: Apache-2.0
"""Lets a process end with the process that started it."""

import ctypes
import os
import signal
import sys

SET_PDEATHSIG = 1  # of prctl(2)


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent has ended for any reason; if it has already, end now.

    Linux only; elsewhere a parent that has already ended is noticed. The signal survives an exec, and the kernel sends
    it when the thread that started this process ends, so that a long-lived thread has to start it.

    Args:
      parent: process id of the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process has ended")
