# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's record and files are checked when they are read; an error is one line that names what is wrong."""

import json
import shutil
import time

import jax
import numpy as np
import orbax.checkpoint
import pytest
from gcsfs.retry import HttpError

from checkpointing import array_files, manifest
from checkpointing.checkpoints import CheckpointError, Checkpoints, Damaged
from checkpointing.retention import Retention
from checkpointing.source_run import newest_checkpoint
from checkpointing.workdir import check_resumable
from cluster.hub import RunError
from configs import base
from configs.errors import ConfigError
from files.json_reader import JsonError
from reporting.clock import Clock
from reporting.goodput import Goodput
from settings.keys import flat

CONFIG = flat(base.get_config())
WHOLE = {
    "step": 1, "examples": 32, "config": CONFIG, "corpus": "abc", "mixture": [[0, ["1"]]], "skips": [], "losses": {},
    "topology": None, "total_tokens": 99, "increases": 0, "base": None, "reference": None, "teacher": None,
}  # fmt: skip


@pytest.fixture
def workdir(tmp_path):
    """A workdir with a checkpoint of step 1."""
    goodput = Goodput(Clock(time.monotonic()), tmp_path / "none.json", None).record()
    with Checkpoints(tmp_path, Retention(newest=1)) as checkpoints:
        state = {"params": {"weight": jax.numpy.arange(6.0)}}
        checkpoints.save_and_wait(1, state, WHOLE | {"goodput": goodput})
    return tmp_path


def change(workdir, content: bytes) -> None:
    """Put other content into record.json, and into the manifest its digest, as somebody could who wants to."""
    folder = workdir / "checkpoints" / "1"
    (folder / "record.json").write_bytes(content)
    names = sorted(manifest.read(folder)["files"])
    manifest.write(folder, 1, manifest.digests(folder, names))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "is not valid JSON (recursion limit exceeded"),
        (b"[]", "should be an object, but is []"),
        ({"step": -1}, "step: should be greater than or equal to 0"),
        ({"examples": 10**20}, "examples: should be less than"),
        ({"increases": 10**9}, "increases: should be less than or equal to 100000"),
        ({"goodput": 3}, "goodput: should be an object, but is 3"),
        ({"goodput": {"began": 0, "time": 0}}, "goodput.parts is missing"),
        ({"goodput": {"began": 0, "time": "x", "parts": {}}}, "goodput.time: should be a valid number"),
        (
            {"goodput": {"began": 0, "time": float("inf"), "parts": {}}},
            "goodput.time: should be less than or equal to",
        ),
        ({"goodput": {"began": 0, "time": 0, "parts": {"training": []}}}, "goodput.parts.training: should be"),
        ({"losses": {"x": 1.0}}, "losses.x"),
        ({"losses": []}, "losses: should be"),
        ({"skips": [[1]]}, "skips.0"),
        ({"mixture": [[0, [1]]]}, "mixture.0.1.0: should be a valid string"),
        ({"config": {"model.num_layers": []}}, "config.model.num_layers"),
        ({"config": CONFIG | {"model.num_layers": "6"}}, "config: model.num_layers should be of type int, but is '6'"),
        ({"base": {"folder": "x"}}, "base.step is missing"),
        ({"topology": 3}, "topology: should be a valid string"),
        ({"weights_only": "model.name"}, "weights_only: should be"),
    ],
)
def test_a_record_that_no_run_has_is_refused_by_file_and_key(workdir, content, message):
    change(workdir, content if isinstance(content, bytes) else json.dumps(WHOLE | content).encode())
    with Checkpoints(workdir) as checkpoints:
        assert checkpoints.newest() == 1
        with pytest.raises((JsonError, ConfigError)) as error:
            checkpoints.record(1)
    assert f"{workdir}/checkpoints/1/record.json: " in str(error.value) and message in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("key", ["examples", "config", "corpus", "losses", "goodput"])
def test_a_run_is_not_continued_from_a_record_that_lacks_a_key(workdir, key):
    change(workdir, json.dumps({name: value for name, value in WHOLE.items() if name != key}).encode())
    with (
        Checkpoints(workdir) as checkpoints,
        pytest.raises(CheckpointError, match=f"checkpoint 1 lacks ({key}|goodput)"),
    ):
        check_resumable(checkpoints, CONFIG, "abc", workdir)


def test_what_was_saved_by_a_run_is_read_back(workdir):
    with Checkpoints(workdir) as checkpoints:
        record = checkpoints.record(1)
        assert check_resumable(checkpoints, CONFIG, "abc", workdir) == record
    assert (
        record["config"] == CONFIG
        and record["goodput"]["parts"].keys()
        == Goodput(Clock(time.monotonic()), workdir / "none.json", None).parts().keys()
    )


def test_a_checkpoint_of_another_model_is_refused_though_its_arrays_would_fit(workdir):
    """For example if the checkpoints of one run were copied to the folder of another."""
    config = base.get_config()
    with Checkpoints(workdir) as checkpoints:
        config.model.update(dtype="float32", remat="full", max_length=4096)  # how it is used may differ
        assert newest_checkpoint(checkpoints, config) == 1
        config.model.rope_theta = 5e5
        with pytest.raises(CheckpointError) as error:
            newest_checkpoint(checkpoints, config)
    assert str(error.value) == (
        f"checkpoint 1 of {workdir} is of a model with model.rope_theta=10000.0, but config.json there says 500000.0; "
        "restore the config.json of that run, record.json has a copy"
    )


def test_imported_weights_belong_to_the_keys_that_they_were_imported_with(workdir):
    change(workdir, json.dumps(WHOLE | {"weights_only": ["model.num_layers"]}).encode())
    config = base.get_config()
    config.model.rope_theta = 5e5
    with Checkpoints(workdir) as checkpoints:
        assert newest_checkpoint(checkpoints, config) == 1
        config.model.num_layers = 7
        with pytest.raises(CheckpointError, match=r"a model with model\.num_layers=6, but config\.json there says 7"):
            newest_checkpoint(checkpoints, config)


@pytest.mark.parametrize("gone", ["state/params.weight/0", "state/params.weight/.zarray", "state/params.weight", "."])
def test_a_checkpoint_that_is_deleted_while_it_is_restored_is_told(workdir, gone, monkeypatch):
    """By the run that it belongs to, which keeps newer ones, or by somebody."""
    folder = workdir / "checkpoints" / "1"

    def delete(self, *unused, **more):
        shutil.rmtree(folder / gone) if (folder / gone).is_dir() else (folder / gone).unlink()
        return restore(self, *unused, **more)

    with Checkpoints(workdir) as checkpoints:
        restore = orbax.checkpoint.Checkpointer.restore
        monkeypatch.setattr("orbax.checkpoint.Checkpointer.restore", delete)
        with pytest.raises(RunError) as error:
            checkpoints.restore_params(1, {"weight": jax.ShapeDtypeStruct((6,), np.float32)}, "params")
    assert str(error.value).startswith(f"{folder} was deleted while it was read (") and "\n" not in str(error.value)


def test_weights_that_lack_a_parameter_of_the_model_are_refused_by_its_name(workdir):
    """orbax returns the shape of an array that it lacks, in place of the array."""
    wanted = {name: jax.ShapeDtypeStruct((6,), np.float32) for name in ("weight", "projection")}
    missing = r"lacks params\.projection, unlike the state of this run"
    with Checkpoints(workdir) as checkpoints, pytest.raises(CheckpointError, match=missing):
        checkpoints.restore_params(1, wanted, "params")


def test_a_checkpoint_that_goes_between_two_questions_is_told(workdir):
    with Checkpoints(workdir) as checkpoints:
        shutil.rmtree(workdir / "checkpoints" / "1")
        for ask in (checkpoints.record, checkpoints.eval_params_part):
            with pytest.raises(RunError, match="cannot be read now"):
                ask(1)


@pytest.mark.parametrize("place", ["gs://runs/mine/checkpoints", "runs/mine/checkpoints"])
def test_a_store_that_does_not_answer_is_one_line(workdir, monkeypatch, place):
    """gcsfs raises what is not an OSError."""
    with Checkpoints(workdir) as checkpoints:
        monkeypatch.setattr(checkpoints.store, "place", place)
        error = HttpError({"code": 503, "message": "unavailable"}) if "://" in place else OSError("no answer")

        def problems(*unused):
            raise error

        monkeypatch.setattr(checkpoints.store, "problems", problems)
        with pytest.raises(RunError, match=r"checkpoint 1 cannot be read now: .*; nothing was changed, try again"):
            checkpoints.problems(1)


def test_an_array_read_in_parts_has_no_zeros_where_a_file_is_missing(workdir):
    state = workdir / "checkpoints" / "1" / "state"
    (state / "params.weight" / "0").unlink()
    with pytest.raises(ValueError, match="NOT_FOUND"):
        array_files.open_array(state, "params.weight").read().result()


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000, b"[]", b"{}", b'{"format": 1, "step": 1, "files": [], "sha256": ""}',
        b'{"format": 1, "step": 1, "files": {"record.json": [1]}, "sha256": ""}',
        b'{"format": 1, "step": 1, "files": {"record.json": [-1, "x"]}, "sha256": ""}',
    ],
)  # fmt: skip
def test_a_manifest_that_is_none_makes_the_checkpoint_damaged(workdir, content):
    (workdir / "checkpoints" / "1" / "manifest.json").write_bytes(content)
    with Checkpoints(workdir) as checkpoints:
        [problem] = checkpoints.problems(1)
        assert problem.startswith("manifest.json cannot be read (it") and len(problem) < 300
        with pytest.raises(Damaged):
            checkpoints.newest()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "state/../../x", "a\n/../../etc/passwd", "x\0"])
def test_a_manifest_names_no_file_outside_its_folder(workdir, name):
    folder = workdir / "checkpoints" / "1"
    manifest.write(folder, 1, {name: [1, "x"]})
    assert "names files outside the folder" in manifest.problems(folder)[0]
