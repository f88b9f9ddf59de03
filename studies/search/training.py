# SPDX-License-Identifier: Apache-2.0
"""`sweep.py search`: on one host with several workers, or on all hosts of a pod, led by process 0."""

import dataclasses
import pathlib
from collections.abc import Callable

from configs.errors import ConfigError, shown
from configs.space import Range
from reporting.display import aligned
from settings import loading
from studies import launch, program, progress, suites
from studies.search import population, searches, searching, second_objective, spaces
from studies.search.searching import Search

BEST = "best.json"  # in the folder of the search; scripts/search_then_train.py reads it
Start = Callable[[Search, launch.Devices], list[int]]  # (search, devices of each worker) -> their exit statuses


def searcher_of(search: Search) -> type[searching.Searcher]:
    """Return the kind of worker that runs the trials of a search."""
    return population.Population if search.population else searching.Searcher


def in_processes(search: Search, devices: launch.Devices) -> list[int]:
    """Run workers on this host until they end."""
    return launch.work(searcher_of(search).__module__, dataclasses.asdict(search), devices)


def asked(parsed, overrides: dict[str, str], root: str) -> Search:
    """Return the search of a command line; ConfigError if it cannot be run."""
    space = spaces.read(parsed.space)  # reports mistakes before anything is stored
    for key in sorted(space.keys() & overrides.keys()):
        print(f"{key} is {overrides[key]} in every trial, since it is typed; --space={parsed.space} is not read for it")
    for name, entry in space.items():
        if both := spaces.keys_of_sets(entry) & overrides.keys():
            raise ConfigError(
                f"--config.{min(both)} is a key of the sets of {name} in --space={parsed.space}; leave one of them out"
            )
    if parsed.also:
        second_objective.check(parsed.also, parsed.method, parsed.prune, parsed.topology)
    parts = [pathlib.Path(path).stem for path in (parsed.config, parsed.space)]
    name = parsed.name or "-".join([*parts, parsed.method])
    if "/" in name or name in (".", ".."):
        raise ConfigError(f"--name={shown(name)} is not the name of a folder in --root; leave out / and ..")
    if suites.is_known(name):
        raise ConfigError(f"--name={name} is a group or a suite of configs/experiments/; give the search another name")
    is_population = parsed.method == "pbt"
    search = Search(
        storage=parsed.storage, study=name, recipe=suites.recipe_of(parsed.config), space=parsed.space,
        method=parsed.method, prune=parsed.prune, count=parsed.trials, seed=parsed.search_seed, metric="eval_loss",
        root=root, topology=parsed.topology, overrides=overrides, program=list(program.TRAIN),
        population=parsed.population if is_population else 0, also=parsed.also or "",
    )  # fmt: skip
    suites.loaded_from(loading.run_recipe(search.recipe), overrides, parsed.topology)  # reports mistyped keys
    if parsed.method == "cmaes" and sum(isinstance(entry, Range) for entry in search.searched().values()) < 2:
        raise ConfigError("--method=cmaes models two or more ranges of numbers, and draws all else; use --method=tpe")
    if is_population:
        population.check(search)
    often = searching.evaluated_often(search)
    if often != search:
        print(f"each trial is evaluated every {often.overrides['train.eval_every']} steps, for --prune={search.prune}")
    return often


def train(search: Search, devices: launch.Devices, start: Start) -> None:
    """Train what the method chooses until all trials have ended; print the best, and write its keys to BEST.

    Raises:
      Unfinished: the command was interrupted, or its workers died.
      Failed: all trials have failed.
    """
    searching.begin(search)
    searched = spaces.searched_keys(search.searched())
    statuses = start(search, devices[: search.count])
    found = searches.find(search.storage, search.study, search.study)
    print("\n".join(searches.best(found)))
    if search.population:
        print("\n".join(aligned(population.lineage(found))))
    searching.judge(found, search.count, statuses)
    if found.done:
        first = found.done[0]
        # Not the keys of every trial, such as its number of steps.
        changes = {key: text for key, text in first.user_attrs["changes"].items() if key in searched}
        content = {"trial": first.number, "value": first.values[0], "changes": changes}
        progress.write_json(f"{search.root}/{search.study}", BEST, content)
