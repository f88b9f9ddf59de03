# SPDX-License-Identifier: Apache-2.0
"""The module of VishwamAI's guide; see docs/coming_from_vishwamai.md."""

from core import interpreter

try:
    from migration.vishwamai.distill import DistillationTrainer
except ModuleNotFoundError as missing:
    interpreter.restart(missing)
__all__ = ["DistillationTrainer"]
