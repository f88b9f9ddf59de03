# SPDX-License-Identifier: Apache-2.0
"""Copies the enabled switches to all hosts, compiles the real step there, and checks the hosts' reports."""

import json
import pathlib
import shlex
import sys
import tempfile
from typing import NamedTuple

from absl import flags

from files.json_reader import JsonError, parse_json
from pods import hosts, recipes, switches, watch
from pods.answers import Report
from pods.errors import PodError, usage_error
from pods.settings import FIELDS, Settings, with_experts
from pods.transports import Transport, expect_success
from settings import loading
from settings.keys import value_of_flag

CONFIG = "configs/optimization_config.json"  # in the code's folder on a host
REPORT = "optimization_deployment_report.json"
WAITS = "waits for a free pod"
SIZES = ("small", "medium", "large")
DISABLE = {  # flags of scripts/deploy_optimizations.py
    "disable-tpu": "ENABLE_TPU_OPT",
    "disable-neuroplasticity": "ENABLE_NEUROPLASTICITY",
    "disable-causal": "ENABLE_CAUSAL",
    "disable-evolution": "ENABLE_EVOLUTION",
    "disable-meta-learning": "ENABLE_META_LEARNING",
}


def setup_optimizations(settings: Settings, transport: Transport, rest: list[str]) -> None:
    """Copy the configuration from the variables to every host, and run scripts/deploy_optimizations.py there.

    While a run holds the devices, only the coordinator runs the script, and compiles ahead of time without a device.

    Raises:
      ConfigError: the configuration cannot run.
      PodError: a host fails, or reports other switches.
    """
    settings = recipes.of_pod(settings, transport)
    resolved = recipes.resolved_switches(settings)
    recipes.print_left_out(settings, resolved)
    send(settings, transport, resolved)
    workers = [] if settings.dry_run else watch.look(settings, transport, None)
    busy = [worker.number for worker in workers if worker.alive]  # the run holds the devices of their hosts
    # The recipe is an argument, because a file of switches is data and must not name code to run.
    words = [hosts.python(settings), "scripts/deploy_optimizations.py", f"--config={CONFIG}"]
    words += recipes.arguments(settings, {})
    worker = str(settings.coordinator_worker) if busy else "all"
    command = shlex.join([*hosts.IN_BACKGROUND, *words, "--ahead"] if busy else words)
    command = hosts.in_environment(settings, command if busy else hosts.attached(command))
    results = transport.run(command, worker=worker)
    expect_success(results, "deploy the optimizations")
    if settings.dry_run:
        return
    _check_reports(settings, transport, resolved.effective, worker)
    if busy:
        print(f"the measured step and the cost of an analysis: {WAITS}, {held_by(busy)}")


def send(settings: Settings, transport: Transport, resolved: switches.Resolved) -> None:
    """Copy the switches to every host."""
    content = {"model_size": settings.model_size, "sequence_length": settings.seq_len or None}
    content |= {"evolution_trials": settings.evolution_trials, "evolution_steps": settings.evolution_steps}
    content |= {"switches": resolved.effective}
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / pathlib.Path(CONFIG).name
        file.write_text(json.dumps(content, indent=1))
        transport.copy(str(file), f"{settings.name}:{settings.repo_dir}/{CONFIG}", recurse=False)


def held_by(busy: list[int]) -> str:
    """Return who holds the devices, for a line about what waits."""
    return f"because a run holds the devices of workers {', '.join(map(str, busy))}"


class Deployment(NamedTuple):
    """What scripts/deploy_optimizations.py measures."""

    switches: switches.Resolved  # which are on
    arguments: list[str]  # those of train.py
    search_steps: int  # all steps of the search that ENABLE_EVOLUTION makes before the training
    ahead: bool  # whether to use no device


def resolve(argv: list[str], description: str) -> Deployment:
    """Return what scripts/deploy_optimizations.py measures, from its flags and the file that they name.

    A flag wins over the file. The file is data: it may choose a recipe of this workspace by its size, and no other
    code.

    Raises:
      ConfigError: the recipe cannot be read.
      PodError: a flag is unknown, or the file cannot be read or has a forbidden value (status 2).
    """
    own, rest = _own_flags(argv, description)
    given = own["config"].value or []
    file, typed = ([name for name in given if name.endswith(".json") == is_json] for is_json in (True, False))
    if len(file) > 1 or len(typed) > 1:
        raise usage_error(
            f"--config={(file if len(file) > 1 else typed)[1]}: give one recipe and one JSON file at most"
        )
    stored = switches.read_file(file[0]) if file else {}
    resolved = switches.resolve(stored, {name: False for flag, name in DISABLE.items() if own[flag].value})
    size, length, num_experts, trials, steps = (
        own[flag].value or stored.get(flag.replace("-", "_"))
        for flag in ("model-size", "sequence-length", "num-experts", "evolution-trials", "evolution-steps")
    )
    recipe = f"--config={typed[0] if typed else _recipe_of_size(size or 'medium', num_experts, file)}"
    keys = resolved.keys | ({"model.num_experts": num_experts} if num_experts else {})
    keys |= recipes.length_keys(recipe, length)
    arguments = [recipe, *(f"--config.{key}={value}" for key, value in keys.items()), *rest]
    search = trials or FIELDS["evolution_trials"].default, steps or FIELDS["evolution_steps"].default
    return Deployment(resolved, arguments, search[0] * search[1], bool(own["ahead"].value))


def _recipe_of_size(size: str, num_experts: int | None, file: list[str]) -> str:
    """Return the path of the recipe of a size in configs/; a usage error if there is no such recipe."""
    name = with_experts(size) if num_experts else size
    if name not in (known := [recipe for recipe in loading.recipe_names() if recipe != "base"]):
        raise usage_error(f"{', '.join(file)}: model_size={size} is not a recipe of configs/; use {', '.join(known)}")
    return loading.of_workspace(f"configs/{name}.py")


def _check_reports(settings: Settings, transport: Transport, given: dict[str, bool], worker: str) -> None:
    """Raise PodError unless the report of every worker, or of the one that is named, has exactly the given switches."""
    command = hosts.in_code(settings, f"cat {REPORT}")
    asked = transport.run_each(command) if worker == "all" else transport.run(command, worker=worker, show=False)
    for result in asked:
        if result.status or _switches_of(result.output) != given:
            raise PodError(f"worker {result.worker}: {REPORT} is missing or has other switches than were given")


def _switches_of(report: str) -> dict | None:
    """Return the given switches of a report; None if the text is not a valid report."""
    try:
        return parse_json(report[report.find("{") :], Report, REPORT)["switches"]["given"]
    except JsonError:
        return None


def _own_flags(argv: list[str], description: str) -> tuple[flags.FlagValues, list[str]]:
    """Return the script's own flags, None if absent, and the arguments for train.py."""
    own = flags.FlagValues()
    flags.DEFINE_multi_string("config", None, "a recipe, or a JSON file of switches; one of each", flag_values=own)
    flags.DEFINE_enum("model-size", None, SIZES, "size of the recipe; default: medium", flag_values=own)
    flags.DEFINE_integer("sequence-length", None, "tokens of a sequence; default: the recipe's", 1, flag_values=own)
    flags.DEFINE_integer("num-experts", None, "experts of a block; takes the recipe SIZE_moe", 1, flag_values=own)
    flags.DEFINE_integer("evolution-trials", None, "trials of ENABLE_EVOLUTION; default: 12", 1, flag_values=own)
    flags.DEFINE_integer("evolution-steps", None, "steps of each of them; default: 200", 1, flag_values=own)
    flags.DEFINE_bool("ahead", None, "compile ahead of time and use no device, which a run may hold", flag_values=own)
    for flag, name in DISABLE.items():
        flags.DEFINE_bool(flag, None, f"{name}=false", flag_values=own)
    if {"-h", "--help"} & set(argv):
        print(f"{description}\n{own.get_help()}")
        sys.exit(0)
    try:
        return own, own(argv, known_only=True)[1:]
    except flags.Error as error:
        raise usage_error(value_of_flag(error)) from None
