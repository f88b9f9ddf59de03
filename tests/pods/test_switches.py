# SPDX-License-Identifier: Apache-2.0
"""A pod trains with the enabled switches and with no others, by the code of benchmarks/switches.py."""

import pytest

from tests import support

ALL_BUT_EVOLUTION = ("ENABLE_TPU_OPT", "ENABLE_NEUROPLASTICITY", "ENABLE_CAUSAL", "ENABLE_META_LEARNING")


@pytest.fixture(scope="module")
def benchmark():
    """The benchmark, as a module."""
    with support.benchmark("switches") as module:
        yield module


@pytest.mark.parametrize("on", [(), ALL_BUT_EVOLUTION], ids=["none", "four"])  # all 32 settings in the benchmark
def test_a_setting_of_the_switches_trains_with_exactly_these(benchmark, tmp_path, on):
    assert benchmark.faults_of(tmp_path, tmp_path / "cache", on, deploys=False) == []
