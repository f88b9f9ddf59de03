# SPDX-License-Identifier: Apache-2.0
"""Does a study survive kills, and is its status quick? Four tiny trials on two workers, killed ten times.

Both workers get kill -9 at random moments, and the same command runs again. Every trial must end exactly once, and its
losses and arrays must equal those of an undisturbed study bit for bit. With 1,000 trials, status must take less than
MOST_SECONDS["status"], and report less than MOST_SECONDS["report"]. Otherwise the exit status is 1.
"""

import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile

import support
import tiny_studies

KILLS = 2 if support.QUICK else 10
SEED = 0
TRIALS = 1000
MOST_SECONDS = {"status": 2, "report": 20}
STEPS = 1200
STUDY = ["exp08-ema", "--base=mini", "--seeds=2", *tiny_studies.flags(steps=STEPS, eval_every=100, save_every=100)]


def run(folder: pathlib.Path, *arguments: str) -> float:
    """Run sweep.py in a folder; return its seconds. A failure ends the benchmark."""
    return support.run(support.ROOT / "sweep.py", *arguments, cwd=folder)[0]


def kill_workers(folder: pathlib.Path, rng: random.Random, longest: float) -> int:
    """Run the study and kill its workers at a random moment; return the number of killed workers."""
    command = [sys.executable, support.ROOT / "sweep.py", "run", *STUDY, "--workers=2"]
    process = subprocess.Popen(command, cwd=folder)
    try:
        process.wait(rng.uniform(2.0, longest))
        return 0
    except subprocess.TimeoutExpired:
        workers = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for worker in workers:
        os.kill(int(worker), signal.SIGKILL)
    process.wait()
    return len(workers)


def survival(folder: pathlib.Path) -> dict[str, float]:
    """Return how many trials ended once, and how many equal the undisturbed ones."""
    (calm := folder / "calm").mkdir()
    (hit := folder / "hit").mkdir()
    seconds = run(calm, "run", *STUDY, "--workers=2")
    rng, killed = random.Random(SEED), 0
    for _ in range(KILLS):
        killed += kill_workers(hit, rng, 0.15 * seconds)  # so that the study outlives all kills
    run(hit, "run", *STUDY, "--workers=2")
    trials = (folder.glob("runs/*/*/*") for folder in (calm, hit))
    return {"workers_killed": killed} | tiny_studies.compared(*trials, hit / "studies.db", STEPS)


def speed(folder: pathlib.Path) -> dict[str, float]:
    """Return the seconds of status and report with many trials, all of them done."""
    from optuna.trial import TrialState
    from studies import suites, trials
    from studies.storage import open_storage

    study, _ = suites.find("trm-mini")
    seeds = -(-TRIALS // len(suites.owners(suites.members(study, study.groups, seeds=1))))
    owners = suites.owners(suites.members(study, study.groups, seeds=seeds))
    storage = open_storage(f"sqlite:///{folder}/many.db", create=True)
    queue = trials.Queue(storage, study.name, "maximize", create=True)
    queue.enqueue([trials.order_of(member, f"{folder}/none/{member.title}", "") for member in owners.values()])
    options = (f"--storage=sqlite:///{folder}/many.db", f"--seeds={seeds}")
    waiting = run(folder, "status", "trm-mini", *options)
    curve = {step: step / 500 for step in range(100, 501, 100)}
    evaluations = [{"step": step, "eval_exact_accuracy": value} for step, value in curve.items()]
    for trial in queue.latest().values():
        number = storage.get_trial_id_from_study_id_trial_number(queue.study_id, trial.number)
        storage.set_trial_user_attr(number, "evaluations", evaluations)
        storage.set_trial_user_attr(number, "chip_hours", 0.1)
        for step, value in curve.items():
            storage.set_trial_intermediate_value(number, step, value)
        storage.set_trial_state_values(number, TrialState.COMPLETE, [trial.number / len(owners)])
    return {
        "queued_trials": len(owners),
        "status_seconds": waiting,
        "report_seconds": run(folder, "report", "trm-mini", *options),
    }


def main() -> None:
    """Measure everything."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        figures = speed(folder) | survival(folder)
    support.finish("killed_studies", figures)
    slow = [name for name, most in MOST_SECONDS.items() if figures[f"{name}_seconds"] >= most]
    kinds = "trials_ended_once", "trials_equal_bit_for_bit"
    if figures["workers_killed"] < KILLS:
        sys.exit(f"studies: {figures['workers_killed']} workers were killed in {KILLS} runs, which shows too little")
    if slow or any(figures[kind] != figures["trials"] for kind in kinds):
        sys.exit(f"studies: too slow: {', '.join(slow) or 'nothing'}; trials ended once, and equal: "
                 f"{', '.join(str(figures[kind]) for kind in kinds)} of {figures['trials']}")  # fmt: skip


if __name__ == "__main__":
    main()
