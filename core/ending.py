# SPDX-License-Identifier: Apache-2.0
"""How a process ends: with one last line on stderr that says what is wrong, and its exit status."""

import atexit
import contextlib
import errno
import functools
import io
import logging
import os
import pathlib
import re
import select
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable

from cluster import processes
from cluster.hub import RunError
from configs.errors import OF_KERNEL, OfAllProcesses, visible
from files import stacks
from reporting.sink import INTERRUPTED, LAST_WORDS

LOG = logging.getLogger("torus")
WITHOUT_ERROR = (0, INTERRUPTED)  # exit statuses
LAST_WORD_SECONDS = 5.0
BLAME_SECONDS = 5.0  # after a failed collective, the time for the hub to notice which process died
# What XLA says when a device is out of memory, the second form on a TPU. RESOURCE_EXHAUSTED may also be a full disk.
FULL_DEVICE = re.compile(r"out of memory|Attempting to (allocate|reserve) .* That was not possible", re.IGNORECASE)
_less_memory = (  # advice where a device is full
    "smaller batches take less memory; in training so do --config.model.remat=full and a larger "
    "--config.train.gradient_accumulation"
)
_ending = threading.Lock()
CONTINUES = "interrupted; run the same command to continue", INTERRUPTED
BEGINS_AGAIN = "interrupted", INTERRUPTED
_when_interrupted = BEGINS_AGAIN  # last line and exit status if a signal ends the process


def install() -> None:
    """End this process in one line from now on, whatever exception or signal ends it."""
    _open_streams()
    _take_any_character()
    atexit.register(_write_output)
    sys.excepthook = _with_one_line
    threading.excepthook = lambda args: _with_one_line(args.exc_type, args.exc_value, args.exc_traceback)
    sys.unraisablehook = functools.partial(_if_interrupted, sys.unraisablehook)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, until a training loop handles it
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # the terminal is gone; nohup ignores it
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))


def threads_end_the_process() -> None:
    """End this process in one line if a thread raises RunError; a threading.excepthook that was set already stays.

    A run that hangs, or whose bucket another run has taken over, must not go on in a Python program either.
    """
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _of_thread


def _of_thread(args) -> None:
    if isinstance(args.exc_value, RunError):
        _with_one_line(args.exc_type, args.exc_value, args.exc_traceback)
    threading.__excepthook__(args)


def continues(whether: bool) -> None:
    """Choose what the last line says if a signal ends the process: that the same command continues, or begins again."""
    global _when_interrupted
    if whether:
        _when_interrupted = CONTINUES
    elif _when_interrupted == CONTINUES:
        _when_interrupted = BEGINS_AGAIN


def ends_by_signal(line: str) -> None:
    """End with this last line and status 0 if a signal ends the process: it is how the command usually ends."""
    global _when_interrupted
    _when_interrupted = line, 0


def advise_less_memory(advice: str) -> None:
    """Choose what the last line advises if a device is full."""
    global _less_memory
    _less_memory = advice


def _open_streams() -> None:
    """Open /dev/null as each standard stream that the starting program closed, as services and cron may do.

    Python leaves such a stream None, and the next file that is opened would get its number, and C++'s output.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r"))  # noqa: SIM115


def _take_any_character() -> None:
    """Print a number in place of a character that the encoding of stdout lacks, as stderr does."""
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.closed and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _write_output() -> None:
    """Flush stdout before Python exits: Python would report a failure then in two lines, with exit status 120."""
    if not sys.stdout or sys.stdout.closed:
        return
    try:
        sys.stdout.flush()
    except OSError as error:
        error.filename = "standard output"
        _with_one_line(type(error), error, error.__traceback__)


def _with_one_line(kind: type, error: BaseException, trace: types.TracebackType | None) -> None:
    """End the process with one last line on stderr that describes the error; log the traceback of unexpected errors."""
    for number in (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ():
        signal.signal(number, signal.SIG_IGN)
    message = " ".join(str(error).split()) or kind.__name__
    match error:
        case KeyboardInterrupt():
            line, status = _when_interrupted
        case BrokenPipeError() if stdout_has_no_reader():
            line, status = "error: the program that reads this output has closed it", 1
        case BaseException(exit_status=status):
            line = message if status in WITHOUT_ERROR else f"error: {message}"
        case OSError(errno=errno.ENOSPC | errno.EROFS | errno.EDQUOT | errno.EACCES):
            place = error.filename2 or error.filename or "a file"  # of a copy the second is the one that is written
            line, status = f"error: {place}: {error.strerror}", 1
        case _:
            frame, status = traceback.extract_tb(trace)[-1], 1
            of_text = isinstance(error, SyntaxError) and error.filename
            place = f"{error.filename}:{error.lineno}" if of_text else f"{frame.filename}:{frame.lineno}"
            files = _log_files()
            note = "".join(f"; traceback in {_relative(file)}" for file in files)
            for file in files:
                with contextlib.suppress(OSError):  # the log is then lost, but not the end of the process
                    file.parent.mkdir(parents=True, exist_ok=True)
            is_full = FULL_DEVICE.search(message) and not OF_KERNEL.search(message)
            advice = f"; {_less_memory}" if is_full else ""
            line = f"error: {kind.__name__}: {message[:400]}{advice} ({place}{note})"
            LOG.error("the process ends with", exc_info=(kind, error, trace))
            if processes.count() > 1 and kind.__module__.startswith("jax"):
                time.sleep(BLAME_SECONDS)  # if another process died, the hub's message ends this one
    if isinstance(error, OfAllProcesses):
        processes.leave()
    else:
        processes.fail(line, status)
    _end(line, status)


def stdout_has_no_reader() -> bool:
    """Return whether the other end of standard output's pipe is closed, as after `| head`."""
    try:
        output = sys.stdout.fileno()  # another one than 1 in a process group, see cluster/startup.py
    except (AttributeError, OSError, ValueError):  # None, or replaced by an object without a file
        output = 1
    poll = select.poll()
    poll.register(output, 0)  # errors are reported without being asked for
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _if_interrupted(usual: Callable, unraisable) -> None:
    """End the process if a signal arrived in a callback whose exceptions Python ignores, as in garbage collection."""
    if unraisable.exc_type is KeyboardInterrupt:
        _with_one_line(KeyboardInterrupt, KeyboardInterrupt(), None)
    usual(unraisable)


def with_the_others(line: str, status: int) -> None:
    """End after another process has died or failed: log the stacks of this one, and use the other's line and status."""
    processes.settle()
    for file in _log_files():
        stacks.append(file, line)
    _end(line if status in WITHOUT_ERROR else f"error: {line.removeprefix('error: ')}", status)


def _end(line: str, status: int) -> None:
    _ending.acquire()  # never released, so that only one line is the last
    try:
        for tell in list(LAST_WORDS):
            tell(line, status)
    finally:  # whatever fails in them, the process ends
        _say_and_exit(line, status)


def _say_and_exit(line: str, status: int) -> None:
    speaker = threading.Thread(target=_say_last, args=[line], daemon=True)
    try:
        speaker.start()
        speaker.join(LAST_WORD_SECONDS)  # the pipe may have no reader
    except RuntimeError:  # Python ends already, and starts no threads
        _say_last(line)
    os._exit(status)  # does not wait for threads that may hang after the failure


def _say_last(line: str) -> None:
    for say in (sys.stdout.flush, lambda: print(visible(line), file=sys.stderr, flush=True)):
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed pipe or a closed stream
            say()


def _log_files() -> list[pathlib.Path]:
    return [pathlib.Path(h.baseFilename) for h in LOG.handlers if isinstance(h, logging.FileHandler)]


def _relative(file: pathlib.Path) -> str:
    try:
        return os.path.relpath(file)
    except OSError:  # the current folder was deleted
        return str(file)
