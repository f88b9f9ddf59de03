# SPDX-License-Identifier: Apache-2.0
"""Lets a process end with the process that started it.

As a program, `parent.py PARENT COMMAND...` sets this up and then executes COMMAND in its own place. So a process with
threads can start commands that end with it: no code of its own runs between fork and exec.
"""

import ctypes
import os
import signal
import sys

SET_PDEATHSIG = 1  # of prctl(2)


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent has ended for any reason; if it has already, end now.

    Linux only; elsewhere a parent that has already ended is noticed. The signal survives an exec, and the kernel sends
    it when the thread that started this process ends, so that a long-lived thread has to start it. `parent` is the
    process id of the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process has ended")


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
