# SPDX-License-Identifier: Apache-2.0
"""Read untrusted YAML: plain values alone, and no aliases."""

import yaml

from files.json_reader import JsonError


def parse_yaml(content: bytes, source: str) -> object:
    """Return mappings, lists and plain values; `source` begins error messages.

    Raises:
      JsonError: it is not YAML, or has aliases, by which a short text can stand for a huge one.
    """
    try:
        text = content.decode()
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise JsonError(f"{source}: has a YAML alias, which is not read; write its value")
        return yaml.safe_load(text)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise JsonError(f"{source}: is not YAML ({' '.join(str(error).split())[:200]})") from None
