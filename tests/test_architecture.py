# SPDX-License-Identifier: Apache-2.0
"""Which room may import which, and other rules for the code that a program can check."""

import ast
import functools
import graphlib
import pathlib
import re
import subprocess
import sys

import pytest

from cluster import identity
from rehearsal import compiler
from tests.shape_check import SUFFIX
from tests.support import ROOT

ROOMS = {  # the rooms that a room may import; itself is always allowed
    "files": set(),
    "configs": {"files"},
    "layers": set(),
    "models": {"layers"},
    "objectives": {"layers", "reasoning"},
    "settings": {"configs", "files"},
    "input_pipeline": {"files"},
    "reporting": {"configs", "files", "settings"},
    "cluster": {"configs", "files", "settings", "reporting"},
    "parallelism": {"configs"},
    "training": {"configs", "files", "settings", "layers", "reporting", "cluster", "parallelism"},
    "checkpointing": {"configs", "files", "settings", "layers", "objectives", "reporting", "cluster", "training"},
    "inference": {"configs", "layers", "input_pipeline"},
    "scoring": {"configs", "files", "layers", "input_pipeline", "reporting", "parallelism", "inference"},
    "causality": {"configs", "layers", "reporting"},
    "reasoning": {"configs", "inference", "input_pipeline", "layers", "reporting", "cluster"},
    "puzzles": {"configs", "files", "objectives", "input_pipeline", "reporting"},
}
LOWER = set(ROOMS)
ROOMS["pods"] = {"configs", "files", "settings", "checkpointing", "reporting"}  # of these the files without jax
ROOMS |= dict.fromkeys(("core", "serving"), LOWER)
ROOMS |= dict.fromkeys(("rehearsal", "trained_run"), LOWER | {"core"})
ROOMS |= dict.fromkeys(("studies", "profiling"), LOWER | {"core", "rehearsal"})
COMMANDS = {"train", "generate", "score", "explain", "serve", "rehearse", "convert", "sweep", "pod", "report"}
COMMANDS |= {"optimize_train_tpu"}
OTHERS = {
    "migration": LOWER | {"train", "core", "profiling", "rehearsal", "studies", "trained_run"},
    "examples": LOWER | {"train", "core", "migration"},
    "scripts": LOWER | {"train", "core", "pods", "profiling", "rehearsal"},
    **{name: {"migration"} for name in ("src", "vishwamai", "kellen", "pretrain_jax", "update_experiment_gcs_paths")},
}
OURS = ROOMS.keys() | OTHERS.keys() | COMMANDS

LIBRARIES = {  # where only these of others' may be imported
    "files": {"numpy", "pydantic", "typing_extensions", "yaml"},
    "configs": {"ml_collections"},
    "settings": {"ml_collections"},
    "layers": {"jax", "flax", "qwix"},
    "models": {"jax", "flax"},
    "objectives": {"jax", "flax"},
    "cluster": {"jax", "numpy"},
    "parallelism": {"jax", "flax", "numpy"},
    "causality": {"jax", "flax", "numpy", "optax", "scipy", "networkx"},
    "reasoning": {"jax", "numpy"},
    "pods": {"absl", "rich", "pydantic"},
}


def room(path) -> str:
    """Return the folder of a file, or its own name at the top level."""
    return path.parts[0].removesuffix(".py")


FILES = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/**/*.py")])
FILES = [path for path in FILES if path.parts[0] not in ("tests", "benchmarks", "runs")]


def sources(*folders: str) -> list:
    """Return our Python files, without tests and benchmarks; of all folders, or of these."""
    return [path for path in FILES if not folders or room(path) in folders]


@functools.cache
def tree(path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def imports(path, top_level_only: bool = False) -> set[str]:
    """Return the first names of the modules that a file imports, also inside functions by default."""
    nodes = tree(path).body if top_level_only else ast.walk(tree(path))
    found = [[alias.name for alias in node.names] for node in nodes if isinstance(node, ast.Import)]
    nodes = tree(path).body if top_level_only else ast.walk(tree(path))
    found += [[node.module] for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for names in found for name in names}


def imported_files(path) -> set:
    """Return our files that a file imports, inside functions too."""
    nodes = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {f"{getattr(node, 'module', '')}.{alias.name}".lstrip(".") for node in nodes for alias in node.names}
    names |= {name.rpartition(".")[0] for name in names}
    return {pathlib.Path(f"{name.replace('.', '/')}.py") for name in names} & set(FILES)


def reached(path) -> set:
    """Return our files that a file imports, and those that these import, itself among them."""
    found, left = set(), [path]
    while left:
        found.add(file := left.pop())
        left += imported_files(file) - found
    return found


def test_no_import_goes_round_in_a_circle():
    """Imports inside functions count too; the CycleError names the files."""
    graphlib.TopologicalSorter({path: imported_files(path) for path in FILES}).prepare()


def test_what_a_rehearsal_is_kept_by_is_all_the_code_that_it_compiles():
    """Else a change of a file would leave figures from before it."""
    begins = [pathlib.Path("rehearsal/compilation.py"), *sources("models", "objectives")]
    files = set().union(*map(reached, begins)) - {pathlib.Path("rehearsal/compiler.py")}
    named = {pathlib.Path(name) for name in compiler.COMPILED_CODE}
    assert {path for path in files if path not in named and path.parents[-2] not in named} == set()
    assert all((ROOT / name).exists() for name in named)


def test_hosts_compare_all_the_code_that_a_run_may_import():
    assert identity.code().keys() == {str(path) for path in sources() if room(path) != "scripts"}


@pytest.mark.parametrize("path", sources(), ids=str)
def test_imports_point_down(path):
    ours = (imports(path) & OURS) - {room(path)}
    if room(path) in COMMANDS:  # which may import everything but each other
        assert not ours & COMMANDS
    else:
        assert ours <= (ROOMS | OTHERS)[room(path)]


@pytest.mark.parametrize("path", sources(*LIBRARIES), ids=str)
def test_lower_rooms_know_few_libraries(path):
    others = imports(path) - OURS - sys.stdlib_module_names
    assert others <= LIBRARIES[room(path)]


def test_every_file_belongs_to_a_room_and_none_hides_a_module_of_others():
    assert {room(path) for path in sources()} <= OURS
    tops = {path.name.removesuffix(".py") for path in ROOT.iterdir() if path.suffix in ("", ".py")}
    assert not tops & sys.stdlib_module_names


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_nobody_outside_tests_and_benchmarks_imports(library):
    assert [str(path) for path in sources() if library in imports(path)] == []


def test_tensorflow_is_imported_lazily_and_only_where_data_is_read_and_events_are_written():
    users = {path for path in sources() if "tensorflow" in imports(path)}
    assert {room(path) for path in users} <= {"input_pipeline", "reporting"}
    assert len([path for path in users if room(path) == "reporting"]) <= 1  # the TensorBoard writer
    assert not [path for path in users if "tensorflow" in imports(path, top_level_only=True)]


def test_networkx_is_imported_lazily_and_only_where_causes_are_estimated():
    users = {path for path in sources() if "networkx" in imports(path)}
    assert {room(path) for path in users} == {"causality"}
    assert not [path for path in users if "networkx" in imports(path, top_level_only=True)]


def test_reasoning_gym_is_imported_lazily_in_one_file():
    users = [path for path in sources() if "reasoning_gym" in imports(path)]
    assert [str(path) for path in users] == ["input_pipeline/tasks/questions.py"]
    assert "reasoning_gym" not in imports(users[0], top_level_only=True)


def test_what_answers_at_once_imports_no_jax():
    modules = sorted(".".join(path.with_suffix("").parts) for path in sources("pods"))
    program = (
        f"import importlib, sys; [importlib.import_module(m) for m in {['pod', *modules]}]; print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_no_command_imports_jax_before_it_has_chosen_the_platform():
    """jax reads JAX_PLATFORMS and the folder of compiled programs when it is imported."""
    before = {}
    for path in sources():
        body = tree(path).body
        parsed = [number for number, node in enumerate(body) if "command_line.parse" in ast.unparse(node)]
        if parsed and isinstance(body[parsed[0]], ast.If):
            imported = [node for node in body[: parsed[0]] if isinstance(node, ast.Import | ast.ImportFrom)]
            before[str(path)] = ast.unparse(ast.Module(imported, []))
    assert {"train.py", "rehearse.py", "scripts/deploy_optimizations.py"} <= before.keys()
    program = f"""
import sys
for path, imports in {before}.items():
    exec(imports)
    if "jax" in sys.modules:
        sys.exit(path)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_layers_never_see_a_configuration():
    for path in sources("layers"):
        names = [node.id for node in ast.walk(tree(path)) if isinstance(node, ast.Name)]
        names += [node.arg for node in ast.walk(tree(path)) if isinstance(node, ast.arg)]
        assert "config" not in names, path


def test_errors_are_caught_by_kind_and_types_are_known():
    for path in sources():
        for node in ast.walk(tree(path)):
            caught = ast.unparse(node.type) if isinstance(node, ast.ExceptHandler) and node.type else ""
            bare = isinstance(node, ast.ExceptHandler) and not node.type
            assert not bare and caught not in ("Exception", "BaseException"), f"{path}:{node.lineno}"
            assert not (isinstance(node, ast.Name) and node.id == "hasattr"), f"{path}:{node.lineno}"


MAP = (ROOT / "WORKSPACE.md").read_text()
DECISIONS = ROOT / "docs" / "decisions"


def rows(section: str) -> list[list[str]]:
    """Return the rows of all tables in a section of the map, without their headings."""
    text = MAP.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = re.sub(r"^\|.*\n\|---.*$", "", text, flags=re.MULTILINE).splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]


def test_what_the_map_and_the_decisions_name_is_there():
    """Every `file.py: name` of WORKSPACE.md and of docs/decisions/."""
    pages = [MAP, *(path.read_text() for path in DECISIONS.glob("*.md"))]
    named = [set(re.findall(r"`([\w/]+\.py):\s+(\w+)`", page)) for page in pages]
    assert len(named[0]) > 30 and len(set().union(*named)) > 50
    for path, name in set().union(*named):
        defined = rf"^ *(def|class) {name}\b|^{name}\b.* = |^ *self\.{name} = "
        assert re.search(defined, (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {name}"


def test_the_map_has_a_line_for_every_room_and_every_file_at_the_top():
    named = {cell.strip("`/") for cell, _ in rows("Rooms")}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))}
    folders = {name for name in folders if name not in ("build", "runs") and not name.endswith(".egg-info")}
    assert named == folders | {path.name for path in ROOT.glob("*.py")}


def test_the_files_that_the_map_sorts_by_subject_are_in_their_rooms():
    for cell, _, files in rows("Files by subject"):
        named = re.findall(r"`(\w+\.py)`", files)
        assert named and not [name for name in named if not (ROOT / cell.strip("`") / name).exists()], cell


def test_the_map_says_who_may_import_whom_as_it_is_checked_here():
    written = {}
    for cell, allowed in rows("Who may import whom"):
        names = set(re.findall(r"`(\w+)`", allowed)) | (LOWER if "lower rooms" in allowed else set())
        written |= {name: names for name in re.findall(r"`(\w+)`", cell)}
    there = {room(path) for path in sources()} - COMMANDS
    assert written == {name: names for name, names in (ROOMS | OTHERS).items() if name in there}


def test_the_map_can_be_read_at_one_sitting_and_leads_to_every_decision():
    assert len(MAP.split()) <= 2700
    index = (DECISIONS / "README.md").read_text()
    assert "(docs/decisions/README.md)" in MAP
    for path in DECISIONS.glob("*.md"):
        assert path.name == "README.md" or f"]({path.name})" in index, path.name
    long = [
        f"{path.name}:{number}" for path in (ROOT / "WORKSPACE.md", *DECISIONS.glob("*.md"))
        for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 120 and not line.startswith("|")
    ]  # fmt: skip
    assert not long


def test_shapes_are_checked_by_the_letters_of_the_legend():
    """And every suffix in the checked rooms is made of them."""
    section = MAP.partition("## Shapes")[2].partition("##")[0]
    legend = set(re.findall(r"(?:^|[,:]\s)([A-Z])(?=\s[a-z=])", section, re.MULTILINE))
    assert len(legend) >= 13
    checked = {letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if SUFFIX.fullmatch(f"x_{letter}")}
    assert checked == legend
    for path in sources("layers", "models", "objectives"):
        names = {node.id for node in ast.walk(tree(path)) if isinstance(node, ast.Name)}
        suffixed = {name for name in names if re.search(r"[a-z]_[A-Z]+$", name)}
        assert all(SUFFIX.fullmatch(name) for name in suffixed), path
