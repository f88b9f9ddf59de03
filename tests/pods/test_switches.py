# SPDX-License-Identifier: Apache-2.0
"""A pod trains with the enabled switches and with no others, by the code of benchmarks/switches.py."""

import pytest

from tests import support

ON = ("ENABLE_TPU_OPT", "ENABLE_NEUROPLASTICITY")  # benchmarks/switches.py has all 32 settings


@pytest.fixture(scope="module")
def benchmark():
    """The benchmark, as a module."""
    with support.benchmark("switches") as module:
        yield module


@pytest.mark.slow
def test_a_setting_of_the_switches_trains_with_exactly_these(benchmark, tmp_path):
    assert benchmark.faults_of(tmp_path, tmp_path / "cache", ON, deploys=False) == []
