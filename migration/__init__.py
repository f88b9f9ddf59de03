# SPDX-License-Identifier: Apache-2.0
"""Formats of other projects, and the names of earlier systems.

A program with such names may be started with any Python: that of .venv replaces it.
"""

from core import interpreter

try:
    import ml_collections as ml_collections
except ModuleNotFoundError as missing:
    interpreter.restart(missing)
