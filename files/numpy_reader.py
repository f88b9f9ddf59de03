# SPDX-License-Identifier: Apache-2.0
"""Read arrays from untrusted NumPy files by memory mapping, so that a false size in a header takes no memory."""

import pathlib
import tokenize

import numpy as np

# NumPy raises these for an invalid header: it parses the text by ast.literal_eval, or else as tokens of Python.
WRONG_HEADER = (ValueError, TypeError, SyntaxError, EOFError, OverflowError, RecursionError, MemoryError, LookupError)


class ArrayFileError(ValueError):
    """A file without a valid array: one line with the file and the reason."""

    exit_status = 2


def map_integers(path: pathlib.Path, ndim: int) -> np.ndarray:
    """Return the integer array with `ndim` dimensions in an .npy file, memory-mapped.

    Raises ArrayFileError if it has other content, or is shorter than its header says, and OSError if it cannot be read.
    """
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (*WRONG_HEADER, tokenize.TokenError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ArrayFileError(f"{path}: not a readable .npy file ({reason})") from None
    if not np.issubdtype(array.dtype, np.integer) or array.ndim != ndim:
        found = f"{array.dtype} {list(array.shape)}"
        raise ArrayFileError(f"{path}: has {found}; it must have whole numbers in {ndim} dimensions")
    return array
