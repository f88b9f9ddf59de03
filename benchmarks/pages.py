# SPDX-License-Identifier: Apache-2.0
"""The commands that the pages show: in fenced blocks, in the text, in docstrings, and by `make help`.

Nothing is run here. benchmarks/docs.py runs them, and tests/test_readme.py checks what they name.
"""

import ast
import dataclasses
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
DOCSTRINGS, HELP = "docstrings", "make help"  # pages without a file
COMMANDS = "train|generate|serve|score|explain|rehearse|sweep|convert|report|pod|optimize_train_tpu|pretrain_jax"
PYTHON = r"(?:\.venv/bin/|uv run )?python[\d.]*|\$python"
# What begins a command, after variables of its own: a program of a shell, or one of ours.
BEGINS = re.compile(
    rf"(?:[A-Z_]+=\S* )*(?:make [a-z]|(?:{PYTHON}) [-\w]|\.venv/bin/\w|(?:{COMMANDS})\.py [-a-z]|scripts/\w+\.sh"
    r"|(?:export|for|cat|printf|echo|curl|openssl|gcloud|git|pip|uv|xprof) |exit$|python=)"
)
# In the text, only our own programs: `git` and `pip` are words there.
OURS = re.compile(
    rf"(?:[A-Z_]+=\S* )*(?:make [a-z]|(?:{PYTHON}) (?:-[mc] |\S+\.py)|(?:{COMMANDS})\.py [-a-z]|scripts/\w+\.sh \w)"
)
IN_DOCSTRING = re.compile(
    rf"(?:^ *|Command: |[.:] )((?:make [a-z]+ [A-Z]|(?:{PYTHON}) \S+\.py|make [a-z]+$).*)", re.MULTILINE
)


@dataclasses.dataclass(frozen=True)
class Shown:
    """A command of a page, as it stands there. `language` is "shell" or "python"; `is_block`: not within a sentence."""

    page: str
    text: str
    language: str = "shell"
    is_block: bool = True


def names() -> list[str]:
    """Return the pages, those without a file last."""
    docs = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
    return ["README.md", "WORKSPACE.md", *docs, DOCSTRINGS, HELP]


def commands(page: str) -> list[Shown]:
    """Return the commands of a page in their order.

    Raises:
      ValueError: a line of a script is not a command that is known here.
    """
    if page == DOCSTRINGS:
        return [Shown(page, text) for text in _of_docstrings()]
    if page == HELP:
        return [Shown(page, text) for text in _of_help((ROOT / "Makefile").read_text())]
    text, found, end = (ROOT / page).read_text(), [], 0
    for block in FENCED.finditer(text):
        found += _of_text(page, text[end : block.start()])
        end = block.end()
        if block[1] == "python":
            found.append(Shown(page, block[2], "python"))
        elif not block[1]:
            found += [Shown(page, line) for line in _script(page, block[2])]
    return [*found, *_of_text(page, text[end:])]


def _of_text(page: str, text: str) -> Iterator[Shown]:
    for match in INLINE.finditer(text):
        words = " ".join(match[1].split())
        if OURS.match(words) and "..." not in words:
            yield Shown(page, words, is_block=False)


def _script(page: str, block: str) -> list[str]:
    """Return the logical lines of a block that begins with a command, up to the output that it shows."""
    lines, found = block.splitlines(), []
    while lines:
        line = lines.pop(0)
        while line.endswith("\\") and lines:
            line += "\n" + lines.pop(0)
        if (end := re.search(r"<<'(\w+)'", line)) and lines:
            while not line.endswith("\n" + end[1]):
                line += "\n" + lines.pop(0)
        if BEGINS.match(line):
            found.append(line)
        elif found and line:
            raise ValueError(f"{page}: {line!r} stands among commands, and begins with no program that is known here")
        elif line or found:  # output
            break
    return found


def _of_docstrings() -> list[str]:
    """Return the commands in module docstrings of all Python files, without those of tests."""
    places = [path for path in ROOT.iterdir() if path.name not in ("tests", "runs") and not path.name.startswith(".")]
    files = [file for path in places for file in (path.rglob("*.py") if path.is_dir() else [path])]
    found = []
    for file in sorted(file for file in files if file.suffix == ".py"):
        docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
        # A sentence that a command ends goes on in the next line; a list of commands has one a line.
        for match in IN_DOCSTRING.finditer(re.sub(r"(Command: .*)\n(?=\S)", r"\1 ", docstring)):
            found.append(_without_remarks(match[1]))
    return found


def _without_remarks(text: str) -> str:
    """Return a command without what may be left out, in brackets, and without the sentence around it."""
    text = re.sub(r" \[[^\]]*\]| \.\.\.", "", text)
    return re.split(r"; |\s{2,}|\.$| prints ", text)[0].strip()


def _of_help(makefile: str) -> list[str]:
    """Return each target with the variables that `make help` shows for it; of choices, the first."""
    found = []
    for target, said in re.findall(r"^([a-z-]+):[^#\n]*## (.*)$", makefile, re.MULTILINE):
        shown = re.findall(r'([A-Z]+=(?:"[^"]*"|[^\s\]]+))', re.sub(r"make [a-z]+ \S+", "", said))
        variables = [word.split("|")[0] for word in shown if "..." not in word]
        found.append(" ".join(["make", target, *variables]))
    return found
