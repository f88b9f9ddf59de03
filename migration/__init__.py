# SPDX-License-Identifier: Apache-2.0
"""Formats of others, and the names of earlier systems, whose lines work with any Python: it is replaced by .venv's."""

from core import interpreter

try:
    import ml_collections as ml_collections
except ModuleNotFoundError as missing:
    interpreter.restart(missing)
