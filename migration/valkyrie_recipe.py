# SPDX-License-Identifier: Apache-2.0
"""The recipe of the YAML file of --valkyrie_yaml; src/train/main.py gives it in place of the file."""

from migration import valkyrie_train


def get_config():
    """Return the recipe."""
    return valkyrie_train.recipe()
