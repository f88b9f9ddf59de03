# SPDX-License-Identifier: Apache-2.0
"""Every test runs on eight simulated CPU devices, with one compilation cache, a mesh in context and shapes checked."""

import gc
import os
import signal
from importlib import metadata

from cluster import startup
from input_pipeline.cache import cache_path

QUICK_COMPILATION = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
)
if metadata.version("jaxlib").startswith("0.10."):  # newer ones lack it, and compile for twice as long
    QUICK_COMPILATION += ("--xla_cpu_use_fusion_emitters=false",)
CACHE = cache_path("")
# A job in a shell's background ignores Ctrl-C, and so would every program that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Before jax is imported. The cache outlives the run; its keys hold the program, the flags, jaxlib and the processor.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE / "tests" / "compiled")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"):  # of a hook that runs the tests
    os.environ.pop(name, None)
# Tests compile many programs and run each briefly. Without optimizations they take a third of the time.
given = os.environ.get("XLA_FLAGS", "").split()  # a worker of pytest-xdist inherits them
os.environ["XLA_FLAGS"] = " ".join([*given, *(flag for flag in QUICK_COMPILATION if flag not in given)])
startup.choose_platform(None, "cpu", CACHE)
startup.simulate(8)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from tests import shape_check, warm  # noqa: E402

shape_check.install()  # before anything imports layers, models or objectives

from parallelism.mesh import mesh_context  # noqa: E402
from tests.support import LEFT_OUT, on_one_device, one_device_mesh  # noqa: E402

jax.config.update("jax_default_matmul_precision", "highest")
hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one is not a failure
hypothesis.settings.load_profile("any machine")


def pytest_configure(config):
    """Ignore two harmless warnings: a cache entry that was cut short, and the writes of a save that was given up."""
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache entry")
    config.addinivalue_line("filterwarnings", "ignore:coroutine 'async_serialize_from_host")


def pytest_collection_finish():
    """Exclude everything that was imported from garbage collection, which is then faster."""
    gc.collect()
    gc.freeze()


def pytest_deselected(items):
    """Remember the slow tests that this session leaves out."""
    left = items[0].config.stash.setdefault(LEFT_OUT, set())
    left.update(item.nodeid for item in items if item.get_closest_marker("slow"))


@pytest.fixture(scope="session", autouse=True)
def one_device():
    """Models need a mesh in context; a test that wants another opens its own inside."""
    with mesh_context(one_device_mesh()) as mesh:
        yield mesh


@pytest.fixture(scope="session", autouse=True)
def quick_start():
    """Start programs from a template, which the first program of a test starts."""
    warm.allow()
    yield
    warm.end()


@pytest.fixture
def single_device():
    """Train as on a machine of one device."""
    with on_one_device():
        yield
