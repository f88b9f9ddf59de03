# SPDX-License-Identifier: Apache-2.0
"""Hosts that share no folder: each process has a home folder of its own, and keeps its part of the checkpoints there.

Real processes on this machine, with four simulated devices between them.
"""

import pathlib
import re
import shutil
import time

import pytest

from checkpointing import host_parts, manifest
from tests import groups
from tests.test_groups import ENDLESS, OF_A_GROUP, RENUMBERED, SIXTH, losses, start_of, wait_for, with_texts

PER_HOST = {"checkpoint.per_host": True, "mesh.data": 1, "mesh.fsdp": 4}  # each process has half of every large array
MODELS = "models"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> pathlib.Path:
    """A folder with texts, for the homes of the hosts."""
    return with_texts(tmp_path_factory.mktemp("hosts"))


@pytest.fixture(autouse=True)
def none_left():
    """No process survives its test."""
    yield
    groups.end_all()


def start(place, homes: str, count: int = 2, changes: dict | None = None, flags=(), numbers=None):
    """Start processes, each with a home folder of its own below `place`/homes, which has its run in ~/models.

    Args:
      numbers: whose home each process has; default: its own.
    """
    values = OF_A_GROUP | PER_HOST | {"data.path": f"{place}/texts/*.txt"} | (changes or {})
    arguments = [*RENUMBERED, f"--workdir=~/{MODELS}", *flags]
    arguments += [f"--config.{key}={value}" for key, value in values.items()]
    variables = {}
    for number, host in enumerate(numbers or range(count)):
        home = place / homes / str(host)
        home.mkdir(parents=True, exist_ok=True)
        variables[number] = {"HOME": str(home)}
    return groups.start(arguments, count=count, cache=place / "cache", devices=4, variables=variables)


def explaining(place, homes: str) -> list:
    """Start two processes that explain a step of the run in their homes."""
    variables = {host: {"HOME": str(place / homes / str(host))} for host in (0, 1)}
    words = [*RENUMBERED, f"--workdir=~/{MODELS}", "--explain_step=3"]
    return groups.start(words, count=2, cache=place / "cache", devices=4, variables=variables)


def checkpoint(place, homes: str, host: int, step: int) -> pathlib.Path:
    return place / homes / str(host) / MODELS / "checkpoints" / str(step)


def arrays_of(place, homes: str, host: int, step: int) -> dict[str, list]:
    """Return the digests of the arrays of a part."""
    files = manifest.read(checkpoint(place, homes, host, step))["files"]
    return {name: facts for name, facts in files.items() if re.search(r"/[0-9.]+$", name)}


def copied(place, homes: str, *steps: int) -> str:
    """Copy the homes of the trained hosts with the checkpoints of some steps; return the name of the copies."""
    for host in (0, 1):
        target = place / homes / str(host) / MODELS
        shutil.copytree(place / "trained" / str(host) / MODELS, target, ignore=shutil.ignore_patterns("metrics.jsonl"))
        for folder in (target / "checkpoints").iterdir():
            if folder.name not in map(str, steps):
                shutil.rmtree(folder)
    return homes


@pytest.fixture(scope="module")
def trained(place) -> pathlib.Path:
    """The homes of two processes; one was killed some steps after the sixth."""
    processes = start(place, "trained", changes=ENDLESS)
    wait_for(place, f"trained/0/{MODELS}", SIXTH, processes)
    deadline = time.monotonic() + groups.SECONDS
    while not all((checkpoint(place, "trained", host, 6) / manifest.NAME).exists() for host in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    processes[1].kill()
    groups.finish(processes)
    return place / "trained"


@pytest.mark.slow
def test_each_host_has_its_half_and_what_a_resume_needs(place, trained):
    halves = [arrays_of(place, "trained", host, 4) for host in (0, 1)]
    whole = halves[0].keys() | halves[1].keys()
    assert all(len(half) < len(whole) for half in halves) and len(halves[0].keys() & halves[1].keys()) > 5  # scalars
    for host in (0, 1):
        part = host_parts.read(checkpoint(place, "trained", host, 4))
        assert part["process"] == host and [name[:9] for name in part["holders"]] == ["process 0", "process 1"]
        files = {path.name for path in (trained / str(host) / MODELS).iterdir()}
        assert {"config.json", "run.json", "ledger.jsonl"} <= files and ("metrics.jsonl" in files) == (host == 0)


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit_from_a_checkpoint_whose_parts_are_all_good(place, trained):
    """That of step 4 has a damaged part on one host, so both take that of step 2."""
    homes = copied(place, "resumed", 2, 4)
    damaged = next(checkpoint(place, homes, 1, 4).glob("state/params.*/[0-9]*"))
    damaged.write_bytes(bytes([damaged.read_bytes()[0] ^ 1]) + damaged.read_bytes()[1:])
    ended = groups.finish(start(place, homes))
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert "checkpoint 4 is damaged: state/params." in ended[0][1] + ended[0][2]
    assert start_of(place, f"{homes}/0/{MODELS}") == 2
    assert losses(place, f"{homes}/0/{MODELS}", after=2) == losses(place, f"trained/0/{MODELS}", after=2)
    for host in (0, 1):
        assert arrays_of(place, homes, host, 6) == arrays_of(place, "trained", host, 6)
        assert checkpoint(place, homes, host, 4).with_name("4.damaged").is_dir()
    told, silent = groups.finish(explaining(place, homes))
    assert told[0] == silent[0] == 0 and "under checkpoint 6" in told[1] and silent[1] == "", (told, silent)


@pytest.mark.slow
def test_when_a_host_is_gone_its_name_is_told_and_nothing_is_trained(place, trained):
    homes = copied(place, "gone", 2, 4)
    alone = groups.finish(start(place, homes, 1))
    shutil.rmtree(place / homes / "1")
    replaced = groups.finish(start(place, homes))
    for ended in (alone, replaced):
        assert {status for status, _, _ in ended} == {2}, ended
        assert all(re.search(r"^error: .*process 1 \(\S+\).*start on", err, re.MULTILINE) for *_, err in ended), ended
    assert sorted(path.name for path in checkpoint(place, homes, 0, 4).parent.iterdir()) == ["2", "4"]
    words = ["generate.py", f"--workdir={place / homes}/0/{MODELS}", "--prompt=1 is"]
    [(status, _, err)] = groups.finish([groups.start_alone(words, cache=place / "cache")])
    assert status == 2 and re.search(
        r"4 is one of the 2 parts of a checkpoint \(process 0 .*`pod.py backup` joins", err
    )


@pytest.mark.slow
def test_joined_parts_are_one_checkpoint_that_another_mesh_continues(place, trained):
    homes = copied(place, "fetched", 2, 4)
    lost = next(checkpoint(place, homes, 0, 4).glob("state/params.*/[0-9]*"))
    lost.unlink()
    folders = [place / homes / str(host) / MODELS for host in (0, 1)]
    joined, left_out = host_parts.join(folders, place / "backup")
    assert joined == [2] and len(left_out) == 1 and f"{lost.parent.name}/{lost.name} is missing" in left_out[0]
    changes = OF_A_GROUP | {"checkpoint.per_host": False, "mesh.data": 2, "mesh.fsdp": 2}
    keys = [f"--config.{key}={value}" for key, value in changes.items()]
    arguments = ["train.py", f"--workdir={place}/backup", f"--config.data.path={place}/texts/*.txt", *keys]
    ended = groups.finish(groups.start(arguments, count=1, cache=place / "cache", devices=4))
    assert [status for status, _, _ in ended] == [0], ended
    assert start_of(place, "backup") == 2
    again, first = losses(place, "backup", after=2), losses(place, f"trained/0/{MODELS}", after=2)
    for step, (loss, norm) in again["trained"].items():
        assert loss == pytest.approx(first["trained"][step][0], rel=1e-5), (step, norm)
