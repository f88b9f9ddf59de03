# SPDX-License-Identifier: Apache-2.0
"""Who a process is among others is read from the environment, in one way or not at all."""

import pytest

from configs.base import ConfigError
from parallelism import processes
from parallelism.processes import Group

JAX = {"JAX_COORDINATOR_ADDRESS": "10.0.0.2:8476", "JAX_PROCESS_INDEX": "1", "JAX_PROCESS_COUNT": "4"}
TPU = {"TPU_COORDINATOR_ADDRESS": "10.0.0.2", "TPU_WORKER_ID": "1", "TPU_WORKER_COUNT": "4"}
RANK = {"MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "12355", "RANK": "1", "WORLD_SIZE": "4"}


def find(environment: dict[str, str], accelerator: str = "cpu") -> Group | None:
    return processes.find(environment, accelerator, join_seconds=1)


@pytest.mark.parametrize(
    ("environment", "host", "port"),
    [
        (JAX, "10.0.0.2", 8476),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "[fd00::1]:99"}, "fd00::1", 99),
        (TPU, "10.0.0.2", 8476),
        (RANK, "10.0.0.2", 12355),
        ({k: v for k, v in RANK.items() if k != "MASTER_PORT"}, "10.0.0.2", 8476),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "4"}, "a", 1),
        (JAX | TPU, "10.0.0.2", 8476),
        (JAX | {"JAX_PROCESS_ID": "1"}, "10.0.0.2", 8476),
    ],
)
def test_three_families_of_variables_place_a_process(environment, host, port):
    group = find(environment)
    assert (group.host, group.port, group.index, group.count) == (host, port, 1, 4)


def test_without_variables_a_process_is_alone():
    assert find({"HOME": "/root", "TPU_WORKER_ID": "3"}) is None  # the last is on every GKE worker


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"JAX_PROCESS_COUNT": "4"}, "JAX_PROCESS_COUNT=4 without JAX_COORDINATOR_ADDRESS, JAX_PROCESS_INDEX or JAX_"),
        ({"RANK": "1", "WORLD_SIZE": "4"}, "RANK=1, WORLD_SIZE=4 without MASTER_ADDR"),
        ({"TPU_WORKER_COUNT": "4", "TPU_WORKER_ID": "0"}, "without TPU_COORDINATOR_ADDRESS"),
        (
            JAX | {"JAX_PROCESS_INDEX": "4"},
            "JAX_PROCESS_INDEX=4 must be 0 or greater and less than JAX_PROCESS_COUNT=4",
        ),
        (JAX | {"JAX_PROCESS_INDEX": "one"}, "JAX_PROCESS_INDEX=one is not a whole number"),
        (RANK | {"MASTER_PORT": "http"}, "the port of MASTER_ADDR=http is not a whole number"),
        (JAX | {"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_INDEX=1, JAX_PROCESS_ID=2 contradict each other"),
        (JAX | RANK | {"WORLD_SIZE": "8"}, "contradict each other in the count"),
        (JAX | TPU | {"TPU_WORKER_ID": "2"}, "contradict each other in the index"),
        (JAX | RANK, "contradict each other in the port"),
    ],
)
def test_what_is_missing_or_contradicts_is_told_with_all_that_is_there(environment, message):
    with pytest.raises(ConfigError) as error:
        find(environment)
    assert message in str(error.value)
    if "contradict" in message and "RANK" in environment:
        assert "JAX_PROCESS_COUNT=4" in str(error.value) and f"WORLD_SIZE={environment['WORLD_SIZE']}" in str(
            error.value
        )


def test_on_a_tpu_and_under_slurm_jax_finds_the_others(monkeypatch):
    """By the one private function of jax that is used; its arguments and results are those of this version."""
    slurm = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[3-6]", "SLURM_NTASKS": "4", "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "4",
    }  # fmt: skip
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    group = find(slurm)
    assert (group.host, group.index, group.count, group.source) == ("node3", 2, 4, "jax")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert find(slurm | {"SLURM_NTASKS": "1"}) is None
    assert find({}, "tpu") is None or find({}, "tpu").count > 1


def test_outside_a_group_everything_answers_for_one_process():
    assert (processes.index(), processes.count()) == (0, 1)
    assert processes.gather("topic", 3) == [3] and processes.shared("topic", lambda: "x") == "x"
    processes.check_same({"a": 1}, "anything")
    processes.ask_to_stop()
    processes.fail("line", 1)
    processes.leave()
    assert not processes.boundary()
