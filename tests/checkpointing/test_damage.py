# SPDX-License-Identifier: Apache-2.0
"""Damage to a checkpoint is detected, by the code of benchmarks/damage.py; and what its 1,000 damages leave out."""

import pathlib
import shutil

import pytest

from checkpointing import state_names
from checkpointing.checkpoints import Checkpoints, Damaged
from checkpointing.retention import Retention
from checkpointing.shared_folder import SharedFolder
from core import inspection
from parallelism.mesh import mesh_context
from tests import support

DAMAGES = 18  # each kind twice, each part thrice
TWO = Retention(newest=2)


@pytest.fixture(scope="module")
def damages():
    """The benchmark, as a module."""
    with support.benchmark("damage") as module:
        yield module


@pytest.fixture(scope="module")
def saved(damages, tmp_path_factory):
    saved = damages.train_and_save(tmp_path_factory.mktemp("saved"))
    with mesh_context(saved.run.mesh):
        yield saved


@pytest.fixture
def workdir(saved, tmp_path) -> pathlib.Path:
    """A copy of the checkpoints of steps 2 and 3."""
    return pathlib.Path(shutil.copytree(saved.folder, tmp_path / "workdir"))


def test_a_damage_is_detected_by_name_or_changes_nothing(damages, saved):
    counts = damages.outcomes(saved, DAMAGES)
    assert sum(counts[kind]["wrong"] for kind in damages.KINDS) == 0, counts
    assert sum(counts[kind]["detected"] for kind in damages.KINDS) > DAMAGES * 0.7, counts


def test_orbax_alone_restores_what_was_flipped(damages, saved):
    assert damages.wrong_by_orbax_alone(saved, 2) > 0


def test_a_checkpoint_under_another_steps_name_is_none(workdir):
    folder = workdir / "checkpoints"
    (folder / "3").rename(folder / "9")
    lines = []
    with Checkpoints(workdir, TWO) as checkpoints:
        checkpoints.report = lambda text, **figures: lines.append((text, figures))
        assert checkpoints.newest() == 2
        assert checkpoints.store.others() == {"9.damaged": "set aside"}
    text = "checkpoint 9 is damaged: manifest.json is that of checkpoint 3; set aside as 9.damaged"
    assert lines == [(text, {"event": "damaged", "step": 9})]


@pytest.mark.parametrize("name", ["3.bak", "3.damaged", "backup"])
def test_beside_a_checkpoint_under_a_name_of_no_step_nothing_starts_anew(workdir, name):
    folder = workdir / "checkpoints"
    shutil.rmtree(folder / "2")
    (folder / "3").rename(folder / name)
    with Checkpoints(workdir, TWO) as checkpoints, pytest.raises(Damaged, match=f"folders there: {name}"):
        checkpoints.newest()
    assert (folder / name / "manifest.json").exists()


def test_what_is_damaged_twice_under_one_name_is_kept_twice(workdir):
    folder = workdir / "checkpoints"
    shutil.copytree(folder / "3", folder / "3.damaged")
    (folder / "3" / "record.json").write_text("{}")
    with Checkpoints(workdir, TWO) as checkpoints:
        assert checkpoints.newest() == 2
    assert {path.name for path in folder.iterdir()} == {"2", "3.damaged", "3.damaged2"}


def test_a_reader_tells_of_damage_and_moves_nothing(workdir, capsys):
    (workdir / "checkpoints" / "3" / "record.json").unlink()
    with Checkpoints(workdir) as checkpoints:
        assert checkpoints.newest() == 2
        assert checkpoints.problems(3) == ["record.json is missing"]
    assert capsys.readouterr().err == "checkpoint 3 is damaged: record.json is missing; it is left out\n"
    assert (workdir / "checkpoints" / "3").is_dir()


@pytest.mark.parametrize("damage", [lambda file: file.write_bytes(b"damaged"), pathlib.Path.unlink])
@pytest.mark.parametrize(("part", "newest"), [("optimizer", 3), ("params", 2)])
def test_a_reader_needs_the_weights_and_not_the_moments(workdir, part, newest, damage):
    file = next(path for path in sorted((workdir / "checkpoints/3/state").glob(f"{part}.*/*")) if path.is_file())
    damage(file)
    with Checkpoints(workdir) as reader:
        assert reader.newest() == newest
        assert file.parent.name in reader.problems(3)[0]
        with reader.store.check_complete(newest, state_names.WEIGHTS):
            pass
    with Checkpoints(workdir, TWO) as trains:
        assert trains.newest() == 2


def test_an_empty_folder_with_the_name_of_a_step_is_damaged(workdir):
    shutil.rmtree(workdir / "checkpoints" / "3")
    (workdir / "checkpoints" / "3").mkdir()
    with Checkpoints(workdir) as checkpoints:
        assert checkpoints.problems(3) == ["manifest.json is missing"]
        assert checkpoints.newest() == 2


def test_a_checkpoint_that_its_run_deletes_while_it_is_read_is_not_damaged(workdir, monkeypatch, capsys):
    """The run has saved a newer one meanwhile, which the reader takes."""
    folder, problems = workdir / "checkpoints", SharedFolder.problems
    kept = folder.rename(folder.with_name("kept"))
    folder.mkdir()
    shutil.copytree(kept / "2", folder / "2")

    def meanwhile(store, step, parts=()):
        if step == 2:
            shutil.copytree(kept / "3", folder / "3")
            shutil.rmtree(folder / "2")
        return problems(store, step, parts)

    monkeypatch.setattr(SharedFolder, "problems", meanwhile)
    with Checkpoints(workdir) as reader:
        assert reader.newest() == 3
    shutil.rmtree(folder)
    shutil.copytree(kept / "2", folder / "2")
    assert inspection.checkpoints_table(workdir, workdir, TWO)[0] == [
        "checkpoint 3: good  (kept: newest)", "1 of 1 good"
    ]  # fmt: skip
    assert capsys.readouterr().err == ""


def test_an_array_of_which_no_file_is_left_makes_no_checkpoint(tmp_path):
    """A manifest of the other files would be one of a valid checkpoint."""
    store = SharedFolder(tmp_path)
    store.num_arrays, store.chunks = 2, {"state/a/.zarray": ["state/a/0"]}
    with pytest.raises(OSError, match=r"^1 of 2 arrays are left; others were deleted meanwhile$"):
        store._check_arrays({"state/a/0": [1, "digest"]})
