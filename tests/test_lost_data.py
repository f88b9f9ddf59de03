# SPDX-License-Identifier: Apache-2.0
"""Shards that vanish in mid-run are built again; where they cannot be, the run is saved and ends with status 1."""

import json
import re
import shutil

import pytest

from checkpointing.lost_data import DataGone
from reporting.step_log import StepLog
from tests import groups
from tests.support import write_sums
from tests.test_groups import ENDLESS, none_left, start, wait_for  # noqa: F401
from tests.test_survival import assert_same, lines_of, on_texts, run, saved_states

FEW = {"train__steps": 10, "train__save_every": 100, "data__readers": 1, "data__prefetch": 1}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder with documents of sums."""
    folder = tmp_path_factory.mktemp("lost")
    write_sums(folder / "texts", 40)
    return folder


@pytest.fixture
def own(texts, tmp_path):
    """A copy of it, with a cache of its own."""
    shutil.copytree(texts / "texts", tmp_path / "texts")
    return tmp_path


@pytest.fixture
def after(monkeypatch):
    """Have something done after a step."""

    def arrange(step: int, do) -> None:
        add = StepLog.add

        def added(log, number, *rest):
            add(log, number, *rest)
            if number == step:
                do()

        monkeypatch.setattr(StepLog, "add", added)

    return arrange


def lose(folder, pattern: str = "*.bin"):
    for path in (folder / "cache" / "shards").glob(f"*/{pattern}"):
        path.unlink()


def spoil(folder):
    """Make one of the documents another one."""
    path = folder / "texts" / "0.txt"
    path.write_text(path.read_text() + "and more")


@pytest.fixture(scope="module")
def calm(texts):
    """A run that nothing happened to: its configuration, folder and lines."""
    config = on_texts(texts, **FEW)
    return config, texts / "calm", run(config, texts / "calm")


@pytest.mark.slow
def test_a_run_whose_shards_vanish_goes_on_to_the_same_bits(calm, own, after, capsys):
    after(4, lambda: lose(own))
    lines = run(on_texts(own, **FEW), own / "run")
    assert {step: line["loss"] for step, line in lines.items()} == {s: line["loss"] for s, line in calm[2].items()}
    assert_same(*saved_states(calm[0], (calm[1], 10), (own / "run", 10)))
    said = capsys.readouterr().out
    assert len(re.findall(r"train-\d+.bin: is missing; rebuilding it from its documents", said)) == 1
    assert "tokenized 40 documents" in said[said.index("rebuilding it") :]


@pytest.mark.slow
def test_a_run_whose_shards_cannot_be_built_again_saves_and_goes_on_when_the_documents_are_back(calm, own, after):
    document = (own / "texts" / "0.txt").read_text()
    after(4, lambda: (spoil(own), lose(own, "train*.bin")))
    with pytest.raises(DataGone) as caught:
        run(on_texts(own, **FEW), own / "run")
    line = str(caught.value)
    found = re.search(
        r"train-\d+.bin: is missing, and cannot be rebuilt: the documents have .*; saved at step (\d)", line
    )
    assert found and "\n" not in line and caught.value.exit_status == 1
    saved = int(found[1])
    assert 4 <= saved < 10 and [path.name for path in (own / "run" / "checkpoints").glob("[0-9]*")] == [str(saved)]
    (own / "texts" / "0.txt").write_text(document)
    run(on_texts(own, **FEW), own / "run")
    assert_same(*saved_states(calm[0], (calm[1], 10), (own / "run", 10)))


@pytest.mark.slow
def test_held_out_shards_that_cannot_be_built_again_end_an_evaluation_and_the_run_is_saved(own, after):
    after(3, lambda: (spoil(own), lose(own, "heldout*.bin")))
    with pytest.raises(DataGone, match=r"heldout-\d+.bin: is missing, and .*; saved at step 4$"):
        run(on_texts(own, **FEW | {"train__eval_every": 4}), own / "run")
    assert [path.name for path in (own / "run" / "checkpoints").glob("[0-9]*")] == ["4"]
    assert 4 not in lines_of(own / "run", "eval")


@pytest.mark.slow
def test_a_loss_after_the_last_step_is_no_usage_error_either(own, after):
    after(10, lambda: (spoil(own), lose(own, "heldout*.bin")))
    with pytest.raises(DataGone, match=r"heldout-\d+.bin: is missing, and .*; saved at step 10$"):
        run(on_texts(own, **FEW), own / "run")


@pytest.mark.slow
def test_of_a_group_one_builds_its_shards_again_and_where_it_cannot_all_save_and_end(own):
    """Two processes with a cache each: the second one's shards vanish, and later also a document changes."""
    caches = [own / "cache0", own / "cache1"]
    variables = {number: {"XDG_CACHE_HOME": str(cache)} for number, cache in enumerate(caches)}
    changes = ENDLESS | {"train.eval_every": 0, "train.save_every": 100_000, "data.readers": 1, "data.prefetch": 1}
    both = start(own, "group", 2, changes, variables=variables)

    def lose_own() -> None:
        for path in (caches[1] / "torus" / "shards").glob("*/train*.bin"):
            path.unlink()

    wait_for(own, "group", '"kind": "train", "step": 5', both)
    lose_own()
    last = max(lines_of(own / "group", "train"))
    wait_for(own, "group", f'"kind": "train", "step": {last + 20}', both)
    spoil(own)
    lose_own()
    ended = groups.finish(both)
    assert [status for status, _, _ in ended] == [1, 1], ended
    lines = [err.splitlines()[-1] for _, _, err in ended]
    said = r"train-\d+.bin: is missing, and cannot be rebuilt: the documents have changed .*; saved at step (\d+)$"
    steps = [re.search(said, line) for line in lines]
    assert all(steps), lines
    step = steps[0][1]
    record = json.loads((own / "group" / "checkpoints" / step / "record.json").read_text())
    assert record["step"] == int(step) > last + 20
    log = (own / "group" / "logs" / "train_worker_1.out").read_text()
    assert len(re.findall("rebuilding it from its documents", log)) == 2
