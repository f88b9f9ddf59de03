# SPDX-License-Identifier: Apache-2.0
"""The platform and the number of devices are settled by what is attached, asked for and already set."""

import os
import pathlib
import subprocess
import sys
import threading

import jax
import pytest

from cluster import startup
from cluster.hub import RunError
from configs import topologies
from configs.errors import ConfigError
from tests.metadata_server import Metadata
from tests.support import ROOT


@pytest.fixture
def machine(monkeypatch):
    """A machine without accelerator, and an environment that says nothing; both are put back."""
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # remembers what was there, also for what the code under test sets
        monkeypatch.delenv(name)
    monkeypatch.setattr(startup.glob, "glob", lambda pattern: [])
    return monkeypatch


@pytest.fixture
def metadata_host(monkeypatch):
    """A metadata server, as machines of Compute Engine have one."""
    with Metadata() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", server.host)
        yield server
        server.shutdown()


def attach(machine, *device_files: str) -> None:
    machine.setattr(
        startup.glob, "glob", lambda pattern: [f for f in device_files if f.startswith(pattern.split("[")[0])]
    )
    machine.setattr(startup.ctypes, "CDLL", lambda name: name)


def test_a_gpu_whose_driver_does_not_load_is_not_used(machine):
    attach(machine, "/dev/nvidia0")

    def missing(name: str):
        raise OSError(f"{name}: cannot open shared object file")

    machine.setattr(startup.ctypes, "CDLL", missing)
    assert startup.attached_accelerator() == "cpu"


@pytest.mark.parametrize(
    ("device_files", "asked", "found"),
    [
        ((), None, "cpu"),
        ((), "cpu", "cpu"),
        (("/dev/accel0",), None, "tpu"),
        (("/dev/accel0",), "tpu", "tpu"),
        (("/dev/accel0",), "cpu", "cpu"),
        (("/dev/nvidia0",), None, "gpu"),
        (("/dev/nvidia0",), "cuda,cpu", "gpu"),
        (("/dev/dxg",), None, "gpu"),
    ],
)
def test_what_is_attached_counts_unless_the_cpu_is_asked_for(machine, device_files, asked, found):
    attach(machine, *device_files)
    if asked:
        machine.setenv("JAX_PLATFORMS", asked)
    assert startup.attached_accelerator() == found


@pytest.mark.parametrize(("device_files", "asked"), [((), "tpu"), ((), "cuda"), (("/dev/nvidia0",), "tpu")])
def test_asking_for_an_accelerator_that_is_not_there_is_an_error(machine, device_files, asked):
    attach(machine, *device_files)
    machine.setenv("JAX_PLATFORMS", asked)
    with pytest.raises(ConfigError, match=f"JAX_PLATFORMS={asked.replace('cuda', 'gpu')}, but this machine has no"):
        startup.attached_accelerator()


@pytest.mark.parametrize(("topology", "devices"), [("cpu", 1), ("cpu-8", 8), ("v4-8", 4), ("v4-32", 16), ("v4-64", 32)])
def test_without_accelerator_a_topology_has_as_many_simulated_devices_as_chips(machine, topology, devices):
    startup.choose_platform(topologies.get(topology), "cpu", pathlib.Path("/cache"))
    assert startup.simulate(topologies.get(topology).chips) == devices
    assert f"--xla_force_host_platform_device_count={devices}" in os.environ["XLA_FLAGS"].split()
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "/cache/compiled"


@pytest.mark.parametrize(
    ("name", "value", "devices"),
    [
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=6", 6),
        ("JAX_NUM_CPU_DEVICES", "5", 5),
        ("XLA_FLAGS", "", 1),
    ],
)
def test_without_topology_the_environment_says_how_many_devices(machine, name, value, devices):
    machine.setenv(name, value)
    assert startup.simulate(0) == devices
    assert os.environ["XLA_FLAGS"].count("device_count") == 1 and f"device_count={devices}" in os.environ["XLA_FLAGS"]
    assert "JAX_NUM_CPU_DEVICES" not in os.environ  # jax refuses it together with the flag


def test_what_the_user_set_is_kept_and_the_rest_is_patient(machine):
    machine.setenv("XLA_FLAGS", "--xla_dump_to=/x --xla_cpu_collective_timeout_seconds=7")
    machine.setenv("JAX_COMPILATION_CACHE_DIR", "/mine")
    startup.choose_platform(topologies.get("cpu-8"), "cpu", pathlib.Path("/cache"))
    startup.simulate(8)
    flags = os.environ["XLA_FLAGS"].split()
    assert "--xla_dump_to=/x" in flags
    assert [flag for flag in flags if "collective_timeout_seconds" in flag] == [
        "--xla_cpu_collective_timeout_seconds=7"
    ]
    assert any(flag.startswith("--xla_cpu_collective_call_terminate_timeout_seconds=") for flag in flags)
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "/mine"


def test_on_an_accelerator_nothing_is_simulated(machine):
    startup.choose_platform(topologies.get("v4-8"), "tpu", pathlib.Path("/cache"))
    startup.choose_platform(None, "gpu", pathlib.Path("/cache"))
    assert "XLA_FLAGS" not in os.environ and "JAX_PLATFORMS" not in os.environ


@pytest.mark.parametrize(("topology", "accelerator"), [("v4-8", "gpu"), ("h100-8", "tpu"), ("cpu-8", "tpu")])
def test_a_topology_of_another_kind_than_the_attached_one_is_an_error(machine, topology, accelerator):
    with pytest.raises(ConfigError, match=f"--topology={topology} is a .* slice, but a {accelerator} is attached"):
        startup.choose_platform(topologies.get(topology), accelerator, pathlib.Path("/cache"))


@pytest.mark.parametrize(
    ("topology", "accelerator", "simulated"),
    [
        ("v4-8", "cpu", True),
        ("h100-8", "cpu", True),
        ("cpu-8", "cpu", False),
        ("v4-8", "tpu", False),
        (None, "cpu", False),
    ],
)
def test_a_simulation_is_a_topology_with_accelerators_on_a_machine_without(topology, accelerator, simulated):
    assert startup.is_simulation(topology and topologies.get(topology), accelerator) is simulated


def test_a_tpu_vm_without_chips_is_named_and_not_simulated(machine, metadata_host):
    """Its software version is of another TPU, for example; what it costs must not be paid for its CPU."""
    attach(machine)
    metadata_host.set("attributes/accelerator-type", "v6e-8")
    with pytest.raises(ConfigError, match=r"this machine is a TPU VM \(v6e-8\), but shows no chips"):
        startup.attached_accelerator()
    machine.setenv("JAX_PLATFORMS", "cpu")
    assert startup.attached_accelerator() == "cpu"


def test_a_machine_of_compute_engine_without_a_tpu_is_a_cpu(machine, metadata_host):
    attach(machine)
    assert startup.attached_accelerator() == "cpu"


@pytest.mark.parametrize("chosen", [{}, {"TPU_VISIBLE_DEVICES": "2"}, {"TPU_PROCESS_BOUNDS": "1,1,1"}])
def test_one_chip_is_used_unless_others_are_chosen(monkeypatch, chosen):
    monkeypatch.setattr(os, "environ", dict(chosen))
    startup.use_one_device("tpu")
    assert os.environ == (chosen or startup.ONE_DEVICE["tpu"])


def test_commands_of_one_device_leave_the_other_gpus_alone(monkeypatch):
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "4,5"})
    startup.use_one_device("gpu")
    assert os.environ["JAX_CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize(
    ("environment", "workers", "shares"),
    [
        ({}, 2, ["0,1", "2,3"]), ({}, 3, ["0", "1", "2"]), ({}, 5, None),
        ({"CUDA_VISIBLE_DEVICES": "6,7,"}, 2, ["0", "1"]), ({"CUDA_VISIBLE_DEVICES": "6"}, 2, None),
        ({"JAX_CUDA_VISIBLE_DEVICES": "1,3"}, 2, ["1", "3"]),
    ],
)  # fmt: skip
def test_each_worker_of_a_study_has_gpus_of_its_own(monkeypatch, environment, workers, shares):
    monkeypatch.setattr(startup, "attached_accelerator", lambda: "gpu")
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(startup.glob, "glob", lambda pattern: [f"/dev/nvidia{number}" for number in range(4)])
    if shares:
        found = startup.shares_of_devices(workers)
        assert [variables["JAX_CUDA_VISIBLE_DEVICES"] for variables in found] == shares
    else:
        with pytest.raises(ConfigError, match=f"--workers={workers}: at most .* since each worker takes a GPU"):
            startup.shares_of_devices(workers)


def test_a_topology_has_the_gpus_of_one_worker(monkeypatch):
    monkeypatch.setattr(startup, "attached_accelerator", lambda: "gpu")
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert len(startup.shares_of_devices(2, topologies.get("h200-1"))) == 2
    with pytest.raises(ConfigError, match="a trial has 1 of the GPUs here, and --topology=h100-8 has 8; omit"):
        startup.shares_of_devices(2, topologies.get("h100-8"))


def test_two_trials_do_not_share_the_chips_of_a_tpu_host(monkeypatch):
    monkeypatch.setattr(startup, "attached_accelerator", lambda: "tpu")
    assert startup.shares_of_devices(1) == [{}]
    with pytest.raises(ConfigError, match="--workers=2: a trial uses all chips of this host"):
        startup.shares_of_devices(2)


@pytest.mark.parametrize(("vendor", "found"), [("0x1ae0\n", "tpu"), ("0x8086\n", "cpu")])
def test_a_passed_through_device_is_a_tpu_where_google_made_one(machine, tmp_path, vendor, found):
    (tmp_path / "vendor").write_text(vendor)
    files = {"/dev/vfio/[0-9]*": ["/dev/vfio/0"], "/sys/bus/pci/devices/*/vendor": [str(tmp_path / "vendor")]}
    machine.setattr(startup.glob, "glob", lambda pattern: files.get(pattern, []))
    assert startup.attached_accelerator() == found


@pytest.mark.parametrize(
    ("asked", "installed", "left"),
    [
        ("", "jax_cuda12_plugin", "cuda,cpu"),
        ("", "jax_cuda13_plugin", "cuda,cpu"),
        ("gpu", "jax_cuda12_plugin", "gpu"),
        ("", "", ""),
    ],
)
def test_on_a_gpu_no_tpu_is_looked_for(machine, asked, installed, left):
    """libtpu is installed for rehearsals; with JAX_PLATFORMS unset jax would try it first, and complain."""
    machine.setenv("JAX_PLATFORMS", asked)
    machine.setattr(startup.importlib.util, "find_spec", lambda name: object() if name == installed else None)
    startup.choose_platform(None, "gpu", pathlib.Path("/cache"))
    assert os.environ["JAX_PLATFORMS"] == left


def test_a_tpu_that_another_process_uses_is_named_with_its_process(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'tpu': ABORTED: TPU is in use by process with pid 7")

    monkeypatch.setattr(jax, "default_backend", fail)
    with pytest.raises(RunError, match=r"^jax cannot use the tpu of this machine: .* in use by process with pid 7"):
        startup.check_platform("tpu")


@pytest.mark.parametrize(
    ("accelerator", "num_processes", "chosen", "is_switched_off"),
    [
        ("gpu", 2, {}, True), ("gpu", 2, {"JAX_ENABLE_COMPILATION_CACHE": "true"}, False), ("gpu", 1, {}, False),
        ("tpu", 2, {}, False), ("cpu", 2, {}, False),
    ],
)  # fmt: skip
def test_processes_of_several_gpus_compile_at_each_start_unless_the_cache_is_asked_for(
    monkeypatch, accelerator, num_processes, chosen, is_switched_off
):
    monkeypatch.setattr(os, "environ", dict(chosen))
    read = []
    monkeypatch.setattr(type(jax.config), "update", lambda config, *given: read.append(given))
    startup.choose_caching(accelerator, num_processes)
    assert os.environ == ({"JAX_ENABLE_COMPILATION_CACHE": "false"} if is_switched_off else chosen)
    assert read == ([("jax_enable_compilation_cache", False)] if is_switched_off else [])  # jax was imported before


@pytest.mark.parametrize(("processes", "local"), [(1, 16), (4, 4), (16, 1)])
def test_each_process_simulates_its_part_of_the_devices(machine, processes, local):
    assert startup.simulate(16, processes) == 16
    assert f"--xla_force_host_platform_device_count={local}" in os.environ["XLA_FLAGS"].split()


def test_without_topology_each_process_simulates_as_many_as_its_environment_says(machine):
    machine.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    assert startup.simulate(0, 4) == 8


def test_processes_must_divide_the_simulated_devices(machine):
    with pytest.raises(ConfigError, match="16 simulated devices cannot be divided evenly among 3 processes"):
        startup.simulate(16, 3)


def test_variables_of_earlier_systems_are_answered():
    unread = ("XLA_TENSOR_ALLOCATOR_MAXSIZE", "TPU_NUM_DEVICES", "PJRT_DEVICE", "LOCAL_RANK")  # of the v4-64 plan
    answers = startup.notes(dict.fromkeys(unread, "1"), "bfloat16")
    assert [answer.partition(" is not read: ")[0] for answer in answers] == [f"Note: {name}=1" for name in unread]
    environment = {"TPU_NUM_DEVICES": "8", "XLA_USE_BF16": "1", "HOME": "/"}
    (line,) = startup.notes(environment, "bfloat16")
    (launcher,) = startup.notes({"XRT_TPU_CONFIG": "tpu_worker;0;10.0.0.2:8470"}, "bfloat16")
    assert launcher.endswith(
        "it is of PyTorch/XLA's xla_dist; `pod.py launch -- COMMAND` starts a command on every host"
    )
    assert line.startswith("Note: TPU_NUM_DEVICES=8 is not read: jax finds the devices")
    with pytest.raises(ConfigError, match=r"XLA_USE_BF16=1 and model\.dtype=float32 contradict"):
        startup.notes(environment, "float32")


def test_what_jax_read_at_its_import_is_not_what_counts():
    """As in a Python program, and in a container of Kubernetes, where jax is imported to look for other processes."""
    program = (
        "import jax; from core.joining import join; join(4); "
        "print(jax.device_count(), jax.config.jax_persistent_cache_min_compile_time_secs)"
    )
    unset = ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"JAX_NUM_CPU_DEVICES": "2", "TPU_MESH_CONFIG": "2,2,1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "4 0.1\n", done.stderr
