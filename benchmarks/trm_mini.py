# SPDX-License-Identifier: Apache-2.0
"""Does a laptop finish the study of the recursive model? All 14 groups of trm-mini on two workers, then three seeds.

The groups of recursion cycles, augmentation and the average of the parameters get three seeds, so that the report
concludes something about them; the others have one seed, and must say that it concludes nothing. `--quick` runs
trm-smoke, without further seeds. The trials stay in the folder runs/benchmark-STUDY, so that the same command continues
after an interruption; delete it to measure again.
"""

import itertools
import statistics
import sys

import support

from studies import suites
from studies.report import answers
from studies.storage import open_storage
from studies.trials import Queue
from tests.browser import Browser

STUDY, SEEDS = ("trm-smoke", 1) if support.QUICK else ("trm-mini", 3)
FOLDER = support.ROOT / "runs" / f"benchmark-{STUDY}"
STORAGE = f"sqlite:///{FOLDER}/studies.db"
REPEATED = ("exp02a-l-cycles", "exp02b-h-cycles", "exp04b-augmentation-scaling", "exp08-ema")
LIMIT_MINUTES = 30 if support.QUICK else 180


def sweep(*words: str) -> None:
    """Run sweep.py on the study's database; a failure ends the benchmark."""
    support.run("sweep.py", *words, f"--storage={STORAGE}")


def run() -> tuple[float, int]:
    """Run what is left of the study; return the minutes from its first trial's start to its last's end, and trials."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    sweep("run", STUDY, "--workers=2", f"--root={FOLDER}")
    study, names = suites.find(STUDY)
    mine = {member.digest for member in suites.members(study, names)}
    ended = [trial for digest, trial in queue().latest().items() if digest in mine]
    seconds = max(t.datetime_complete for t in ended) - min(t.datetime_start for t in ended)
    for group in REPEATED if SEEDS > 1 else ():
        sweep("run", group, "--base=mini", "--workers=2", f"--root={FOLDER}", f"--seeds={SEEDS}")
    return seconds.total_seconds() / 60, len(ended)


def queue() -> Queue:
    """Return the trials."""
    return Queue(open_storage(STORAGE, create=False), suites.find(STUDY)[0].name, create=False)


def found() -> list[answers.Answer]:
    """Return the answer of each group."""
    study, names = suites.find(STUDY)
    return answers.of_study(study, suites.members(study, names, seeds=SEEDS), queue().latest())


def effects(group: answers.Answer) -> dict[str, float]:
    """Return by how much the second configuration of a group beats the first, with the standard error over seeds."""
    (_, first), (_, second) = ((row.name, row) for row in group.rows)
    name = group.group.partition("-")[0]
    change = statistics.fmean(second.values) - statistics.fmean(first.values)
    return {f"{name}_effect": round(change, 4), f"{name}_error": round((first.error**2 + second.error**2) ** 0.5, 4)}


def look(groups: int) -> None:
    """Write the report, and photograph it in headless Chromium, wide and narrow, light and dark."""
    sweep("report", STUDY, f"--seeds={SEEDS}", f"--html={FOLDER}/report.html")
    browser = Browser(FOLDER / "browser")
    try:
        for width, dark in itertools.product((1100, 400), (False, True)):
            browser.open((FOLDER / "report.html").as_uri(), width=width, dark=dark)
            browser.wait(f"document.querySelectorAll('.answer').length == {groups}")
            browser.screenshot(FOLDER / f"report-{width}-{'dark' if dark else 'light'}.png")
            if browser.errors or browser.value("document.documentElement.scrollWidth") != width:
                sys.exit(f"the report of width {width} has errors or is too wide: {browser.errors}")
    finally:
        browser.close()


def main() -> None:
    """Run, report and judge."""
    minutes, trials = run()
    answered = found()
    look(len(answered))
    figures = {"minutes": round(minutes, 1), "trials": trials, "groups": len(answered)}
    for answer in answered:
        print(f"{answer.group}: {answer.sentence}")
        one_seed = answer.group not in REPEATED or SEEDS == 1
        if (answers.ONE_SEED in answer.sentence) != one_seed:
            sys.exit(f"{answer.group} concludes from one seed, or nothing from {SEEDS}")
        figures |= {} if one_seed else effects(answer)
    support.finish("trm_mini", figures)
    if minutes > LIMIT_MINUTES:
        sys.exit(f"{STUDY} took {minutes:.0f} minutes, where {LIMIT_MINUTES} are allowed")


if __name__ == "__main__":
    main()
