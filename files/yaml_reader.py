# SPDX-License-Identifier: Apache-2.0
"""Read untrusted YAML: plain values alone, and no aliases."""

import yaml

from files.json_reader import JsonError

OF_VALUES = ValueError, LookupError, AttributeError, RecursionError  # of a tag with another value, and of deep nesting


def parse_yaml(content: bytes, source: str) -> object:
    """Return mappings, lists and plain values; `source` begins error messages.

    Raises:
      JsonError: it is not YAML, or has aliases, by which a short text can stand for a huge one.
    """
    try:
        text = content.decode()
        has_alias = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader))
        value = None if has_alias else yaml.safe_load(text)
    except (yaml.YAMLError, *OF_VALUES) as error:
        raise JsonError(f"{source}: is not YAML ({' '.join(str(error).split())[:200]})") from None
    if has_alias:
        raise JsonError(f"{source}: has a YAML alias, which is not read; write its value")
    return value
