# SPDX-License-Identifier: Apache-2.0
"""Trains features together, resumes the run in its middle, and compares it with the run that was not stopped."""

import contextlib
import hashlib
import io
import json
import pathlib
import shutil
from collections.abc import Iterable

import train
from settings.keys import from_flat
from settings.validation import validate
from tests.features import BASE, DEVICES, FOLDER, SAVED, SOURCE, STEPS, keys_of
from tests.input_pipeline.chat.conftest import write_lines

OF_SOURCE = ("model.", "train.sequence_length", "data.tokenizer")  # keys that a run shares with the one it begins from
TIMED = ("state/_CHECKPOINT_METADATA", "state/commit_success.txt")  # files of a checkpoint that have the time
COMPARED = (
    "loss",
    "gradient_norm",
    "learning_rate",
    "global_batch",
    "tokens",
    "total_tokens",
    "skipped",
    "noise_scale",
)


class Place:
    """A folder with the data of all features, and with the runs that others begin from."""

    def __init__(self, folder: pathlib.Path):
        """Write the data, unless it is there."""
        self.folder = folder.resolve()
        if not (folder / "texts").exists():
            self._write()

    def _write(self) -> None:
        (self.folder / "texts").mkdir(parents=True)
        for number in range(20):
            words = " ".join(f"{n * (number + 3)} is {n} times {number + 3};" for n in range(20))
            (self.folder / "texts" / f"{number}.txt").write_text(words)
        asked = [{"role": "user", "content": "hm"}]
        answers = [[{"role": "assistant", "content": f"{word} {n}"} for word in ("yes", "no")] for n in range(100)]
        write_lines(self.folder / "chat.jsonl", [{"messages": [*asked, yes]} for yes, _ in answers])
        sides = [{"prompt": asked, "chosen": [yes], "rejected": [no]} for yes, no in answers]
        write_lines(self.folder / "preferences.jsonl", sides)
        write_lines(self.folder / "questions.jsonl", [{"question": "1 2", "choices": ["3", "4"], "answer": 0}])
        rows = [",".join(str((row * cell) % 17) for cell in range(16)) + f",{row % 10}\n" for row in range(100)]
        (self.folder / "labeled.csv").write_text("".join(rows))

    def config(self, keys: dict[str, object]):
        """Return a validated run with these keys on the data of this place."""
        keys = dict(keys)
        for key, value in keys.items():
            if value == SOURCE:
                keys[key] = str(self.source(keys))
            elif isinstance(value, str):
                keys[key] = value.replace(FOLDER, str(self.folder))
        config = from_flat(keys)
        validate(config, DEVICES)
        return config

    def source(self, keys: dict[str, object]) -> pathlib.Path:
        """Return the folder of a language model of the same sizes, trained for one step."""
        keys = BASE | {key: value for key, value in keys.items() if key.startswith(OF_SOURCE)}
        if keys["data.tokenizer"] == "numbers":
            keys |= {"data.source": "countdown", "data.path": ""}
        folder = self.folder / "sources" / hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:12]
        if not (folder / "summary.txt").exists():
            shutil.rmtree(folder, ignore_errors=True)
            train.train(self.config(keys | {"train.steps": 1, "train.eval_every": 0}), folder)
        return folder


def faults(place: Place, names: Iterable[str], workdir: pathlib.Path) -> list[str]:
    """Train a run with these features twice, the second time from the checkpoint in its middle; return what differs.

    Args:
      workdir: a folder for both runs, which must not exist.
    """
    keys = keys_of(names)
    with contextlib.redirect_stdout(io.StringIO()):
        train.train(place.config(keys), workdir / "whole")
        copied = shutil.ignore_patterns("metrics.jsonl", "summary.txt")
        shutil.copytree(workdir / "whole", workdir / "resumed", ignore=copied)
        shutil.rmtree(workdir / "resumed" / "checkpoints" / str(STEPS))
        train.train(place.config(keys), workdir / "resumed")
    return differences(workdir / "whole", workdir / "resumed")


def differences(whole: pathlib.Path, resumed: pathlib.Path) -> list[str]:
    """Return how a resumed run differs from the whole one: in its steps, its last evaluations and its last state."""
    (wanted, found), compared = map(lines, (whole, resumed)), []
    steps = sorted(step for kind, step in found if kind == "train")
    if steps != list(range(SAVED + 1, STEPS + 1)):
        return [f"the resumed run has the steps {steps}"]
    for kind, step in found:
        figures = wanted[kind, step]
        keys = [key for key in COMPARED if key in figures] if kind == "train" else sorted(figures)
        compared += [
            f"{kind} {step}: {key} {figures[key]} and, resumed, {found[kind, step].get(key)}"
            for key in keys if figures[key] != found[kind, step].get(key)
        ]  # fmt: skip
    states = [state(folder / "checkpoints" / str(STEPS)) for folder in (whole, resumed)]
    names = sorted(name for name in states[0].keys() | states[1].keys() if states[0].get(name) != states[1].get(name))
    return [*compared, *(f"state: {name}" for name in names)]


def lines(workdir: pathlib.Path) -> dict[tuple[str, int], dict]:
    """Return the last line of each kind and step, without events and times."""
    found = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {
        (line["kind"], line["step"]): {key: value for key, value in line.items() if "time" not in key}
        for line in found if line["kind"] != "event"
    }  # fmt: skip


def state(checkpoint: pathlib.Path) -> dict[str, list]:
    """Return the size and digest of each file with arrays of a checkpoint."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return {name: entry for name, entry in files.items() if name.startswith("state/") and name not in TIMED}
