# SPDX-License-Identifier: Apache-2.0
"""The v4-64 plan's command: python pretrain_jax.py --config-name baseline epochs=100; see migration/trm_plan.py."""

from migration import trm_plan

if __name__ == "__main__":
    trm_plan.start("pretrain_jax")
