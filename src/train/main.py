# SPDX-License-Identifier: Apache-2.0
"""A command of the Valkyrie guide, `python -m src.train.main --config configs/tpu_v4_32.yaml`."""

from migration import valkyrie_yaml

if __name__ == "__main__":
    valkyrie_yaml.main()
