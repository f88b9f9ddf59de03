# SPDX-License-Identifier: Apache-2.0
"""Read arrays that this process did not write: NumPy files, mapped into memory, so that a false size takes none."""

import pathlib
import tokenize

import numpy as np

# What numpy raises of a header that is none: it reads the text in it by ast.literal_eval, and else as tokens of Python.
WRONG_HEADER = (ValueError, TypeError, SyntaxError, EOFError, OverflowError, RecursionError, MemoryError, LookupError)


class ArrayFileError(ValueError):
    """A file that holds no such array: one line with the file and what is wrong with it."""

    exit_status = 2


def map_integers(path: pathlib.Path, ndim: int) -> np.ndarray:
    """Return the array of whole numbers in an .npy file, `ndim` dimensions, read where it is used.

    Raises:
      ArrayFileError: the file holds anything else, or is shorter than its header says.
      OSError: the file cannot be read.
    """
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (*WRONG_HEADER, tokenize.TokenError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ArrayFileError(f"{path}: no .npy file that can be read ({reason})") from None
    if not np.issubdtype(array.dtype, np.integer) or array.ndim != ndim:
        found = f"{array.dtype} {list(array.shape)}"
        raise ArrayFileError(f"{path}: holds {found}; it must be whole numbers in {ndim} dimensions")
    return array
