# SPDX-License-Identifier: Apache-2.0
"""serve.py as the clients of other servers meet it: the official `openai` client over HTTP, and nothing between."""

import concurrent.futures
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import types

import httpx2
import numpy as np
import pytest

from configs.errors import ConfigError
from tests import warm
from tests.serving.conftest import SECRET, serving
from tests.support import ROOT
from tests.test_train import command, finish
from trained_run import open_run

openai = pytest.importorskip("openai", reason="needs the packages of `make setup EXTRAS=serve`")
pytest.importorskip("uvicorn", reason="needs the packages of `make setup EXTRAS=serve`")
testclient = pytest.importorskip("starlette.testclient", reason="needs the packages of `make setup EXTRAS=serve`")

PROMPTS = ["1 is", "7 is 1 times", "what is the answer?", "so \u00e9\U0001f600", ""]
HELLO = [{"role": "user", "content": "what is 2 + 3?"}]


@pytest.fixture(scope="module")
def offline(chatting):
    """The same run, used from Python."""
    return open_run(chatting.folder)


@pytest.fixture(scope="module")
def client(chatting):
    """A client of the server that chats."""
    with openai.OpenAI(base_url=f"{chatting.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def keyed(completing):
    """A client of the server that needs a key."""
    with openai.OpenAI(base_url=f"{completing.url}/v1", api_key=SECRET, max_retries=0) as client:
        yield client


def greedy(client, prompt, **how):
    return client.completions.create(model="chatting", prompt=prompt, temperature=0, **{"max_tokens": 20} | how)


def refused(function, status: int = 400) -> dict:
    """Return the error of a call that the server refuses."""
    with pytest.raises(openai.APIStatusError) as caught:
        function()
    assert caught.value.status_code == status, caught.value
    assert caught.value.body.keys() == {"message", "type", "param", "code"}
    return caught.value.body


def metrics(served, **headers) -> dict[str, float]:
    """Return {name with labels: value} of /metrics."""
    lines = httpx2.get(f"{served.url}/metrics", headers=headers).raise_for_status().text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_completions_are_those_of_the_engine_alone(client, offline):
    expected = offline.generate(PROMPTS, max_tokens=20, temperature=0.0)
    whole = greedy(client, PROMPTS)
    assert [prompt + choice.text for prompt, choice in zip(PROMPTS, whole.choices, strict=True)] == expected
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3, 4]
    assert all(choice.finish_reason in ("length", "stop") for choice in whole.choices)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        at_once = list(pool.map(lambda prompt: prompt + greedy(client, prompt).choices[0].text, PROMPTS * 3))
    assert at_once == expected * 3


def test_a_stream_adds_up_to_the_answer_and_ends_with_its_usage(client):
    whole = greedy(client, PROMPTS[:2], n=2)
    texts, reasons = dict.fromkeys(range(4), ""), {}
    chunks = list(greedy(client, PROMPTS[:2], n=2, stream=True, stream_options={"include_usage": True}))
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.text
        reasons |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert len(chunks) > 20 and chunks[-1].usage == whole.usage and not chunks[-1].choices
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.usage.completion_tokens == 4 * 20 and len({chunk.id for chunk in chunks}) == 1


def test_chats_are_answered_as_generate_does(client, offline):
    [expected] = offline.answer([HELLO[0]["content"]], max_tokens=12, temperature=0.0)
    how = {"model": "chatting", "messages": HELLO, "temperature": 0}
    whole = client.chat.completions.create(**how, max_completion_tokens=12)
    assert whole.choices[0].message.content == expected and whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**how, max_tokens=12, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    talk = [
        {"role": "system", "content": "Add."}, *HELLO, whole.choices[0].message,
        {"role": "user", "content": [{"type": "text", "text": "and 4?"}]},
    ]  # fmt: skip
    assert client.chat.completions.create(**how | {"messages": talk}, max_tokens=3).usage.completion_tokens <= 3
    longest = client.chat.completions.create(**how)  # without a limit it goes on as long as the row
    assert longest.usage.total_tokens == 96 or longest.choices[0].finish_reason == "stop"


def test_log_probabilities_are_the_models(client, offline):
    [text] = PROMPTS[:1]
    tokens = [offline.tokenizer.end_of_document, *offline.tokenizer.encode(text)]
    one = client.completions.create(model="chatting", prompt=tokens, max_tokens=3, temperature=0, logprobs=4)
    logits = offline.logits(np.array([tokens]))[0, -1, : offline.tokenizer.vocab_size]
    log_probs = np.sort(logits - np.logaddexp.reduce(offline.logits(np.array([tokens]))[0, -1]))[::-1]
    found = one.choices[0].logprobs
    assert found.token_logprobs[0] == pytest.approx(log_probs[0], abs=1e-4)
    assert sorted(found.top_logprobs[0].values(), reverse=True) == pytest.approx(log_probs[:4].tolist(), abs=1e-4)
    assert len(found.tokens) == len(found.text_offset) == 3
    chat = client.chat.completions.create(
        model="chatting", messages=HELLO, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2, stream=True
    )
    entries = [entry for chunk in chat for entry in (chunk.choices[0].logprobs or EMPTY).content]
    assert len(entries) == 4 and all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)


class EMPTY:
    """The log-probabilities of a part without tokens."""

    content = ()


def test_stop_strings_bias_and_seeds(client):
    text = greedy(client, "7 is").choices[0].text
    stop = text[5:8]
    cut = greedy(client, "7 is", stop=[stop, "never in it"]).choices[0]
    assert cut.text == text[: text.index(stop)] and cut.finish_reason == "stop"
    streamed = greedy(client, "7 is", stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut.text
    assert greedy(client, [65], max_tokens=3, logit_bias={"70": 100}).choices[0].text == 3 * offline_token(client, 70)
    how = {"model": "chatting", "prompt": "1", "max_tokens": 12, "extra_body": {"top_k": 20, "min_p": 0.01}}
    several = client.completions.create(**how, seed=5, n=3)
    again = client.completions.create(**how, seed=6, n=2)
    assert [choice.text for choice in several.choices[1:]] == [choice.text for choice in again.choices]
    unseeded = {client.completions.create(**how).choices[0].text for _ in range(4)}
    assert len(unseeded) > 1


def offline_token(client, token: int) -> str:
    """Return a token's text."""
    return greedy(client, [token], max_tokens=1, logit_bias={str(token): 100}).choices[0].text


def test_a_client_that_disconnects_frees_its_row(chatting, client):
    endless = {"model": "chatting", "messages": HELLO, "temperature": 0, "logit_bias": {"70": 100}}
    with client.chat.completions.create(**endless, stream=True) as stream:
        next(iter(stream))
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.02).chat.completions.create(**endless, n=4)
    end = time.monotonic() + 10
    while metrics(chatting)["torus_requests_in_flight"] or metrics(chatting)["torus_rows_used"]:
        assert time.monotonic() < end
    assert 'path="/v1/chat/completions",status="499"' in httpx2.get(f"{chatting.url}/metrics").text


MISTAKES = [  # changes of a valid request, status, part of the message, parameter
    ({"prompt": "x", "top_logprobs": 1}, "top_logprobs is not a parameter of this endpoint", "top_logprobs"),
    ({"prompt": "x", "temprature": 1}, "temprature is not a parameter; did you mean temperature?", "temprature"),
    ({"prompt": "x", "temperature": "hot"}, "temperature should be a valid number, not 'hot'", "temperature"),
    ({"prompt": "x", "temperature": -1}, "temperature should be greater than or equal to 0, not -1", "temperature"),
    ({"prompt": 5}, "prompt should be a string, up to 128 strings, token ids, or up to 128 lists of", "prompt"),
    ({"prompt": "x", "n": 0}, "n should be greater than or equal to 1, not 0", "n"),
    ({"prompt": "x", "n": 100}, "the request asks for 100 answers; at most 68 decode or wait here", "n"),
    ({"prompt": "x", "stop": ""}, "stop ", "stop"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens should be a valid integer, not True", "max_tokens"),
    ({"prompt": "x", "logit_bias": {"999": 1}}, "logit_bias has the token 999; ids are from 0 to 2", "logit_bias"),
    ({"prompt": "x", "presence_penalty": 1}, "presence_penalty is not supported by this", "presence_penalty"),
    ({"prompt": []}, "prompt ", "prompt"),
    ({"prompt": [1, "x"]}, "prompt ", "prompt"),
    ({"prompt": [1, 5000]}, "the prompt has the token 5000; ids are less than", "prompt"),
    ({}, "prompt is missing; the request needs it", "prompt"),
    ({"prompt": "x", "model": "gpt"}, "the model gpt is not served here; use chatting", "model"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("given", "message", "param"), MISTAKES, ids=[message for _, message, _ in MISTAKES])
def test_a_wrong_parameter_is_one_line(chatting, given, message, param):
    answer = httpx2.post(f"{chatting.url}/v1/completions", json=given)
    assert answer.status_code == (404 if param == "model" else 400)
    error = answer.json()["error"]
    assert message in error["message"] and error["param"] == param and "\n" not in error["message"]


def test_what_is_no_request_is_one_line(chatting, client):
    post = lambda **what: httpx2.post(f"{chatting.url}/v1/completions", **what)  # noqa: E731
    kind = {"Content-Type": "application/json"}
    for answer, status, message in [
        (post(content=b"{", headers=kind), 400, "the body is not JSON: EOF while parsing"),
        (post(content=b"[1]", headers=kind), 400, "the body should be an object, not [1]"),
        (post(content=b"{}"), 400, "send Content-Type: application/json"),
        (post(content=b" " * (9 << 20), headers=kind), 413, "the body is larger than 8,388,608 bytes"),
        (httpx2.get(f"{chatting.url}/v1/completions"), 405, "GET /v1/completions is not possible; use POST"),
        (
            httpx2.get(f"{chatting.url}/v2"),
            404,
            "GET /v2 is not served here; there are /, /health, /metrics, /v1/models, ",
        ),
    ]:
        assert answer.status_code == status and message in answer.json()["error"]["message"]
    foreign = httpx2.get(f"{chatting.url}/v1/models", headers={"Host": "elsewhere.example"})
    assert foreign.status_code == 400  # the page of another site, by a name that it points here
    error = refused(lambda: client.chat.completions.create(model="chatting", messages=[{"role": "x", "content": "y"}]))
    assert error["param"] == "messages[0].role"


def test_a_prompt_that_is_too_long_says_by_how_much(client):
    error = refused(lambda: greedy(client, [65] * 90, max_tokens=20))
    assert "90 tokens and the answer up to 20: together 110, which is 14 more than the 96 tokens" in error["message"]
    assert error["message"].endswith("use max_tokens of at most 6") and error["code"] == "context_length_exceeded"
    assert greedy(client, [65] * 90, max_tokens=6).choices
    error = refused(lambda: client.chat.completions.create(model="chatting", messages=HELLO * 30))
    assert error["message"].endswith("shorten the prompt") and error["param"] == "messages"


def test_the_model_health_and_metrics(chatting, client):
    [model] = client.models.list()
    assert (model.id, model.abilities, model.max_model_len) == ("chatting", ["completions", "chat"], 96)
    assert client.models.retrieve("chatting").id == "chatting"
    assert refused(lambda: client.models.retrieve("other"), 404)["code"] == "model_not_found"
    assert httpx2.get(f"{chatting.url}/health").json() == {"status": "ok"}
    before = metrics(chatting)
    used = greedy(client, "1 is", max_tokens=7).usage
    after = metrics(chatting)
    for name, count in [
        ("torus_prompt_tokens_total", used.prompt_tokens), ("torus_completion_tokens_total", 7),
        ("torus_first_token_seconds_count", 1), ("torus_answer_seconds_count", 1),
        ('torus_requests_total{path="/v1/completions",status="200"}', 1),
    ]:  # fmt: skip
        assert after[name] - before.get(name, 0) == count
    assert after["torus_rows"] == 4
    assert chatting.said[1:] == ["chatting: completions, chat", f"ready: {chatting.url}"]


def test_a_client_that_goes_before_its_request_is_complete_is_no_failure_of_the_server(chatting):
    before = metrics(chatting)
    name = 'torus_requests_total{path="/v1/completions",status="499"}'
    with socket.create_connection(chatting.url.removeprefix("http://").split(":")) as connection:
        head = "POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"
        connection.sendall("\r\n".join([*head, "Content-Length: 90", "", '{"prompt": "1']).encode())
    deadline = time.time() + 30
    while metrics(chatting).get(name, 0) != before.get(name, 0) + 1:
        assert time.time() < deadline, "the request is not counted"


def test_a_failure_of_the_server_is_counted():
    from starlette.routing import Route

    from serving.app import make_app
    from serving.metrics import Metrics

    async def fail(request):
        raise RuntimeError("a bug")

    counts = Metrics({})
    service = types.SimpleNamespace(
        name="m", abilities=[], max_length=1, metrics=counts, routes=lambda: [Route("/v1/fail", fail)]
    )
    client = testclient.TestClient(make_app(service, ""), base_url="http://localhost", raise_server_exceptions=False)
    assert client.get("/v1/fail").status_code == 500
    assert 'torus_requests_total{path="/v1/fail",status="500"} 1.0' in counts.text().decode()


def test_a_key_is_needed_and_not_shown(completing, keyed):
    assert keyed.models.list().data[0].abilities == ["completions"]
    for key, message in [("wrong", "the key is wrong"), (SECRET[:-1], "the key is wrong")]:
        stranger = keyed.with_options(api_key=key)
        with pytest.raises(openai.AuthenticationError, match=message):
            stranger.completions.create(model="completing", prompt="x")
    for path in ("/v1/models", "/metrics", "/v2"):
        answer = httpx2.get(completing.url + path)
        assert answer.status_code == 401 and "the request has no key" in answer.json()["error"]["message"]
    assert httpx2.get(f"{completing.url}/health").status_code == httpx2.get(completing.url).status_code == 200
    assert completing.said[1].startswith("completing: completions; no chat, because ") and SECRET not in str(completing)


def test_a_model_without_conversations_is_not_asked(keyed):
    error = refused(lambda: keyed.chat.completions.create(model="completing", messages=HELLO))
    assert "was not trained on conversations, and its tokenizer has no chat template" in error["message"]


def test_what_too_many_ask_is_refused_until_a_row_is_free(completing, keyed):
    """One request runs and one waits. Some of many others are asked to try again later, and the client does."""
    how = {"model": "completing", "prompt": "1 is", "temperature": 0, "max_tokens": 30}
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        headers = {"Authorization": f"Bearer {SECRET}"}
        post = lambda _: httpx2.post(f"{completing.url}/v1/completions", json=how, headers=headers)  # noqa: E731
        answers = list(pool.map(post, range(24)))
        patient = keyed.with_options(max_retries=50)
        texts = {one.choices[0].text for one in pool.map(lambda _: patient.completions.create(**how), range(4))}
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused and {answer.status_code for answer in answers} == {200, 429}
    assert {answer.headers["Retry-After"] for answer in refused} == {"1"}
    assert refused[0].json()["error"]["type"] == "rate_limit_error" and len(texts) == 1


def test_sigterm_finishes_what_runs_and_ends_with_status_0(silent_run):
    with serving(silent_run, "--rows=1", "--max_length=40", "--grace_seconds=20") as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        how = {"model": "completing", "prompt": "1 is", "temperature": 0, "max_tokens": 36}
        whole = client.completions.create(**how).choices[0].text
        stream = iter(client.completions.create(**how, stream=True))
        begun = next(stream).choices[0].text
        served.process.send_signal(signal.SIGTERM)
        assert begun + "".join(chunk.choices[0].text for chunk in stream) == whole
        status, out, err = finish(served.process)
        client.close()
    assert (status, err) == (0, "") and out == "stopping: running requests have 20 s to finish\n"
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{served.url}/health")


PLANTED = """
import runpy, sys, time
from inference.batching import Batch

step = Batch.step

def failing(self):
    if len(self.running) + len(self.waiting) < 2:  # both requests of the test have to be in it
        return time.sleep(0.01) or []
    if any(len(one.tokens) > 3 for one in self.running):
        raise FloatingPointError("planted")
    return step(self)

Batch.step = failing
sys.argv = ["serve.py", *sys.argv[1:]]
runpy.run_path("serve.py", run_name="__main__")
"""


@pytest.mark.slow
def test_a_step_that_fails_ends_the_requests_and_the_server(silent_run):
    """A whole answer is the API's error, and a stream ends with it; after a traceback, the last line says what."""
    flags = [f"--workdir={silent_run}", "--port=0", "--rows=2", "--max_length=40"]
    server = command("-c", PLANTED, *flags, cache=silent_run.parent)
    while not (line := server.stdout.readline()).startswith("ready: "):
        assert line, finish(server)
    url, how = f"{line.split()[1]}/v1/completions", {"prompt": "1 is", "max_tokens": 20}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ask = functools.partial(httpx2.post, url, timeout=60)  # on a busy machine
        answers = [pool.submit(ask, json=how | {"stream": stream}) for stream in (False, True)]
        whole, stream = (answer.result() for answer in answers)
    status, _, err = finish(server)
    error = {"message": "the server failed and ends; its last line says why", "type": "server_error"}
    error |= {"param": None, "code": "failed"}
    assert (whole.status_code, whole.json()) == (500, {"error": error})
    assert json.loads(stream.text.strip().rpartition("data: ")[2]) == {"error": error}
    assert status == 1 and err.splitlines()[-1].startswith("error: FloatingPointError: planted (")


def test_a_signal_before_the_server_is_ready_ends_it_with_status_0(silent_run):
    """Promptly: programs of a length that no other test has take longer to compile."""
    server = command("serve.py", f"--workdir={silent_run}", "--port=0", "--max_length=57", cache=silent_run.parent)
    assert " at step " in server.stdout.readline()  # restored
    server.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert finish(server) == (0, "", "stopped before the server was ready\n")
    assert time.monotonic() - began < 5


def test_events_are_json_of_their_own(chatting):
    body = {"prompt": "1", "max_tokens": 2, "stream": True, "temperature": 0}
    answer = httpx2.post(f"{chatting.url}/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events)


STARTS = [  # flags, last line of stderr
    ("--port=BUSY", "--host=127.0.0.1 --port=BUSY: Address already in use; use another --port, or an address of th"),
    ("--host=1.2.3.4 --api_key_file=KEY", "--host=1.2.3.4 --port=0: Cannot assign requested address; use another"),
    (
        "--host=0.0.0.0",
        "--host=0.0.0.0 lets other machines in, so a key is needed: --api_key_file=FILE, or the environ",
    ),
    ("--api_key_file=KEY.missing", "cannot be read ("),
    ("--api_key_file=/dev/null", "--api_key_file=/dev/null is empty; write the key into it"),
    ("--max_length=97", "--max_length=97 exceeds model.max_length=96; use at most 96"),
    ("--max_length=1", "--max_length=1 has no room for a prompt with an answer; use at least 2"),
    ("--rows=0", "--rows=0: 0 is not an integer in the range [1, 4096]"),
    ("--prot=1", "--prot is not a flag; did you mean --port"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "message"), STARTS, ids=[flags for flags, _ in STARTS])
def test_a_server_that_cannot_start_says_why_in_one_line(completing, flags, message):
    busy, key = completing.url.rpartition(":")[2], completing.folder.with_name("key")
    words = flags.replace("BUSY", busy).replace("KEY", str(key)).split()
    started = command("serve.py", f"--workdir={completing.folder}", "--port=0", *words, cache=completing.folder.parent)
    status, out, err = finish(started)
    assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    assert message.replace("BUSY", busy) in err


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_that_other_users_can_read_or_guess_is_refused(tmp_path, monkeypatch, mode):
    from serving.server import KEY_VARIABLE, read_key  # which need the extra

    file, short = tmp_path / "key", SECRET[:15]
    file.write_text(SECRET)
    file.chmod(mode)
    refused = f"^--api_key_file={file} can be read by other users; run chmod 600 {file}, or set {KEY_VARIABLE}$"
    with pytest.raises(ConfigError, match=refused):
        read_key(str(file), "127.0.0.1")
    file.chmod(0o600)
    assert read_key(str(file), "0.0.0.0") == SECRET
    file.write_text(short)
    monkeypatch.setenv(KEY_VARIABLE, short)
    for given in (str(file), ""):
        with pytest.raises(ConfigError, match="has fewer than 16 characters, so it can be guessed; make one with"):
            read_key(given, "0.0.0.0")
        assert read_key(given, "127.0.0.1") == short


def test_without_the_extra_it_says_how_to_install_it(completing):
    program = (
        "import runpy, sys; sys.modules['uvicorn'] = None; "
        f"sys.argv = ['serve.py', '--workdir={completing.folder}']; runpy.run_path('serve.py', run_name='__main__')"
    )
    status, out, err = finish(warm.start(["-c", program], dict(os.environ)))
    assert (status, out) == (2, "")
    assert err == "error: serve.py needs the package uvicorn: run `make setup EXTRAS=serve`\n"


def test_what_the_page_of_the_docs_shows_runs(chatting, capsys):
    text = (ROOT / "docs" / "serving.md").read_text().replace("http://127.0.0.1:8000", chatting.url)
    [program] = re.findall(r"^```python\n(from openai .*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(program.replace('model="tiny"', 'model="chatting"'), {})
    assert len(capsys.readouterr().out) > 20
    commands = re.findall(r"curl (\S+)/v1/(\w+) .*?-d '(.*?)'$", text, re.MULTILINE | re.DOTALL)
    assert [name for _, name, _ in commands] == ["completions", "puzzles"]
    answer = httpx2.post(f"{chatting.url}/v1/completions", json=json.loads(commands[0][2]))
    assert answer.status_code == 200
    from serving.requests import PuzzleRequest  # which needs the extra

    assert PuzzleRequest.model_validate_json(commands[1][2]).supervision_steps == 4


def test_a_model_has_the_name_of_its_folder_also_if_it_is_served_from_there():
    code = "from pathlib import Path; import serve; "
    code += "print(*map(serve.name_of, (Path('.'), Path('runs/tiny'), Path('runs/..'), 'gs://runs/mine/')))"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert said.stdout.split() == [ROOT.name, "tiny", ROOT.name, "mine"], said.stderr
