# SPDX-License-Identifier: Apache-2.0
"""Starts a program on all hosts of a pod as one process group, stops it, and restarts it.

This machine records each launch (pods/records.py): the words, variables, switches, commit and time. `restart` and
`supervise` start the recorded launch again and ignore later changes of the environment.
"""

import os
import re
import sys
import time

from pods import hosts, life, recipes, records, studies, watch
from pods.calls import note
from pods.errors import PodError, usage_error
from pods.settings import Settings
from pods.switches import EVOLUTION
from pods.transports import Transport, expect_success

LOOK_AFTER_SECONDS = 1.5  # a program that cannot start has ended by then
# Variables of this machine that are passed to the hosts.
PASSED_ON = (*recipes.MESH_VARIABLES, "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION")
LOG_TAIL_LINES = 15
SEARCH_SPACE = "spaces/any_decoder.py"  # of ENABLE_EVOLUTION


def launch(settings: Settings, transport: Transport, rest: list[str]) -> None:
    """Start `rest` on all hosts as one process group; if it is empty, train.py with the recipe of MODEL_SIZE.

    A study (`python sweep.py run NAME`) gets the folder that all hosts share as its --root, and the pod's --topology.
    """
    settings = recipes.of_pod(settings, transport)
    if not rest:
        return _train(settings, transport, "launch", recipes.chosen_data_keys(settings), [])
    if settings.overrides:
        key = f"--config.{settings.overrides[0]}"
        raise usage_error(f"{key} is not read by a command after `--`; write it after the command's other words")
    words = [hosts.python(settings) if rest[0] in ("python", "python3") else rest[0], *rest[1:]]
    words, study = studies.with_root(settings, transport.num_workers, words)
    workdir = _typed_workdir(_with_one_word(words)) if words[1:2] == ["train.py"] else None
    start(settings, transport, _record(settings, "launch", words, study=study, workdir=workdir))


def launch_pretrain_hf(settings: Settings, transport: Transport, rest: list[str]) -> None:
    """Train the recipe on the Hugging Face data set of DATASET, CONFIG, SPLIT, TEXT_KEY; train.py receives `rest`."""
    settings = recipes.of_pod(settings, transport)
    _train(settings, transport, "launch_pretrain_hf", recipes.data_keys(settings), rest)


def launch_optimized(settings: Settings, transport: Transport, rest: list[str]) -> None:
    """Train as launch_pretrain_hf does, with the enabled switches, and log to logs/train_optimized_worker_I.out.

    A recipe that names its own data keeps them.
    """
    settings = recipes.of_pod(settings, transport)
    switches = recipes.resolved_switches(settings)
    keys, log = recipes.pretraining_keys(settings, rest) | switches.keys, "train_optimized_worker"
    recipes.print_left_out(settings, switches)
    searches = EVOLUTION in switches.on
    _train(settings, transport, "launch_optimized", keys, rest, searches, log=log, switches=switches.record())


def stop(settings: Settings, transport: Transport, rest: list[str]) -> int:
    """Stop the launched program: it has time to save before it is killed; each worker prints what it did."""
    results = transport.run(hosts.stop(settings))
    return max(result.status != 0 for result in results)


def restart(settings: Settings, transport: Transport, rest: list[str]) -> None:
    """Stop, and start the last launch again; a run of train.py resumes from its newest valid checkpoint.

    PodError before anything is stopped if PORT is set and the pod lacks hosts.
    """
    record = records.read(settings)
    life.group_variables(settings, transport)
    transport.run(hosts.stop(settings, for_good=False))
    start(settings, transport, record | {"time": time.time()}, was_stopped=True)


def start(
    settings: Settings, transport: Transport, record: dict, *, unless_ended: bool = False, was_stopped: bool = False
) -> None:
    """Launch the recorded program and check that it keeps running; if it does not, show the log of a worker.

    Args:
      unless_ended: whether to refuse the launch if `stop` or `delete` was called since the last one.
      was_stopped: whether the previous program was stopped, so that it is an error if it still runs.

    Raises:
      PodError: some workers already run and others do not, or another program runs, or one ends with an error.
    """
    variables = record["environment"] | life.group_variables(settings, transport)
    command = hosts.launch(
        settings, record["words"], environment=variables, log=record["log"], unless_stopped=unless_ended
    )
    idle = not settings.dry_run and _is_idle(settings, transport, unless_ended)
    if was_stopped and not (idle or settings.dry_run):
        raise PodError("the previous program still runs, because it could not be stopped; nothing was launched")
    life.share_secrets(settings, transport)
    if idle:  # record first: `restart` needs it if the launch is interrupted or fails on some workers
        records.write(settings, record)
    results = transport.run(command)
    if settings.dry_run:
        return
    expect_success(results, "launch it")
    if any("runs already" in result.output for result in results):
        return
    time.sleep(LOOK_AFTER_SECONDS)
    _check_started(settings, transport, record)


def searching_program(settings: Settings, arguments: list[str], workdir: str) -> list[str]:
    """Return the words after `python` that search SEARCH_SPACE with EVOLUTION_TRIALS trials, and then train the best.

    The trials have all arguments of the run except its number of steps and its folder.
    """
    same = [word for word in arguments if word.startswith(("--config", "--topology="))]
    shared = [] if "://" in workdir else ["--allow_local"]  # the hosts share the folder of the run
    trials, steps = settings.evolution_trials, settings.evolution_steps
    flags = ["--name=evolution", "--method=evolution", f"--space={SEARCH_SPACE}", f"--trials={trials}"]
    flags += [f"--root={workdir}-search"]
    short = [f"--config.train.steps={steps}", f"--config.optimizer.warmup_steps={max(1, steps // 10)}"]
    return ["scripts/search_then_train.py", *flags, *shared, *same, *short, "--", *arguments]


def _train(
    settings: Settings, transport: Transport, subcommand: str, keys: dict, rest: list[str], searches: bool = False,
    **kept,
) -> None:  # fmt: skip
    """Launch a program that trains, or that first `searches`; the last --workdir of `rest` is the folder of the run."""
    rest = _with_one_word(rest)
    num_workers, workdir = transport.num_workers, _typed_workdir(rest) or settings.run_folder()
    if of_each_host := recipes.storage_keys(workdir, num_workers):
        if searches:
            settings.shared_folder(num_workers)
        place = workdir if workdir.startswith("~") else f"{settings.repo_dir}/{workdir}"
        note(settings, f"each host keeps its part of the checkpoints in {place}; they are lost with the pod unless "
             "BUCKET is set")  # fmt: skip
    arguments = recipes.arguments(settings, keys | of_each_host, rest, workdir)
    program = searching_program(settings, arguments, workdir) if searches else ["train.py", *arguments]
    words = [hosts.python(settings), *program]
    start(settings, transport, _record(settings, subcommand, words, workdir=workdir, **kept))


def _typed_workdir(words: list[str]) -> str | None:
    """Return the folder of the last --workdir among the results of `_with_one_word`; None without one."""
    typed = [word for word in words if word.startswith("--workdir=")]
    return typed[-1].partition("=")[2] if typed else None


def _with_one_word(words: list[str]) -> list[str]:
    """Return words in which each flag and its value are one word; train.py takes no word that belongs to no flag."""
    joined = []
    for word in words:
        takes_value = joined and re.fullmatch(r"--[^=]+", joined[-1])
        if takes_value and not re.match(r"--|-[A-Za-z]", word):  # a number may be negative
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _record(
    settings: Settings, subcommand: str, words: list[str], *, workdir=None, study=None, log="train_worker",
    switches=None,
) -> dict:  # fmt: skip
    commit, changed = records.code_state()
    return {
        "subcommand": subcommand, "words": words, "log": log, "workdir": workdir, "study": study, "switches": switches,
        "recipe": settings.recipe, "accelerator": settings.accel, "commit": commit, "changed": changed,
        "time": time.time(), "environment": {name: os.environ[name] for name in PASSED_ON if os.environ.get(name)},
    }  # fmt: skip


def _is_idle(settings: Settings, transport: Transport, unless_ended: bool) -> bool:
    """Return True if no worker runs a program, False if all do.

    PodError if only some run one: a worker that starts late would wait for a process group that it cannot join.
    """
    workers = watch.look(settings, transport, None)
    if unless_ended and not records.launched(settings):
        raise PodError("the pod was deleted by `delete`")
    if unless_ended and any(worker.stopped for worker in workers):
        raise PodError("the run was stopped by `stop`")
    running = [worker for worker in workers if worker.alive]
    if running and len(running) < len(workers):
        rest = [str(worker.number) for worker in workers if not worker.alive]
        raise PodError(f"workers {', '.join(rest)} run nothing, but the others do; `restart` restarts all of them")
    return not running


def _check_started(settings: Settings, transport: Transport, record: dict) -> None:
    """Raise PodError, and show the log of a failed worker, unless every worker runs or has succeeded."""
    workers = watch.look(settings, transport, record)
    failed = [worker for worker in workers if not worker.alive and worker.status != 0]
    if not failed:
        return
    number = failed[0].number
    log = hosts.log_name(record["log"])
    [result] = transport.run(
        hosts.in_code(settings, f"tail -n {LOG_TAIL_LINES} {log}"), worker=str(number), show=False
    )[:1]
    print(result.output.rstrip(), file=sys.stderr)
    raise PodError(f"{', '.join(worker.trouble() for worker in failed)}; the end of its log is above")
