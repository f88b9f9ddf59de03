# SPDX-License-Identifier: Apache-2.0
"""Readers of pods/ to fuzz: what gcloud and hosts answer, and what is kept of a pod on this side."""

import contextlib
import dataclasses
import json
import pathlib
import types
from unittest import mock

from pods import answers, deploy, gcloud, life, records, settings, switches, watch
from pods.checks import readiness
from pods.errors import PodError
from pods.transports import Result
from reporting.display import aligned
from settings import loading
from tests.fuzz.harness import reader

VARIABLES = {"ZONE": "us-central2-b", "PROJECT": "p", "NAME": "torus"}
GIVEN = switches.resolve({}).given
BEAT = {
    "step": 7,
    "phase": "training",
    "code": "abc",
    "time": 1.7e9,
    "host_memory_gib": 1.5,
    "device_memory_gib": [2.0],
}
ANSWER = {
    "alive": True, "pid": 12, "status": None, "stopped": False, "now": 1.7e9, "started": 1.6e9, "commit": "c" * 40,
    "changed": 0, "rss_gib": 1.25, "heartbeat": BEAT,
}  # fmt: skip
LAUNCH = {
    "subcommand": "launch", "words": ["python", "train.py"], "environment": {"A": "b"}, "log": "train_worker",
    "workdir": "gs://b/runs/tiny", "switches": {"given": GIVEN, "on": [], "left_out": {}}, "recipe": "configs/tiny.py",
    "accelerator": "v4-32", "commit": "c" * 40, "changed": [], "time": 1.7e9,
}  # fmt: skip
NODE = {
    "state": "READY", "health": "HEALTHY", "acceleratorType": "v4-16", "networkEndpoints": [{"ipAddress": "10.0.0.2"}],
    "queuedResource": "projects/p/locations/z/queuedResources/q", "metadata": {"a": "b"},
}  # fmt: skip
STEP = {"step": 1, "loss": 2.5, "step_seconds": 0.1, "tokens_per_second": 1e4}
AHEAD = {
    "versions": {"jax": "0.10.2"}, "not_as_locked": [], "corpus": "ab12", "corpus_tokens": 5000,
    "rehearsed": {"fits": True, "step_seconds": 0.5, "memory_gib_per_device": 3.5, "mesh": {"data": 4}},
}  # fmt: skip
CHECKED = {
    "process": 0, "num_processes": 1, "host": "h", "versions": {"jax": "0.10"}, "not_as_locked": [], "local_devices": 4,
    "num_devices": 4, "device_kind": "TPU v4", "simulated": False, "mesh": {"fsdp": 4}, "corpus": "c" * 64,
    "corpus_tokens": 99, "trained": [STEP | {"step": step} for step in (1, 2, 3, 4)], "starts": [0, 3],
    "points": [{"name": "fixed shapes", "verdict": "holds", "evidence": "one program"}],
    "heartbeat": True, "log": True,
}  # fmt: skip


class Refusal(Exception):
    """An answer was passed over; what it would have said counts as not said."""

    exit_status = 1


def _settings(folder: pathlib.Path, *words: str) -> settings.Settings:
    return settings.read(list(words), VARIABLES | {"POD_ROOT": str(folder)})[0]


def _text(content: bytes) -> str:
    return content.decode(errors="replace")  # as pods/calls.py reads


@reader(
    "a file of switches",
    lambda: [json.dumps({"model_size": "small", "enable_causal": False, "switches": GIVEN}).encode()],
)
def read_switches(content: bytes, folder: pathlib.Path) -> None:
    """What is accepted are truth values and a recipe of the workspace; as OPTIMIZATION_CONFIG and by the deployment."""
    file = folder / "c.json"
    file.write_bytes(content)
    resolved, words, search_steps, ahead = deploy.resolve(["deploy", f"--config={file}"], "")
    assert search_steps > 0 and not ahead
    assert resolved.given.keys() == GIVEN.keys() and set(map(type, resolved.given.values())) == {bool}
    name = words[0].removeprefix("--config=configs/").removesuffix(".py")
    assert name in loading.recipe_names() and switches.read_file(str(file)) is not None


@reader("a node that gcloud describes", lambda: [json.dumps(NODE).encode()])
def read_node(content: bytes, folder: pathlib.Path) -> None:
    """What is accepted can be shown, and its hosts counted."""
    pod, typed = gcloud.Gcloud(_settings(folder)), _settings(folder, "--port=1")
    with mock.patch.object(pod, "_gcloud", lambda *_, **__: Result(None, 0, _text(content))):
        found = pod.describe()
        assert found["workers"] == len(found["networkEndpoints"])
        assert all(line.isprintable() for line in life._summary(typed, found).splitlines())
        assert watch.problems(typed, found, []) is not None
        with contextlib.suppress(PodError):  # it has no hosts yet
            assert life.group_variables(typed, pod)["JAX_PROCESS_COUNT"] == str(found["workers"])


@reader("a worker's answer", lambda: [json.dumps(ANSWER).encode(), json.dumps(ANSWER | {"heartbeat": None}).encode()])
def read_worker(content: bytes, folder: pathlib.Path) -> None:
    """What is accepted can be judged and shown as a row of text."""
    typed = _settings(folder)
    worker = watch._worker(0, Result(0, 0, _text(content)), LAUNCH)
    assert watch.problems(typed, {"state": "READY"}, [worker]) is not None and len(worker.error) <= 200
    assert json.dumps(dataclasses.asdict(worker))
    assert all(line.isprintable() for line in aligned(watch._rows([worker])))
    if not worker.reachable:
        raise Refusal("it is told as unreachable")


@reader("launch.json", lambda: [json.dumps(LAUNCH).encode()])
def read_launch(content: bytes, folder: pathlib.Path) -> None:
    """What is accepted has every key."""
    typed = _settings(folder)
    typed.pod_folder.mkdir(parents=True)
    (typed.pod_folder / "launch.json").write_bytes(content)
    record = records.read(typed)
    assert record.keys() >= LAUNCH.keys() and all(isinstance(word, str) for word in record["words"])
    assert watch._heading(typed, None, record)


def _created() -> list[bytes]:
    made = _settings(pathlib.Path("/nowhere"), "--queued", "--spot", "--slices=2")
    return [json.dumps({name: getattr(made, name) for name in records.CREATION}).encode()]


@reader("created.json", _created)
def read_created(content: bytes, folder: pathlib.Path) -> None:
    """What is accepted are settings of their types."""
    typed = _settings(folder)
    typed.pod_folder.mkdir(parents=True)
    (typed.pod_folder / "created.json").write_bytes(content)
    found = records.as_created(typed)
    assert all(type(getattr(found, name)) is type(getattr(typed, name)) for name in records.CREATION)


@reader("a host's report of its check", lambda: [b"CHECKED " + json.dumps(CHECKED).encode()])
def read_check(content: bytes, folder: pathlib.Path) -> None:
    """Of what is accepted every item of the table can be judged."""
    _judge(content, folder, answers.Checked, busy=[])


@reader("a busy host's report", lambda: [b"CHECKED " + json.dumps(AHEAD).encode()])
def read_ahead(content: bytes, folder: pathlib.Path) -> None:
    """Of what is accepted every item of the table of a busy pod can be judged."""
    _judge(content, folder, answers.Ahead, busy=[0])


def _judge(content: bytes, folder: pathlib.Path, schema: type, busy: list[int]) -> None:
    outputs = [Result(0, 0, _text(content))]
    checks = [readiness._printed(output, schema) for output in outputs]
    typed = _settings(folder, "--workdir=/runs/mine", "--accel=v4-8")
    pod = types.MappingProxyType({"state": "READY", "health": "HEALTHY", "workers": 1})
    found = readiness.Found(typed, pod, [], switches.resolve({}), "/runs/mine", outputs, checks, busy=busy)
    names = [name for name in (readiness.BUSY if busy else readiness.ITEMS) if name != "code"]  # which asks git
    assert readiness.markdown(typed, [readiness.judge(name, found) for name in names], found.first.get("points", []))
    if not found.answers:
        raise Refusal("it did not get there")


@reader("a deployment's report", lambda: [json.dumps({"switches": {"given": GIVEN}}).encode()])
def read_report(content: bytes, folder: pathlib.Path) -> None:
    """What is accepted are truth values."""
    found = deploy._switches_of(_text(content))
    if found is None:
        raise Refusal("it is none")
    assert set(map(type, found.values())) <= {bool}
