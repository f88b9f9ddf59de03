# SPDX-License-Identifier: Apache-2.0
"""Reads the YAML files of the earlier systems' guides."""

import pathlib

import yaml

from configs.errors import ConfigError


def read(path: pathlib.Path, source: str) -> object:
    """Return the content of a YAML file; `source` begins error messages.

    Raises:
      ConfigError: it cannot be read, or has aliases, by which a short file can stand for a huge one.
    """
    try:
        text = path.read_text()
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ConfigError(f"{source} has a YAML alias, which is not read; write the value out")
        return yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{source} cannot be read: {' '.join(str(error).split())[:200]}") from None
