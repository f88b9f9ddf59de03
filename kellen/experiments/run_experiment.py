# SPDX-License-Identifier: Apache-2.0
"""The v4-64 plan's command: python kellen/experiments/run_experiment.py GROUP; see migration/trm_plan.py."""

import sys

if __name__ == "__main__":
    sys.path.insert(0, __file__.rpartition("/kellen/")[0])
    from migration import trm_plan

    trm_plan.start("run_experiment")
