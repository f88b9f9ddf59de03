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


@pytest.mark.parametrize(("status", "retries", "lost"), [(429, 2, ""), (503, 2, ""), (500, 0, "InternalServerError")])
def test_only_a_busy_server_is_asked_again_and_other_errors_are_lost_answers(
    benchmark, monkeypatch, status, retries, lost
):
    asked = []

    def answer(request):
        asked.append(request.url.path)
        if request.url.path == "/v1/models":
            return httpx2.Response(200, json={"object": "list", "data": [{"id": "m", "object": "model"}]})
        if asked.count(request.url.path) <= 2:
            return httpx2.Response(status, json={"error": {"message": "no"}})
        return httpx2.Response(200, json={"id": "a", "object": "text_completion", "choices": [{"text": "said"}]})

    monkeypatch.setattr(benchmark, "PAUSE_SECONDS", 0.0)
    transport = httpx2.Client(transport=httpx2.MockTransport(answer))
    client = benchmark.openai.OpenAI(base_url="http://server/v1", api_key="none", max_retries=0, http_client=transport)
    found = benchmark.answered(client, benchmark.Ask("whole", "a", 4, 1, {}), "said")
    assert (found.right, found.retries) == (not lost, retries) and found.lost.startswith(lost)
    assert asked.count("/v1/completions") == (1 if lost else 3)
