# SPDX-License-Identifier: Apache-2.0
"""Names of the Valkyrie guide, see docs/coming_from_valkyrie.md."""

from migration.valkyrie import ValkyrieConfig as ValkyrieConfig
from migration.valkyrie import ValkyrieModel as ValkyrieModel
