# SPDX-License-Identifier: Apache-2.0
"""A command of the Valkyrie guide, `python -m src.train.main --config configs/tpu_v4_32.yaml`."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # if it is run as a file

from migration import guides, valkyrie

if __name__ == "__main__":
    valkyrie.log_to_tmp()
    guides.train(valkyrie.arguments, valkyrie.configuration, valkyrie.FILE)
