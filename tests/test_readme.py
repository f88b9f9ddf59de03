# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/ say can be followed: links lead somewhere, commands can be typed, keys are there.

No command is run here, which benchmarks/docs.py does; but its file, its flags, its recipe, its topology and what it
sets are held to those that exist, as the command itself would, and a recipe with all of that to what makes a
configuration consistent. The commands are those of all pages, of docstrings and of `make help`.
"""

import json
import pathlib
import re
import shlex

import pytest

import pod
from benchmarks import pages
from configs import base, topologies
from core.overrides import split_overrides
from pods import settings
from settings import loading, validation
from settings.keys import flat
from tests import support
from tests.support import ROOT


@pytest.fixture(scope="module")
def docs():
    """The benchmark, as a module."""
    with support.benchmark("docs") as module:
        yield module


DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
PAGES = ("README.md", "WORKSPACE.md", "PROMISES.md", *DOCS)
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
DEFINED = re.compile(r'DEFINE_\w+\(\s*"(\w+)"')
PROGRAM = re.compile(r"(\.venv/bin/)?python[\d.]*|\$python")
SWEEPS = ("plan", "run", "status", "report", "guide", "folders", "cancel", "retry", "search")
OWN_RECIPES = ("RECIPE", "FILE")
OF_MAKE = {"train": "train.py", "rehearse": "rehearse.py"}


def words_of(shown: pages.Shown) -> list[str]:
    """Return a Python file or `-m MODULE` and what follows, or `make`, target and variables; [] for other programs."""
    text = re.sub(r"\\\n", " ", shown.text).partition(" & ")[0]
    words = [] if "<<" in text else shlex.split(text, comments=True)
    starts = (n for n, word in enumerate(words) if word == "make" or PROGRAM.fullmatch(word) or word.endswith(".py"))
    begins = next(starts, None)
    if begins is None or words[0] in ("pip", "uv"):
        return []
    return words[begins:] if words[begins] == "make" or words[begins].endswith(".py") else words[begins + 1 :]


def as_python(words: list[str]) -> list[str]:
    """Return what a command of make passes on to Python, by the Makefile; the target's other variables are checked."""
    target, given = words[1], dict(word.split("=", 1) for word in words[2:])
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert all(f"$({name})" in makefile or f"$({name}," in makefile for name in given), given
    if target == "bench":
        named = [name for name in given.get("ARGS", "").split() if name != "NAME"]
        assert all((ROOT / f"benchmarks/{name}.py").exists() for name in named), named
    flags = [f"--{name.lower()}={given[name]}" for name in ("CONFIG", "TOPOLOGY", "WORKDIR") if name in given]
    return [OF_MAKE.get(target, ""), *flags, *shlex.split(given.get("ARGS", ""))]


SHOWN = [shown for page in pages.names() for shown in pages.commands(page) if shown.language == "shell"]
COMMANDS = sorted({tuple(words) for shown in SHOWN if (words := words_of(shown))})


def test_the_commands_were_found():
    files = {words[0] for words in COMMANDS}
    assert {"make", "train.py", "rehearse.py", "generate.py", "convert.py", "pod.py"} <= files and len(COMMANDS) > 150
    assert {pages.HELP, pages.DOCSTRINGS, "WORKSPACE.md", "README.md"} <= {shown.page for shown in SHOWN}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_could_be_typed(words):
    file, *rest = as_python(words) if words[0] == "make" else words
    if file == "-m":
        assert rest[0] in ("pip", "venv") or (ROOT / f"{rest[0].replace('.', '/')}.py").exists()
        return
    if file in ("", "-c"):
        return
    text = (ROOT / file).read_text()
    if file == "pod.py":
        named = settings.read(rest[: rest.index("--")] if "--" in rest else rest)[1][0]
        assert {**pod.SUBCOMMANDS, **pod.ALIASES, "SUBCOMMAND": ""}.get(named) is not None
        return
    overrides, rest = split_overrides(rest)
    given = {}
    for word in rest[: rest.index("--") if "--" in rest else None]:
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            given[name.replace("-", "_")] = value
    if DEFINED.search(text):
        known = DEFINED.findall(text + (ROOT / "core/command_line.py").read_text())
        assert given.keys() <= {*known, "config", "topology", "workdir"}
    elif "argparse" in text:
        assert given.keys() <= set(re.findall(r'add_argument\("--(\w+)"', text))
    if "sweep.py" in file:
        assert rest[0] in SWEEPS
    topology = topologies.get(given["topology"]) if given.get("topology") else None
    assert all(topologies.get(name) for name in given.get("compare", "").split(",") if name)
    recipe = given.get("config", "") if given.get("config") not in OWN_RECIPES else ""
    loaded = loading.load(recipe or "configs/tiny.py", given.get("topology", ""), overrides)
    if recipe:
        validation.validate(loaded.config, topology.chips if topology else 1, loaded)


def test_each_command_is_run_or_has_a_reason_and_no_reason_is_stale(docs):
    assert {docs.why_not(shown) for shown in SHOWN} >= {"", *(reason for _, reason in docs.NOT_HERE)}
    for pattern, reason in docs.NOT_HERE:
        assert any(re.search(pattern, shown.text) for shown in SHOWN), (pattern, reason)


@pytest.mark.parametrize("line", ["frobnicate --now", "  loss 3.2"])
def test_a_line_among_commands_that_nobody_would_run_is_an_error(line):
    with pytest.raises(ValueError, match="begins with no program that is known here"):
        pages._script("docs/page.md", f"make train\n{line}\n")


def test_output_after_an_empty_line_is_no_command():
    assert pages._script("docs/page.md", "make train\n\nstep 10/20\n") == ["make train"]
    assert pages._script("docs/page.md", "step 10/20\nmake train\n") == []


def test_a_verdict_says_what_the_page_says(docs):
    def shown(text):
        return pages.Shown("docs/page.md", text)

    def ends_with(status):
        return lambda shown: (status, "why")

    assert docs.judge(shown("make runs"), ends_with(0)) == ("works", "")
    assert docs.judge(shown("make runs"), ends_with(2)) == ("failed with status 2, not 0", "why")
    preempted = shown('train.py --faults="sigterm@20"')
    assert docs.judge(preempted, ends_with(75)) == ("works, with status 75 as the page says", "")
    assert docs.judge(preempted, ends_with(0)) == ("failed with status 0, not 75", "why")
    assert docs.judge(shown("$python pod.py create"), ends_with(0)) == (f"{docs.POD}; its dry run works", "")
    assert docs.judge(shown("$python pod.py create"), ends_with(1))[0].startswith("failed")
    assert docs.judge(shown("gcloud compute tpus list"), None) == (docs.CLOUD, "")


def test_a_run_is_shortened_by_keys_that_the_page_does_not_set(docs):
    assert docs.shortened('make train ARGS="--config.train.steps=220"   # 78 s').startswith(
        'make train ARGS="--config.train.steps=50 --config.train.eval_every=0'
    )
    assert docs.shortened("train.py --workdir=runs/mine") == "train.py --workdir=runs/mine", "which continues"
    assert docs.shortened("generate.py --workdir=runs/tiny") == "generate.py --workdir=runs/tiny"
    assert docs.shortened("train.py --explain_step=100 --workdir=runs/mine").endswith("=2 --workdir=runs/mine")


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


def numbers(text: str) -> list[str]:
    """Return the numbers of a text, without commas for thousands."""
    return re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-\d+)?", re.sub(r"(?<=\d),(?=\d{3})", "", text))


def is_rounded(shown: str, value: float) -> bool:
    """Return whether a number that a page shows is a value or a percentage, rounded to the digits of the number."""
    mantissa, _, exponent = shown.partition("e")
    digits = len(mantissa.partition(".")[2])
    how = f".{digits}e" if exponent else f".{digits}f"
    return any(f"{float(shown):{how}}" == f"{times * value:{how}}" for times in (1, 100))


def test_figures_of_a_row_that_names_a_benchmark_are_those_of_its_section():
    results = (ROOT / "benchmarks/RESULTS.md").read_text()
    rows = (ROOT / "docs/results.md").read_text().partition("## Figures")[2].splitlines()
    found = {row: re.findall(r"\]\(\.\./benchmarks/(\w+)\.py\)", row) for row in rows if row.startswith("| ")}
    assert sum(map(bool, found.values())) > 40
    for row, names in found.items():
        for name in names:
            section = results.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
            table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
            measured = [float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", table)]
            shown = numbers(row.rstrip(" |").rpartition(" | ")[2])
            wrong = [one for one in shown if not any(is_rounded(one, value) for value in measured)]
            assert not wrong, f"{wrong} of section {name} in: {row}"
