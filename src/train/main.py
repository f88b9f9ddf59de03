# SPDX-License-Identifier: Apache-2.0
"""A command of the Valkyrie guide, `python -m src.train.main --config configs/tpu_v4_32.yaml`."""

from core import interpreter

try:
    from migration import valkyrie_yaml
except ModuleNotFoundError as missing:
    interpreter.restart(missing)

if __name__ == "__main__":
    valkyrie_yaml.main()
