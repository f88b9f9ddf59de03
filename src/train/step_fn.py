# SPDX-License-Identifier: Apache-2.0
"""A name of the Valkyrie guide, see docs/coming_from_valkyrie.md."""

from migration.valkyrie import create_train_step as create_train_step
