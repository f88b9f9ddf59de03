# SPDX-License-Identifier: Apache-2.0
"""The stacks of all threads, for the log of a process that hangs or that ends with others."""

import contextlib
import faulthandler
import pathlib
import threading

SECONDS = 5.0  # for the file system, which may be what hangs


def append(file: pathlib.Path, line: str = "") -> None:
    """Append a line and the stacks of all threads to a file; a full disk or a file system that hangs prevents it."""

    def write() -> None:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as log:
                log.write(line and f"{line}; the stacks of this process:\n")
                log.flush()
                faulthandler.dump_traceback(log, all_threads=True)

    thread = threading.Thread(target=write, daemon=True, name="stacks")
    thread.start()
    thread.join(SECONDS)
