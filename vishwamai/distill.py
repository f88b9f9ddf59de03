# SPDX-License-Identifier: Apache-2.0
"""The module of VishwamAI's guide; see docs/coming_from_vishwamai.md."""

from migration.vishwamai.training import DistillationTrainer as DistillationTrainer
