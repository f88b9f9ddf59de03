# SPDX-License-Identifier: Apache-2.0
"""Train as VishwamAI's guide says: python optimize_train_tpu.py --config configs/tpu_optimized_config.yaml"""

from migration import guides
from migration.vishwamai import keys

if __name__ == "__main__":
    guides.train(keys.arguments, keys.recipe, keys.FILE)
