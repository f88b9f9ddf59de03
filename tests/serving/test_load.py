# SPDX-License-Identifier: Apache-2.0
"""Concurrent clients have right answers, by the code of benchmarks/serving.py, with fewer requests."""

import importlib.util
import sys

import httpx2
import pytest

from tests.serving.conftest import LENGTH
from tests.support import ROOT
from trained_run import open_run

pytest.importorskip("uvicorn", reason="needs the packages of `make setup EXTRAS=serve`")
pytest.importorskip("openai", reason="needs the packages of `make setup EXTRAS=serve`")


@pytest.fixture(scope="module")
def benchmark():
    """The benchmark as a module; its name is that of a room."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        patch.setattr("sys.argv", ["serving.py"])
        spec = importlib.util.spec_from_file_location("load_of_servers", ROOT / "benchmarks" / "serving.py")
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


def test_no_answer_is_wrong_or_lost_under_load(benchmark, chatting):
    given = benchmark.asks(40, LENGTH, seed=1)
    texts = benchmark.expected(open_run(chatting.folder), given, LENGTH)
    found = benchmark.load(chatting.url, given, texts, clients=8)
    assert len(found) == 40 and {one.ask.kind for one in found} == {"whole", "stream", "cancelled", "wrong"}
    assert [one.ask for one in found if not one.right] == []
    assert b"torus_requests_in_flight 0.0" in httpx2.get(f"{chatting.url}/metrics").content
