# SPDX-License-Identifier: Apache-2.0
"""Handles errors of jax's cache of compiled programs: one line of each kind instead of a warning for each program."""

import contextlib
import pathlib
import re
import sys
import warnings

FOLDER, ENTRIES = "compiled", "*-cache"  # in the folder of a cache; the names of jax's files
WARNING = re.compile(r"Error (reading|writing) persistent compilation cache entry for '([^']+)': (.*)", re.DOTALL)
LINES = {
    "reading": "a compiled program in {folder} cannot be read ({reason}); it is removed and compiled again",
    "writing": "compiled programs cannot be kept in {folder} ({reason}); the next run compiles them again",
}


def watch(folder: str) -> None:
    """Show the cache's warnings as one line of each kind from now on, and remove entries that cannot be read.

    jax writes an entry in place and never replaces one. So an entry that a full disk or a killed process cut short
    would be read in vain by every later run. The warning names the program but not the entry, so all entries of that
    name are removed.
    """
    usual, shown = warnings.showwarning, set()

    def show(message, category, filename, lineno, file=None, line=None):
        found = WARNING.match(str(message))
        if found is None:
            return usual(message, category, filename, lineno, file, line)
        what, name, reason = found.groups()
        if what == "reading" and "://" not in folder:
            for entry in pathlib.Path(folder).glob(f"{name}-*"):
                with contextlib.suppress(OSError):  # another user's, or removed by another process
                    entry.unlink()
        if what not in shown:
            shown.add(what)
            text = LINES[what].format(folder=folder, reason=" ".join(reason.split())[:200])
            print(text, file=sys.stderr, flush=True)

    warnings.showwarning = show
