# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/ say can be followed: links lead somewhere, commands can be typed, keys are there.

No command is run here; but its file, its flags, its recipe, its topology and what it sets are held to those that exist,
as the command itself would, and a recipe with all of that to what makes a configuration consistent.
"""

import json
import pathlib
import re
import shlex

import pytest

import pod
from configs import base, topologies
from core.command_line import split_overrides
from pods import settings
from settings import loading, validation
from settings.keys import flat
from tests.support import ROOT

DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
PAGES = ("README.md", "WORKSPACE.md", "PROMISES.md", *DOCS)
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
DEFINED = re.compile(r'DEFINE_\w+\(\s*"(\w+)"')
PYTHON = (".venv/bin/python", "$python")
OF_MAKE = {"train": "train.py", "rehearse": "rehearse.py"}


def words_typed() -> list[list[str]]:
    """Return each command of the fenced blocks: a Python file and what follows, or `make`, target and variables."""
    blocks = [block for page in ("README.md", *DOCS) for block in FENCED.findall((ROOT / page).read_text())]
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        if not re.search(r"(^|\s)(make|\.venv/bin/python|\$python) \w", line):
            continue
        words = shlex.split(line.partition(" & ")[0], comments=True)
        begins = next((n for n, word in enumerate(words) if word in (*PYTHON, "make")), None)
        if begins is not None:
            found.append(words[begins:] if words[begins] == "make" else words[begins + 1 :])
    return found


def as_python(words: list[str]) -> list[str]:
    """Return what a command of make passes on to Python, by the Makefile; the target's other variables are checked."""
    target, given = words[1], dict(word.split("=", 1) for word in words[2:])
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert all(f"$({name})" in makefile or f"$({name}," in makefile for name in given), given
    flags = [f"--{name.lower()}={given[name]}" for name in ("CONFIG", "TOPOLOGY", "WORKDIR") if name in given]
    return [OF_MAKE.get(target, ""), *flags, *shlex.split(given.get("ARGS", ""))]


COMMANDS = words_typed()


def test_the_commands_were_found():
    files = {words[0] for words in COMMANDS}
    assert {"make", "train.py", "rehearse.py", "generate.py", "convert.py", "pod.py"} <= files and len(COMMANDS) > 50


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_could_be_typed(words):
    file, *rest = as_python(words) if words[0] == "make" else words
    if not file:
        return
    text = (ROOT / file).read_text()
    if file == "pod.py":
        assert settings.read(rest[: rest.index("--")] if "--" in rest else rest)[1][0] in pod.SUBCOMMANDS
        return
    overrides, rest = split_overrides(rest)
    given = dict(word.removeprefix("--").partition("=")[::2] for word in rest if word.startswith("--"))
    if "import command_line" in text:
        known = DEFINED.findall(text + (ROOT / "core/command_line.py").read_text())
        assert given.keys() <= {*known, "config", "topology", "workdir"}
    topology = topologies.get(given["topology"]) if given.get("topology") else None
    assert all(topologies.get(name) for name in given.get("compare", "").split(",") if name)
    recipe = given.get("config", "")
    loaded = loading.load(recipe or "configs/tiny.py", given.get("topology", ""), overrides)
    if recipe:
        validation.validate(loaded.config, topology.chips if topology else 1, loaded)


def anchors(page: pathlib.Path) -> set[str]:
    """Return what a link to a heading of a page may have after its #."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: str) -> list[str]:
    """Return the targets of the links and pictures of a page."""
    return re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text())


@pytest.mark.parametrize("page", PAGES)
def test_links_and_anchors_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        if path.startswith("https://"):
            continue
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


def test_the_readme_is_short_and_leads_to_every_page():
    """1,900 words are read in some eight minutes; what is left to say stands on a page of docs/."""
    assert len((ROOT / "README.md").read_text().split()) <= 1900
    pages = [page for page in DOCS if page.count("/") == 1]
    assert {"PROMISES.md", "WORKSPACE.md", "docs/decisions/README.md", *pages} <= {
        link.partition("#")[0] for link in links("README.md")
    }


@pytest.mark.parametrize("page", ["README.md", *DOCS])
def test_lines_fit_a_screen(page):
    """Tables have a row a line, and a command that is pasted may be long."""
    lines = FENCED.sub("", (ROOT / page).read_text()).splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]


@pytest.mark.parametrize("page", ["README.md", "WORKSPACE.md", *DOCS])
def test_configuration_keys_and_files_that_are_named_are_there(page):
    text, keys = (ROOT / page).read_text(), flat(base.get_config())
    sections = "|".join(base.get_config())
    named = set(re.findall(rf"(?:--config\.|`)((?:{sections})\.(?!py`)[a-z]\w*)(?=[=`])", text))
    assert named - {"train.train"} <= keys.keys(), named - keys.keys()
    files = set(re.findall(r"`((?:[a-z]\w*/)*[a-z]\w*\.(?:py|sh|md|toml))[`:]", text))
    assert not [file for file in files if not (ROOT / file).exists() and not any(ROOT.glob(f"[a-z]*/**/{file}"))]


FIGURES = (  # rehearsed, of the table of figures
    "llama2_7b_2048_v4-32", "llama2_7b_2048_v4-64", "llama2_7b_2048_2xv4-32", "llama2_7b_4x4x2_v4-64",
    "llama2_13b_2048_v4-32", "mixtral_8x7b_v5p-128", "deepseek_like_v5p-128", "mixtral_8x7b_v4-64",
    "deepseek_like_v4-64",
)  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_what_steps_are_said_to_take_is_recorded(name):
    recorded = json.loads((ROOT / f"rehearsal/recorded/{name}.json").read_text())["figures"]
    section = (ROOT / "docs/results.md").read_text().partition("## Figures")[2]
    assert f"{recorded['step_seconds']:.2f} s" in section


@pytest.mark.parametrize("page", ["README.md", "docs/rehearsal.md"])
def test_the_rehearsal_that_is_shown_is_the_recorded_one(page):
    shown = (ROOT / page).read_text()
    recorded = json.loads((ROOT / "rehearsal/recorded/llama2_7b_v4-32.json").read_text())["figures"]
    chip, step = topologies.get("v4-32"), recorded["step_seconds"]
    assert f"FITS: {recorded['hbm_gib']:.1f} of {chip.hbm_gib} GiB a chip" in shown
    assert f"TIME: {step:.2f} s a step, MFU {recorded['flops_model'] / step / chip.peak_flops:.1%}" in shown
