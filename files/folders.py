# SPDX-License-Identifier: Apache-2.0
"""What is in a folder, and whether files can be written to it."""

import pathlib
import tempfile


def names_in(folder) -> set[str]:
    """Return the names in a folder, local or of a bucket; none if it does not exist.

    A bucket that does not answer is an error of its library. `exists` would say no then.
    """
    try:
        return {path.name for path in folder.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def make_writable(path: str) -> None:
    """Make a folder, and write to it once; OSError if either fails."""
    pathlib.Path(path).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
        pass


def source_files(folder: pathlib.Path, pattern: str = "**/*.py") -> list[pathlib.Path]:
    """Return the Python files of a folder, sorted; by default those below it too.

    Hidden files are not source code: an editor keeps a dangling link `.#NAME.py` next to an open file, macOS keeps
    binary `._NAME.py` on other file systems, and Jupyter keeps copies in `.ipynb_checkpoints/`.
    """
    found = (path for path in folder.glob(pattern) if path.is_file())
    return sorted(path for path in found if not any(part[0] == "." for part in path.relative_to(folder).parts))
