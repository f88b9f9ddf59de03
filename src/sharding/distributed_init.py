# SPDX-License-Identifier: Apache-2.0
"""A name of the Valkyrie guide, see docs/coming_from_valkyrie.md."""

from migration.valkyrie import setup_multi_host_environment as setup_multi_host_environment
