# SPDX-License-Identifier: Apache-2.0
"""The number of a process and its group are read from the environment; contradictions are errors."""

import os
import subprocess
import sys
import threading

import pytest
from jax._src import clusters

from cluster import group as groups
from cluster import processes
from cluster.group import Group, find_group
from configs.errors import ConfigError
from tests.metadata_server import Metadata
from tests.support import ROOT, free_port

JAX = {"JAX_COORDINATOR_ADDRESS": "10.0.0.2:8476", "JAX_PROCESS_INDEX": "1", "JAX_PROCESS_COUNT": "4"}
TPU = {"TPU_COORDINATOR_ADDRESS": "10.0.0.2", "TPU_WORKER_ID": "1", "TPU_WORKER_COUNT": "4"}
RANK = {"MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "12355", "RANK": "1", "WORLD_SIZE": "4"}


def find(environment: dict[str, str], accelerator: str = "cpu") -> Group | None:
    return find_group(environment, accelerator, join_seconds=1)


@pytest.mark.parametrize(
    ("environment", "host", "port"),
    [
        (JAX, "10.0.0.2", 8476),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "[fd00::1]:99"}, "fd00::1", 99),
        (RANK | {"MASTER_ADDR": "fd00::1"}, "fd00::1", 12355),
        (TPU | {"TPU_COORDINATOR_ADDRESS": "::1"}, "::1", 8476),
        (TPU, "10.0.0.2", 8476),
        (RANK, "10.0.0.2", 12355),
        ({k: v for k, v in RANK.items() if k != "MASTER_PORT"}, "10.0.0.2", 8476),
        ({"JAX_COORDINATOR_ADDRESS": "a:7", "JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "4"}, "a", 7),
        (JAX | TPU, "10.0.0.2", 8476),
        (JAX | {"JAX_PROCESS_ID": "1"}, "10.0.0.2", 8476),
    ],
)
def test_three_families_of_variables_place_a_process(environment, host, port):
    group = find(environment)
    assert (group.host, group.port, group.index, group.count) == (host, port, 1, 4)


LONE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "1"}  # by torchrun --nnodes=1
EIGHT = ",".join(f"unknown:{index}:10.0.0.{index}" for index in range(8))  # as the metadata of a v4-64 lists its hosts


@pytest.fixture
def endpoints(monkeypatch):
    """The metadata server of a TPU VM; returns a function that sets the endpoints of the slice's hosts."""
    server = Metadata()
    threading.Thread(target=server.serve_forever).start()
    monkeypatch.setenv("GCE_METADATA_HOST", server.host)
    yield lambda hosts: server.set("attributes/worker-network-endpoints", hosts)
    server.shutdown()
    server.server_close()


def test_torchrun_for_one_node_on_a_slice_of_eight_hosts_is_named(endpoints):
    """Every host would train a model of its own."""
    endpoints(EIGHT)
    for environment in (LONE, {"TPU_WORKER_HOSTNAMES": "a,b,c,d,e,f,g,h"} | LONE):
        with pytest.raises(ConfigError) as error:
            find(environment, "tpu")
        assert "RANK=0, WORLD_SIZE=1 makes this process a run of its own, but its TPU slice has 8 hosts" in str(
            error.value
        )
        assert "torchrun --nnodes=8 and one --master_addr" in str(error.value)


@pytest.mark.parametrize("nodes", [1, 8])
def test_torchrun_for_each_chip_of_a_host_is_named(nodes):
    """One process drives the four chips of a TPU host; four would take them from each other."""
    environment = LONE | {"RANK": "3", "WORLD_SIZE": str(4 * nodes), "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    with pytest.raises(ConfigError, match=r"LOCAL_WORLD_SIZE=4, .* one process drives all .*; .* --nproc_per_node=1"):
        find(environment, "tpu")
    group = find(environment, "gpu")
    assert group.count == 4 * nodes and group.local_devices == (3,)
    assert find(environment | {"TPU_PROCESS_BOUNDS": "1,1,1"}, "tpu").count == 4 * nodes
    assert find(environment | {"LOCAL_WORLD_SIZE": "1"}, "tpu").count == 4 * nodes


def test_a_process_that_has_one_host_may_be_alone(endpoints):
    """On a slice of one host, without a metadata server's answer, by libtpu's bounds, and without a TPU."""
    assert find(LONE, "tpu").count == 1  # the server has no such value
    endpoints("unknown:0:10.0.0.0")
    assert find(LONE, "tpu").count == 1
    endpoints(EIGHT)
    assert find(LONE, "cpu").count == 1
    assert find(LONE | {"TPU_PROCESS_BOUNDS": "1,1,1"}, "tpu").count == 1
    assert find(LONE | {"RANK": "3", "WORLD_SIZE": "8"}, "tpu").count == 8


@pytest.mark.parametrize("variables", [
        {"TPU_WORKER_HOSTNAMES": "localhost"}, {"TPU_PROCESS_BOUNDS": "1,1,1"},
        {"TPU_PROCESS_BOUNDS": "1,1,1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    ])  # fmt: skip
def test_jax_is_not_asked_for_the_others_of_a_host_that_uses_its_own_chips(monkeypatch, variables):
    """It would ask a metadata server, which a container may not reach, or find all hosts of the slice."""
    monkeypatch.setattr(groups, "_found_by_jax", lambda join_seconds: pytest.fail("jax was asked"))
    assert find(variables, "tpu") is None


@pytest.mark.parametrize("more", [
        {"TPU_WORKER_HOSTNAMES": "a,b"}, {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"},
        {"TPU_WORKER_HOSTNAMES": "a", "TPU_PROCESS_ADDRESSES": "a:8471,b:8471"}, {},
    ])  # fmt: skip
def test_jax_is_asked_for_the_others_of_a_slice(monkeypatch, more):
    monkeypatch.setattr(groups, "_found_by_jax", lambda join_seconds: "group")
    assert find(more, "tpu") == "group"


EIGHT_PROCESSES = """
import os
from cluster import processes
from cluster.group import find_group
group = find_group(os.environ, "cpu", 60)
processes.join(group, group.hub_port, 60, lambda line, status: os._exit(status))
print(processes.gather("rank", os.environ["RANK"]), flush=True)
processes.leave()
"""


def test_eight_processes_meet_by_rank_alone():
    """As on the eight hosts of a v4-64: RANK 0 to 7, WORLD_SIZE 8, one process a host; each knows all of them."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "8"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", EIGHT_PROCESSES], cwd=ROOT, env=os.environ | variables | {"RANK": str(rank)},
            stdout=subprocess.PIPE, text=True,
        ) for rank in range(8)
    ]  # fmt: skip
    said = [process.communicate(timeout=90)[0] for process in started]
    assert [process.returncode for process in started] == [0] * 8
    assert said == [f"{list(map(str, range(8)))}\n"] * 8


def test_without_variables_a_process_is_alone():
    assert find({"HOME": "/root", "TPU_WORKER_ID": "3"}) is None  # the last is on every GKE worker
    assert find({"OMPI_COMM_WORLD_SIZE": "1", "JOB_COMPLETION_INDEX": "0"}) is None


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
        (RANK | {"MASTER_PORT": "http"}, "MASTER_PORT=http is not a whole number"),
        (RANK | {"MASTER_PORT": "-5"}, "MASTER_PORT=-5 must be greater than 1 and at most 65535"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "h:65536"}, "at most 65535"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "grpc://h:99"}, "=grpc://h:99 is not an address; write HOST:PORT"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "a..b:99"}, "=a..b:99 is not an address: no host is called a..b"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4 says that there are other processes, but jax does not"),
        ({"JOB_COMPLETION_INDEX": "2"}, "install the Python package kubernetes"),
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
    assert group.local_devices is None  # alone on its node, so all GPUs are its own
    taken = []
    for job in (7, 8, 9, 4095):  # the last one of jax's 4,096 ports
        monkeypatch.setenv("SLURM_JOB_ID", str(job))
        group = find(slurm | {"SLURM_JOB_ID": str(job)})
        taken += [group.port, group.hub_port, group.study_port]
    assert len(set(taken)) == len(taken) and max(taken) < 65536, "consecutive jobs may share their first node"
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "61500")
    assert find(slurm).port == 61500
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    assert find(slurm).local_devices == (0,)
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert find(slurm | {"SLURM_NTASKS": "1"}) is None


def test_what_jax_stumbles_over_is_told(monkeypatch):
    class Broken:
        @classmethod
        def auto_detect_unset_distributed_params(cls, *arguments):
            raise RuntimeError("no metadata server")

    monkeypatch.setattr(clusters, "ClusterEnv", Broken)
    with pytest.raises(
        ConfigError, match=r"jax does not find the other processes \(no metadata server\); set JAX_COORD"
    ):
        find({}, "tpu")


@pytest.mark.parametrize(
    ("port", "hub_port", "study_port"),
    [(8476, 8477, 8478), (65533, 65534, 65535), (65534, 65535, 65532), (65535, 65534, 65533)],
)
def test_the_hub_of_a_run_and_that_of_a_study_have_ports_beside_the_coordinators(port, hub_port, study_port):
    group = Group("h", port, 0, 2, "")
    assert (group.hub_port, group.study_port) == (hub_port, study_port)
    assert Group("fd00::1", port, 0, 2, "").coordinator == f"[fd00::1]:{port}"


def test_outside_a_group_everything_answers_for_one_process():
    assert (processes.index(), processes.count()) == (0, 1)
    assert processes.gather("topic", 3) == [3] and processes.shared("topic", lambda: "x") == "x"
    processes.check_same({"a": 1}, "anything")
    processes.ask_to_stop()
    processes.fail("line", 1)
    processes.leave()
    assert not processes.boundary()


@pytest.mark.parametrize(
    ("host", "variable", "address"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("192.0.2.1", "", None),
        ("192.0.2.1", "[::1]:8476", "::1"),
        ("h", "0.0.0.0", "0.0.0.0"),
    ],
)
def test_process_0_listens_on_the_address_that_the_others_use_or_says_where(
    monkeypatch, capsys, host, variable, address
):
    """A variable of jax's names another one, as for a machine that others reach through a translated address."""
    monkeypatch.setenv(processes.LISTENING, variable)
    assert processes._listening_address(Group(host, 8476, 0, 2, ""), 8477) == address
    said = capsys.readouterr().err
    assert said.count("\n") == (address is None) and ("ports 8476 and 8477 are open on all addresses" in said) == (
        address is None
    )
