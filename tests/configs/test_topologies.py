# SPDX-License-Identifier: Apache-2.0
"""The hardware presets are all there and consistent with themselves."""

import math
import os
import subprocess
import sys

import jax
import pytest

from configs import topologies
from configs.base import KEYS
from configs.errors import ConfigError
from rehearsal.compiler import ON_CPU
from tests.support import ROOT

PRESETS = tuple(topologies.SLICES)


def test_the_presets_that_others_use_are_there():
    promised = {
        "cpu", "cpu-8", "v4-8", "v4-16", "v4-32", "v4-64", "v4-128", "v5e-1", "v5e-4", "v5e-8", "v5e-16", "v5p-8",
        "v5p-32", "v5p-128", "v6e-1", "v6e-4", "v6e-8", "h100-8", "h200-1",
    }  # fmt: skip
    assert promised <= set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_whole(name):
    topology = topologies.get(name)
    assert topology.name == name
    assert topology.hosts * topology.chips_per_host == topology.chips
    assert math.prod(topology.mesh.values()) == topology.chips
    figures = (topology.hbm_gib, topology.peak_flops, topology.hbm_bandwidth, topology.link_bandwidth)
    assert all(figures) if topology.accelerator != "cpu" else not any(figures)
    assert set(topology.faster) < set(KEYS["model.quantization"].choices)
    if topology.accelerator == "tpu":
        slice_name, _, shape = topology.compiler_name.partition(":")
        assert name.startswith(slice_name) and math.prod(int(n) for n in shape.split("x")) == topology.chips


@pytest.mark.parametrize("slice_", [("v4", 8, 3, ""), ("nochip", 4, 1, "")])
def test_a_preset_of_ones_own_that_cannot_be_is_named(monkeypatch, slice_):
    monkeypatch.setitem(topologies.SLICES, "mine", slice_)
    with pytest.raises(ConfigError, match=r"^SLICES: mine has \d \w+ chips on \d hosts, but hosts share"):
        topologies.get("mine")


def test_a_chip_of_a_tpu_has_the_name_of_the_compilers_description():
    """In another process, since libtpu changes how the process that imports it treats signals."""
    names = ("v4-8", "v5e-8", "v5p-8", "v6e-8")
    program = (
        "from configs import topologies\nfrom rehearsal.compilation import devices\n"
        f"print(*(devices(topologies.get(name))[0].device_kind for name in {names}), sep=';')"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment | ON_CPU, capture_output=True, text=True, check=True
    )  # fmt: skip
    kinds = done.stdout.splitlines()[-1].split(";")
    assert [topologies.one_chip(kind).chip for kind in kinds] == [topologies.get(name).chip for name in names]


def test_an_attached_chip_is_known_by_what_jax_calls_it():
    """So that a run without --topology is judged by the published peak; other models of a GPU have other peaks."""
    assert {topologies.one_chip(kind).chip for kind in topologies.CHIP_OF_KIND} == set(topologies.CHIPS) - {"cpu"}
    assert topologies.one_chip("NVIDIA H200").peak_flops == topologies.get("h200-1").peak_flops
    assert topologies.one_chip("NVIDIA H100 PCIe") is None and topologies.one_chip("cpu") is None


@pytest.mark.parametrize(
    ("name", "chips", "hosts"),
    [("v4-8", 4, 1), ("v4-32", 16, 4), ("v4-64", 32, 8), ("v5p-8", 4, 1), ("v5e-8", 8, 1), ("v6e-8", 8, 1)],
)
def test_v4_and_v5p_count_tensorcores_and_the_others_chips(name, chips, hosts):
    """Memory of a chip as Google's pages have it."""
    gib = {"v4": 32, "v5p": 95, "v5e": 16, "v6e": 32}[name.partition("-")[0]]
    found = topologies.get(name)
    assert (found.chips, found.hosts, found.hbm_gib) == (chips, hosts, gib)


@pytest.mark.parametrize("name", PRESETS)
def test_a_tpus_name_counts_its_tensorcores(name):
    topology = topologies.get(name)
    if topology.accelerator == "tpu":
        assert int(name.partition("-")[2]) == topology.cores_per_chip * topology.chips


@pytest.mark.parametrize(
    ("name", "chips", "found"), [("v4-32", 32, "v4-64"), ("v4-32", 7, ""), ("v6e-8", 16, ""), ("v5e-8", 16, "v5e-16")]
)
def test_a_slice_of_another_size_has_the_same_chips(name, chips, found):
    assert topologies.of_size(topologies.get(name), chips) == found


def test_several_slices_are_one_preset_with_an_axis_between_them():
    one, two = topologies.get("v4-32"), topologies.get("2xv4-32")
    assert (two.slices, two.chips, two.hosts, two.compiler_name) == (2, 32, 8, one.compiler_name)
    assert two.mesh == {"dcn_data": 2, "fsdp": 16} and two.hbm_gib == one.hbm_gib


@pytest.mark.parametrize("name", ["0xv4-32", "1xv4-32", "2xh100-8", "2xv4-33"])
def test_only_two_and_more_slices_of_tpus_are_joined(name):
    with pytest.raises(ConfigError, match="is unknown"):
        topologies.get(name)


def test_an_unknown_name_is_an_error_with_the_nearest():
    with pytest.raises(ConfigError, match=r"--topology=v5-8 is unknown; did you mean v5[ep]-8"):
        topologies.get("v5-8")


def test_options_of_the_gpu_compiler_are_known_to_it_and_change_something(tmp_path):
    """By a compilation for this CPU, which knows all of XLA's options and dumps those that are not at their default."""
    options = topologies.COMPILER_OPTIONS["gpu"]
    program = jax.jit(lambda x: x + 1).lower(1.0)
    program.compile(compiler_options=options | {"xla_dump_to": str(tmp_path)})
    (dumped,) = tmp_path.glob("*.debug_options")
    assert options.keys() <= {line.partition(":")[0] for line in dumped.read_text().splitlines()}
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        program.compile(compiler_options={"xla_gpu_enable_no_such_option": True})


def test_a_share_of_memory_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "75%")
    with pytest.raises(ConfigError, match=r"XLA_CLIENT_MEM_FRACTION=75% is not a number"):
        _ = topologies.get("h200-1").capacity_gib


@pytest.mark.parametrize(
    ("name", "given", "share"),
    [("XLA_CLIENT_MEM_FRACTION", "", 0.75), ("XLA_CLIENT_MEM_FRACTION", ".92", 0.92),
     ("XLA_PYTHON_CLIENT_MEM_FRACTION", ".5", 0.5)],
)  # fmt: skip
def test_arrays_have_the_share_of_a_gpus_memory_that_jax_takes(monkeypatch, name, given, share):
    monkeypatch.setenv(name, given)
    gpu, tpu = topologies.get("h200-1"), topologies.get("v4-8")
    assert (gpu.capacity_gib, tpu.capacity_gib) == (share * gpu.hbm_gib, tpu.hbm_gib)
