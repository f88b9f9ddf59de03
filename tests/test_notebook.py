# SPDX-License-Identifier: Apache-2.0
"""The notebook of the first hour is a valid one, and its cells run in their order.

No notebook library is installed. So `program` joins the code cells for one fresh Python process, and replaces the
numbers of the cell tagged `parameters` by small ones, as papermill does.
"""

import json
import os
import re
import sys

import pytest

from tests import warm
from tests.support import ROOT
from tests.test_train_trm import SMALL as SMALL_PUZZLES

NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
SMALL = {
    "model.num_layers": 1, "model.embed_dim": 32, "model.num_heads": 2, "model.num_kv_heads": 2, "model.mlp_dim": 48,
    "model.vocab_size": 300, "model.max_length": 128, "train.sequence_length": 32, "evaluation.sample_tokens": 8,
    "evaluation.batches": 1, "data.tokenizer": "byte", "train.log_every": 1, "logging.tensorboard": False,
    "logging.report": False,
}  # fmt: skip


def program(parameters: str) -> str:
    """Return the code cells as one program, with other parameters."""
    return "\n\n".join(
        parameters if "parameters" in cell["metadata"].get("tags", ()) else "".join(cell["source"])
        for cell in CELLS
        if cell["cell_type"] == "code"
    )


def test_the_notebook_is_valid_and_its_outputs_are_cleared():
    """Version 4.5 of the format: each cell has an id of its own, code cells have outputs and a count."""
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5) and "metadata" in notebook
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    for cell in CELLS:
        assert re.fullmatch(r"[\w-]{1,64}", cell["id"]) and isinstance(cell["metadata"], dict)
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            compile("".join(cell["source"]), cell["id"], "exec")
        else:
            assert cell["cell_type"] == "markdown" and "outputs" not in cell


def test_links_of_the_notebook_lead_somewhere():
    text = "".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and all((NOTEBOOK.parent / link).exists() for link in links)


@pytest.mark.parametrize("folder", [ROOT, NOTEBOOK.parent], ids=["from_the_root", "from_its_folder"])
def test_the_notebook_finds_the_workspace(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    exec("".join(code[0]["source"]), {})
    assert os.getcwd() == str(ROOT) == sys.path[0]


@pytest.mark.slow
def test_its_cells_run_in_their_order_in_a_fresh_process(tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} is a number; " * 40)
    keys = SMALL | {"data.path": f"{tmp_path}/texts/*.txt", "data.holdout_fraction": 0.4}
    puzzles = {key: value for key, value in SMALL_PUZZLES.items() if key != "train.steps"}
    parameters = (
        f"FOLDER = pathlib.Path({str(tmp_path / 'runs')!r})\n"
        f"STEPS, MORE_STEPS, TUNING_STEPS, PUZZLE_STEPS = 2, 3, 2, 2\nKEYS, PUZZLE_KEYS = {keys}, {puzzles}\n"
    )
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XLA_FLAGS": " ".join(flags)}
    process = warm.start(["-c", program(parameters)], environment)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "finished at step 2" in out and "finished at step 3" in out
    assert "step 1: probability of halting" in out
    assert (tmp_path / "runs" / "tiny.png").stat().st_size > 0
    listed = out.rpartition("held out\n")[2]
    assert all(f"runs/{name}" in listed for name in ("tiny", "tuned", "sudoku"))
