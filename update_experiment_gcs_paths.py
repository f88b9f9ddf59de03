# SPDX-License-Identifier: Apache-2.0
"""The v4-64 plan's script: list and check the bucket's folder of every configuration; see migration/trm_plan.py."""

from migration import trm_plan

if __name__ == "__main__":
    trm_plan.start("update_experiment_gcs_paths")
