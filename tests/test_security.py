# SPDX-License-Identifier: Apache-2.0
"""What is read cannot run as code, and secrets of the environment stay there."""

import ast
import re

import pytest

from cluster import identity
from pods.settings import UNREAD
from tests.support import ROOT
from tests.test_architecture import imports, sources, tree
from tests.test_train import arguments, command, finish

FILES = [*sources(), *sorted(path.relative_to(ROOT) for path in (ROOT / "benchmarks").glob("**/*.py"))]
UNPICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "joblib", "marshal"}
RUNNING = {"eval", "exec", "__import__", "torch.load", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen"}
LOADING_CODE = {"importlib.util.spec_from_file_location", "runpy.run_path"}
RECIPES = "settings/loading.py"  # which runs what --config names, as docs/training.md says
SECRET = "s3cret-that-nobody-may-keep"
SECRETS = (
    "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "OPENAI_API_KEY", "DATABASE_PASSWORD",
    "TORUS_RUN_SECRET",
)  # fmt: skip
FAILING = "import train; from core import command_line; train.train_from = None; train.main(command_line.parse(''))"


def calls(path) -> list[tuple[str, dict[str, str]]]:
    """Return the calls in a file: the function as written, and the keyword arguments."""
    found = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
    return [(ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}) for node in found]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_nothing_that_is_read_runs_as_code(path):
    assert not imports(path) & UNPICKLING
    for function, keywords in calls(path):
        assert function not in RUNNING
        assert function not in LOADING_CODE or str(path) == RECIPES
        assert function not in ("np.load", "numpy.load") or keywords.get("allow_pickle") == "False"
        assert keywords.get("allow_pickle", "False") == "False" and keywords.get("shell", "False") == "False"
        assert function.rpartition(".")[2] != "extractall"  # an archive's members may lie outside of the folder


def test_the_scan_sees_what_it_looks_for():
    assert "importlib.util.spec_from_file_location" in dict(calls(FILES[[*map(str, FILES)].index(RECIPES)]))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with texts, and the environment full of secrets."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "texts").mkdir()
    for number in range(20):
        (folder / "texts" / f"{number}.txt").write_text(f"{number} and {number + 1} and so on; " * 60)
    with pytest.MonkeyPatch.context() as patch:
        for name in SECRETS:
            patch.setenv(name, SECRET)
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize(("script", "status"), [(["train.py"], 0), (["-c", FAILING], 1)], ids=["whole", "failed"])
def test_a_run_keeps_no_secret(place, script, status):
    given = arguments(place, f"ends-{status}", train__steps=3, logging__alerts=f"http://127.0.0.1:9/{SECRET}")
    ended, out, err = finish(command(*script, *given, cache=place / "cache"))
    assert ended == status, err
    log = place / f"ends-{status}" / "logs" / "train_worker_0.out"
    assert status == 0 or "Traceback (most recent call last)" in log.read_text()
    files = [path for path in place.rglob("*") if path.is_file()]
    assert {"config.json", "lock"} <= {path.name for path in files}
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET not in out + err


def test_hosts_compare_and_notes_show_no_variable_that_may_hold_a_secret():
    shown = {*identity.VARIABLES, *UNREAD}
    assert not [name for name in shown if re.search("TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL|AUTH", name)]


def test_the_tests_that_the_page_on_security_names_are_there():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "security.md").read_text())
    assert len(named) > 30
    assert not [name for file, name in named if name and f"def {name}(" not in (ROOT / file).read_text()]
    assert not [file for file, _ in named if not (ROOT / file).is_file()]
