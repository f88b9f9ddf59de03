# SPDX-License-Identifier: Apache-2.0
"""A server of several processes, on a mesh of all their devices: process 0 answers, and the other one follows."""

import contextlib
import pathlib
import signal
import socket
from collections.abc import Iterator

import httpx2
import pytest

from tests import groups
from trained_run import open_run

openai = pytest.importorskip("openai", reason="needs the packages of `make setup EXTRAS=serve`")
pytest.importorskip("uvicorn", reason="needs the packages of `make setup EXTRAS=serve`")

PROMPTS = ["1 is", "7 is 1 times", "", "12 is 3 times 4; 15 is 3"]
DEVICES, TOPOLOGY = 4, "v4-8"
READY = "ready: "


@contextlib.contextmanager
def serving(run: pathlib.Path, *flags: str) -> Iterator[tuple[list, str]]:
    """Serve a run by two processes; yield (processes, address)."""
    arguments = ["serve.py", f"--workdir={run}", "--port=0", "--rows=3", "--max_length=48", *flags]
    processes = groups.start(arguments, count=2, devices=DEVICES, cache=run.parent)
    try:
        line = ""
        while not line.startswith(READY):
            line = processes[0].stdout.readline()
            assert line, groups.finish(processes)
        yield processes, line.removeprefix(READY).strip()
    finally:
        groups.end_all()


@pytest.mark.slow
def test_two_processes_answer_as_one_device_does_and_end_together(run):
    expected = open_run(run).generate(PROMPTS, max_tokens=12, temperature=0.0)
    with serving(run, f"--topology={TOPOLOGY}", "--config.mesh.model=2") as (processes, url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            how = {"model": "chatting", "temperature": 0, "max_tokens": 12}
            for _ in range(2):
                whole = client.completions.create(prompt=PROMPTS, **how)
                found = [prompt + choice.text for prompt, choice in zip(PROMPTS, whole.choices, strict=True)]
                assert found == expected
            drawn = {client.completions.create(prompt="1", seed=7, **how | {"temperature": 1}).choices[0].text}
            with client.completions.create(prompt="1 is", stream=True, **how | {"max_tokens": 40}) as stream:
                next(iter(stream))  # and then the client disconnects
            drawn |= {client.completions.create(prompt="1", seed=7, **how | {"temperature": 1}).choices[0].text}
            assert len(drawn) == 1
        assert "torus_rows 4.0" in httpx2.get(f"{url}/metrics").text  # of 3, which the mesh does not divide
        processes[1].send_signal(signal.SIGTERM)  # as to all processes of a pod; process 0 decides when all end
        assert httpx2.get(f"{url}/health").status_code == 200
        processes[0].send_signal(signal.SIGTERM)
        ended = groups.finish(processes)
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert [err for _, _, err in ended] == ["", ""]


@pytest.mark.slow
def test_a_process_that_dies_ends_the_server_with_one_line(run):
    with serving(run) as (processes, _):
        processes[1].kill()
        status, _, err = groups.finish(processes)[0]
    assert status == 1
    assert err.strip().splitlines()[-1] == f"error: process 1 of 2 ({socket.gethostname()}) died"
