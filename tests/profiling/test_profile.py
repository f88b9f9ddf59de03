# SPDX-License-Identifier: Apache-2.0
"""Profiles: which steps are traced, what is computed from a trace, and what a real run writes."""

import contextlib
import importlib
import json
import math
import sys
import tempfile
import types

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import train
from configs import base
from configs.errors import ConfigError
from core.callbacks import Callback, RollBack
from profiling import energy, report, windows
from profiling.program import Kind, Program
from profiling.recording import Profile, Trace
from profiling.summary import summarise
from profiling.trace import Device, Op, _with_own_seconds, read
from profiling.windows import Window
from rehearsal import sealed
from rehearsal.assumptions import Assumptions
from rehearsal.compiler import FACTS, PROGRAM, Compiler, digest
from settings import loading
from tests.support import write_sums
from tests.test_train import in_process, lines_of

KINDS = {
    "dot": Kind("matmul", "dot_general", "layers/mlp.py:10", "forward", 8e9, 1e6),
    "add": Kind("element-wise", "add", "layers/mlp.py:11", "backward", 0.0, 4e6),
    "sum": Kind("collective", "psum", "layers/fsdp.py:12", "backward", 0.0, 2e6),
    "loop": Kind("", "loop", "", "", 0.0, 0.0),
}


def rates(peak: float = math.inf, bandwidth: float = math.inf) -> Assumptions:
    return Assumptions(peak, bandwidth, math.inf, math.inf, None)


def device(name: str, *ops: tuple) -> Device:
    """Two steps of one second each; `ops` are (name, start, end, own seconds) of the first, and again in the second."""
    both = [Op(what, start + step, end + step, own) for step in (0, 1) for what, start, end, own in ops]
    return Device(name, both, [(0.0, 0.9), (1.0, 1.9)])


def test_seconds_are_of_one_device_and_one_step_and_a_loop_counts_once():
    """Two devices: in both, 0.4 s of products within a loop, 0.2 s of sums; 0.1 s of these overlap the products."""
    ops = ("loop", 0.0, 0.4, 0.0), ("dot", 0.0, 0.4, 0.4), ("sum", 0.3, 0.5, 0.2), ("add", 0.6, 0.7, 0.1)
    found = summarise(
        [device("TPU 0", *ops), device("TPU 1", *ops)], types.SimpleNamespace(kind=KINDS.get), 2, rates(2e10, 1e8)
    )
    assert found["seconds_by_class"] == pytest.approx({"matmul": 0.4, "collective": 0.2, "element-wise": 0.1})
    assert found["exposed_collective_seconds"] == pytest.approx(0.1)
    assert found["idle_share"] == pytest.approx(1 - 2 * 0.6 / 1.7), "from the first instruction to the last"
    assert found["step_seconds"] == pytest.approx({"mean": 1.0, "p50": 1.0, "p90": 1.0, "max": 1.0})
    assert found["flops"] == pytest.approx(8e9) and found["bytes"] == pytest.approx(7e6)
    assert [(row["file"], row["part"]) for row in found["by_file"]] == [
        ("layers/mlp.py", "forward"), ("layers/fsdp.py", "backward"), ("layers/mlp.py", "backward"),
    ]  # fmt: skip
    first = found["operations"][0]
    assert first["flops_per_second"] == pytest.approx(2e10) and first["bound"] == "compute"
    assert [row["bound"] for row in found["operations"]] == ["compute", "memory", "memory"]
    assert found["busy_seconds"] == pytest.approx({"TPU 0": 0.6, "TPU 1": 0.6})


def test_the_median_is_one_of_any_number_of_steps_and_nine_of_ten_steps_are_within_the_90th_percentile():
    for count, median, ninth in ((1, 1, 1), (2, 1.5, 2), (3, 2, 3), (4, 2.5, 4), (10, 5.5, 9), (20, 10.5, 18)):
        ends = [n * (n + 1) / 2 for n in range(count + 1)]  # steps of 1, 2, ... seconds
        runs = [(0.0, 1.0)] if count == 1 else [(end, end) for end in ends]
        steps = Device("TPU 0", [Op("add", 0.0, 1.0, 1.0)], runs)
        found = summarise([steps], types.SimpleNamespace(kind=KINDS.get), count, rates())["step_seconds"]
        assert (found["p50"], found["p90"], found["max"]) == (median, ninth, count)


def test_instructions_that_the_program_lacks_are_not_left_out():
    found = summarise([device("TPU 0", ("other", 0.0, 0.3, 0.3))], Program("HloModule step", rates(), {}), 2, rates())
    assert found["seconds_by_class"] == pytest.approx({"unknown": 0.3})
    assert found["operations"][0]["bound"] is None


def test_a_graph_of_cuda_that_hides_its_operations_is_noted_with_the_flag_that_shows_them():
    trace = [device("/device:GPU:0", ("command_buffer_1", 0.0, 0.3, 0.3))]
    found = summarise(trace, Program("HloModule step", rates(), {}), 2, rates())
    whole = dict.fromkeys(("step_seconds", "peak_bytes_per_second", "device_peak_gib", "energy", "rehearsed"))
    notes = report._notes(whole | found | {"platform": "gpu"})
    assert any("command_buffer_1" in note and "XLA_FLAGS=--xla_gpu_enable_command_buffer=" in note for note in notes)


def test_the_slowest_device_and_the_slowest_host_are_named():
    """Of two hosts with two devices each, the last device is busy for twice as long, and the first host is slower."""
    one = dict(
        num_steps=1, host_seconds=1.0, phases={"data": 0.2, "wait": 0.5}, device_peak_gib=[1.0, 3.0], by_file=[],
        joules=2.0,
        operations=[], memory_gib={"total": 1.0}, flops_model=1.0, peak_flops=None, peak_bytes_per_second=None,
        platform="tpu", seconds_by_class={"matmul": 1.0}, idle_share=0.25, exposed_collective_seconds=0.0, flops=1.0,
        bytes=1.0, step_seconds={"mean": 1.0, "p50": 1.0, "p90": 1.0, "max": 1.0},
    )  # fmt: skip
    other = one | {"phases": {"data": 0.0, "wait": 0.9}, "seconds_by_class": {"copy": 1.0}, "idle_share": 0.75}
    whole = report.joined([
        one | {"host": "process 0 (a)", "busy_seconds": {"TPU 0": 1.0, "TPU 1": 1.0}},
        other | {"host": "process 1 (b)", "busy_seconds": {"TPU 2": 1.0, "TPU 3": 2.0}},
    ])  # fmt: skip
    assert whole["device_imbalance"] == {"excess": pytest.approx(0.6), "slowest": "process 1 (b), TPU 3"}
    assert whole["host_imbalance"] == {"excess": pytest.approx(2 / 3), "slowest": "process 0 (a)"}
    assert whole["seconds_by_class"] == {"matmul": 0.5, "copy": 0.5} and whole["idle_share"] == 0.5
    assert whole["joules_per_step"] == 4.0
    assert whole["data_wait_share"] == pytest.approx(0.1) and whole["device_peak_gib"] == {"least": 1.0, "most": 3.0}


def test_energy_is_that_of_a_calculation_by_hand():
    """16 v4 chips, busy 75 % of 2 s steps: 16 * (90 + 0.75 * 80) W * 2 s = 4,800 J, of 1,000 tokens."""
    found = energy.of_step("v4", 16, 2.0, 0.75, 1000)
    assert found["joules_per_step"] == pytest.approx(4800) and found["joules_per_token"] == pytest.approx(4.8)
    assert energy.of_step("v5p", 16, 2.0, 0.75, 1000) is None, "no power is published"


class Nvml(types.ModuleType):
    """In place of the library, which needs a driver: two GPUs; the second does not count joules."""

    class NVMLError(Exception):
        """Its base class of errors."""

    def nvmlInit(self):
        """Begin."""

    def nvmlDeviceGetHandleByIndex(self, number):
        """Return a handle."""
        return number

    def nvmlDeviceGetHandleByUUID(self, name):
        """Return a handle."""
        return {"GPU-a": 0, "GPU-b": 1}[name]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        """Return millijoules."""
        if handle:
            raise self.NVMLError
        return 5_000


def test_energy_of_gpus_is_what_nvml_counts(monkeypatch):
    library = Nvml("pynvml")
    library.__spec__ = importlib.machinery.ModuleSpec("pynvml", None)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert energy.nvml_joules([0]) == 5.0 and energy.nvml_joules([0, 1]) is None
    for visible in ("1,0", "GPU-b,GPU-a"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert energy.nvml_joules([1]) == 5.0 and energy.nvml_joules([0]) is None, "CUDA's GPU 0 is NVML's 1"
    found = energy.measured(4800, 16, 2.0, 1000)
    assert (found["estimate"], found["watts_per_chip"], found["joules_per_token"]) == (False, 150.0, 4.8)


def test_energy_without_nvml_is_not_known(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert energy.nvml_joules([0]) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "write the first and the last step"), ("5", "write the first and the last"), ("a:b", "write the first"),
     ("0:3", "steps begin with 1"), ("9:3", "STOP is not before START"), ("1:5000", "at most 1,000")],
)  # fmt: skip
def test_a_window_that_is_none_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        windows.parse(text)


def test_a_request_is_taken_once(tmp_path):
    assert windows.requested(tmp_path, 7) is None
    for text, count in (("3", 3), ("", windows.USUAL_STEPS), ("many", windows.USUAL_STEPS), ("99999", 1000)):
        (tmp_path / windows.REQUEST).write_text(text)
        found = windows.requested(tmp_path, 7)
        assert found.start > 7 and found.stop - found.start + 1 == count
        assert windows.requested(tmp_path, 7) is None


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """A run of 10 steps on 8 simulated devices: steps 3 and 4 are traced, then two more that a file asks for."""
    folder = tmp_path_factory.mktemp("profiled")
    write_sums(folder / "texts", 40)
    # A program from the tests' cache has the files and lines of the copy of the workspace that compiled it.
    shared = jax.config.jax_compilation_cache_dir
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    config = in_process(train__steps=12, train__eval_every=0, train__save_every=0, evaluation__sample_tokens=0)
    config.data.update(source="text", path=f"{folder}/texts/*.txt", cache_dir=str(folder / "cache"))
    asks = Profile(windows.parse("3:4"))
    first = {}

    def after_summary(job, state, step, usual=asks.on_step):
        usual(job, state, step)
        if step == 4:
            first.update(json.loads((folder / "run" / "profile.json").read_text()))
            (folder / "run" / windows.REQUEST).write_text("2")

    asks.on_step = after_summary
    train.train(config, folder / "run", callbacks=[asks])
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", shared)
    return folder / "run", first


def test_a_real_trace_has_every_device_and_all_of_the_step(profiled):
    workdir, first = profiled
    assert first["steps"] == [3, 4] and first["devices"] == 8 and first["platform"] == "cpu"
    assert set(first["seconds_by_class"]) >= {"matmul", "element-wise", "collective"}
    assert "unknown" not in first["seconds_by_class"], "the trace and the program are of the same step"
    assert first["step_seconds"]["mean"] > 0 and 0 <= first["idle_share"] < 1
    assert sum(row["share"] for row in first["by_file"]) == pytest.approx(1)
    files = {row["file"] for row in first["by_file"]}
    assert {"layers/attention/attention.py", "layers/mlp.py"} <= files, "instructions have their lines"
    # Products of the optimizer's norms and of the loss, which model FLOPs leave out, are a few percent of a tiny model.
    assert 0.8 < first["flops"] / first["flops_model"] < 1.5
    assert first["energy"] is None and any("energy" in note for note in first["notes"])
    traces = list(workdir.glob("tensorboard/plugins/profile/steps-3-4/worker-0.xplane.pb"))
    assert len(traces) == 1 and len(read(traces[0], "jit_train_step")) == 8


def test_a_running_job_is_profiled_at_the_request_of_a_file(profiled):
    workdir, _ = profiled
    later = json.loads((workdir / "profile.json").read_text())
    assert later["steps"][0] > 4 and later["steps"][1] == later["steps"][0] + 1
    assert not (workdir / windows.REQUEST).exists()
    assert max(lines_of(workdir, "train")) == 12, "the run goes on"


def run_of_sums(folder, **changes):
    """Return a run of 8 steps on texts in a folder."""
    write_sums(folder / "texts", 40)
    config = in_process(train__steps=8, train__eval_every=0, evaluation__sample_tokens=0, **changes)
    config.data.update(source="text", path=f"{folder}/texts/*.txt", cache_dir=str(folder / "cache"))
    return config


def test_a_trace_ends_before_the_batch_grows(single_device, tmp_path):
    """Steps of two batch sizes have other times and FLOPs: their mean is that of neither."""
    ramp = dict(batch__ramp="steps", batch__first=8, batch__increase_step=4, batch__increase_factor=2.0)
    config = run_of_sums(tmp_path, train__global_batch=16, **ramp)
    train.train(config, tmp_path / "run", callbacks=[Profile(windows.parse("3:6"))])
    profile = json.loads((tmp_path / "run" / "profile.json").read_text())
    assert (profile["steps"], profile["rows"]) == ([3, 4], 8)


def test_a_trace_begins_anew_after_a_roll_back(single_device, tmp_path):
    """Steps that are computed again, and the restore between them, are not in the mean of the steps."""

    class GoesBack(Callback):
        done = False

        def on_step(self, job, state, step):
            self.done, was = step >= 5 or self.done, self.done
            return RollBack("as a test", 5) if self.done and not was else None

    config = run_of_sums(tmp_path, train__save_every=2)
    train.train(config, tmp_path / "run", callbacks=[Profile(windows.parse("4:7")), GoesBack()])
    profile = json.loads((tmp_path / "run" / "profile.json").read_text())
    assert (profile["steps"], profile["num_steps"]) == ([5, 7], 3)


def test_a_window_that_a_resumed_run_has_passed_is_said_to_be_lost():
    said = []
    log = types.SimpleNamespace(event=lambda text, kind: said.append((kind, text)), log_every=1)
    job = types.SimpleNamespace(log=log, config=base.get_config())
    callback = Profile(Window(3, 5))
    callback.on_start(job, {"step": 4})
    assert said == [
        ("no_profile", "step 4: the steps 3 to 5 are not traced, as the run resumes after the first of them")
    ]
    assert callback.window is None


def test_a_window_after_the_last_step_is_said_to_be_lost():
    said, config = [], base.get_config()
    config.train.steps = 12
    log = types.SimpleNamespace(event=lambda text, kind: said.append((kind, text)), log_every=1)
    Profile(Window(20, 30)).on_start(types.SimpleNamespace(log=log, config=config), None)
    assert said == [("no_profile", "the steps 20 to 30 are not traced, as the run ends at step 12")]


def test_a_callback_whose_trace_was_cut_off_can_end_another_run(monkeypatch, tmp_path):
    callback = Profile(Window(3, 5))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    callback._trace = Trace()
    callback.on_end(None, has_failed=True)
    callback.on_end(None, has_failed=False)  # no trace runs any more: to stop one would be an error
    assert not list(tmp_path.iterdir())


def test_a_trace_without_room_ends_no_run_and_is_the_last_one(monkeypatch, tmp_path):
    """jax keeps a trace open that it could not write."""

    def full():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: No space left on device\nand more")

    said, callback = [], Profile(Window(3, 5))
    log = types.SimpleNamespace(event=lambda text, kind: said.append((kind, text)), log_every=1, flush=lambda: None)
    clock = types.SimpleNamespace(read=dict, within=lambda phase: contextlib.nullcontext())
    job = types.SimpleNamespace(log=log, config=base.get_config(), workdir=tmp_path, clock=clock)
    callback.on_start(job, None)
    callback._before, callback._joules, callback._first = {}, None, 3
    monkeypatch.setattr(Trace, "unwritten", "")
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, profiler_options: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", full)
    for window, why in ((Window(3, 5), "RESOURCE_EXHAUSTED: No space left on device"), (Window(7, 9), "RESOURCE")):
        callback.window, callback._trace, callback._first = window, Trace(), window.start
        callback.on_step(job, None, window.stop)
        [(kind, text)] = said
        assert kind == "no_profile" and text.startswith(f"the steps {window.start} to {window.stop} have no profile: ")
        assert why in text and "more" not in text and callback.window is callback._trace is None
        said.clear()
    monkeypatch.setattr(Trace, "unwritten", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with Trace() as trace:
        assert trace.stop() is None and f"No such file or directory: '{tmp_path}/none" in trace.failure


def test_a_rehearsal_that_the_compiler_refused_does_not_end_the_profiled_run(tmp_path):
    loaded = loading.load("configs/tiny.py", "v4-8", {"data.cache_dir": str(tmp_path)})
    folder = Compiler(tmp_path / "rehearsals").folder(loaded.config, loaded.topology)
    folder.mkdir(parents=True)
    (folder / PROGRAM).write_bytes(b"")
    refusal = {"kind": "CompileError", "message": "XlaRuntimeError: INTERNAL"}
    sealed.write(folder / FACTS, {"error": refusal, "program_sha256": digest(folder / PROGRAM)})
    assert report.rehearsed(loaded.config, loaded.topology) == {"rehearsed": None}


def test_a_request_that_comes_too_late_for_its_steps_says_so(tmp_path):
    said = []
    config = base.get_config()
    config.train.steps = 10
    log = types.SimpleNamespace(event=lambda text, kind: said.append((kind, text)), log_every=1)
    job = types.SimpleNamespace(log=log, config=config, workdir=tmp_path)
    callback = Profile()
    callback.on_start(job, None)
    (tmp_path / windows.REQUEST).write_text("3")
    callback.on_step(job, None, 9)
    assert said == [("no_profile", "the steps 11 to 13 are not traced, as the run ends at step 10")]
    assert callback.window is None


def test_a_loop_that_ends_after_its_last_instruction_is_part_of_the_time():
    trace = [device("TPU 0", ("loop", 0.0, 0.9, 0.0), ("dot", 0.0, 0.2, 0.2))]
    found = summarise(trace, types.SimpleNamespace(kind=KINDS.get), 2, rates())
    assert found["idle_share"] == pytest.approx(1 - 2 * 0.2 / 1.9)


def test_own_seconds_of_a_loop_within_a_loop_are_without_those_of_its_body():
    found = _with_own_seconds([("outer", 0.0, 1.0), ("inner", 0.1, 0.7), ("dot", 0.2, 0.5), ("add", 0.8, 0.9)])
    assert {op.name: op.own_seconds for op in found} == pytest.approx(
        {"outer": 0.3, "inner": 0.3, "dot": 0.3, "add": 0.1}
    )


def test_a_batch_is_not_said_to_miss_its_donation(monkeypatch):
    """The step reads it, and gives no array back in its place."""
    sizes = {"parameters": 3 * report.GIB, "moments": 2 * report.GIB, "batch": report.GIB}
    monkeypatch.setattr(report, "state_bytes", lambda run: sizes)
    for kept, left in ((5, 0.0), (3, 2.0)):
        analysis = types.SimpleNamespace(alias_size_in_bytes=kept * report.GIB)
        compiled = types.SimpleNamespace(memory_analysis=lambda analysis=analysis: analysis)
        assert report.not_donated_gib(None, compiled) == left
