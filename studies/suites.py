# SPDX-License-Identifier: Apache-2.0
"""Finds the groups of configs/experiments/ and resolves their configurations; equal ones become one trial."""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable

from configs import topologies
from configs.base import KEYS, keys_of
from configs.errors import ConfigError, did_you_mean, shown, similar
from configs.group import Base, Changes, Group, Suite
from configs.key import MACHINE
from files.folders import source_files
from files.paths import expanded
from settings import loading, validation
from settings.keys import flat
from settings.resolving import resolve

EXPERIMENTS = loading.ROOT / "configs" / "experiments"
SUITE, SEED = "suite", "train.seed"


@dataclasses.dataclass(frozen=True)
class Member:
    """One configuration of a group, with one seed."""

    group: str
    name: str  # of the configuration; a seed other than the recipe's is part of it
    seed: int  # of the run
    recipe: str
    changes: dict[str, str]  # typed text of every key that differs from the recipe
    values: dict[str, object]  # the resolved configuration; {} if it is refused
    refusal: str = ""  # why the configuration cannot run; "" if it can
    seed_in_name: str = ""  # the end of the name that says the seed; "" for the recipe's and for seed 0

    @property
    def title(self) -> str:
        """The name that users read, GROUP/NAME."""
        return f"{self.group}/{self.name}"

    @property
    def plain_name(self) -> str:
        """The name in the group's file, which all seeds of a configuration share."""
        return self.name.removesuffix(self.seed_in_name)

    @functools.cached_property
    def digest(self) -> str:
        """A digest of what decides the result: the keys that differ from base, except those of the machine."""
        differs = {key: value for key, value in sorted(self.values.items()) if value != KEYS[key].default}
        kept = {key: value for key, value in differs.items() if key not in keys_of(MACHINE)}
        return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Study:
    """The groups of a suite with one of its bases."""

    name: str  # SUITE for the default base, else SUITE-BASE
    suite: Suite
    base: Base
    groups: dict[str, Group]  # by name, in the order of their files; the group of the base itself is first

    @property
    def counted(self) -> list[str]:
        """The names of the groups of the whole study; the others are asked for by name."""
        return [name for name, group in self.groups.items() if group.counted]


def suite_names() -> list[str]:
    """Return the names of the suites, which are the folders in configs/experiments/."""
    return sorted(path.parent.name for path in EXPERIMENTS.glob(f"*/{SUITE}.py"))


def find(asked: str, base: str = "") -> tuple[Study, list[str]]:
    """Return the requested study and the names of its requested groups.

    Args:
      asked: a suite (trm), a suite with a base (trm-mini), a group (exp08-ema), or the folder or file of one.
      base: a base of the suite; "": that of `asked`, or the default.

    Raises:
      ConfigError: there is no such suite, base or group, and the message names the nearest; or a file of one fails.
    """
    name, known = _name_of(asked), []
    for suite_name in suite_names():
        suite = _declared(EXPERIMENTS / suite_name / f"{SUITE}.py", Suite)
        groups = _groups(suite_name)
        bases = {suite_name: next(iter(suite.bases))} | {f"{suite_name}-{name}": name for name in suite.bases}
        known += [*bases, *groups]
        if name in bases or name in groups:
            chosen = _base(suite, suite_name, base or bases.get(name, bases[suite_name]))
            default = chosen == bases[suite_name]
            study_name = suite_name if default else f"{suite_name}-{chosen}"
            study = Study(study_name, suite, suite.bases[chosen], groups)
            return study, study.counted if name in bases else [name]
    near = did_you_mean(similar(name, known))
    raise ConfigError(f"{shown(asked)} is not a group or suite of configs/experiments/{near} (all: {', '.join(known)})")


def is_known(name: str) -> bool:
    """Return whether a group or a suite has this name; a search may not have it."""
    try:
        return bool(find(name))
    except ConfigError:
        return False


def recipe_of(path: str) -> str:
    """Return the path of a recipe for trials on any machine: relative to the workspace, or absolute if not in it."""
    here = expanded(path).absolute()
    return str(here) if here.exists() and here != loading.ROOT / path else path


def members(
    study: Study, names: Iterable[str], *, seeds: int = 0, topology: str = "", overrides: dict[str, str] | None = None
) -> list[Member]:
    """Return the resolved configurations of some groups of a study, in order.

    Args:
      seeds: run each configuration with the seeds 0 to `seeds` - 1; 0: only with the recipe's.
      topology: hardware preset; "": the attached devices.
      overrides: typed text by dotted key, which takes precedence over everything else.

    Raises:
      ConfigError: the base itself cannot run with this topology and these overrides.
    """
    if seeds and SEED in (overrides or {}):
        raise ConfigError(f"--config.{SEED} and --seeds={seeds} both set the seed; omit one")
    found, recipe = [], loading.run_recipe(str(loading.ROOT / study.base.recipe))
    # the base itself
    if refusal := member_of(study.base, recipe, "", "", {}, topology, overrides or {}).refusal:
        raise ConfigError(refusal)
    for name in names:
        for title, changes in study.groups[name].of_size(study.base.size).items():
            member = member_of(study.base, recipe, name, title, changes, topology, overrides or {})
            found += [_with_seed(member, seed) for seed in range(seeds)] if seeds else [member]
    return found


def owners(members: Iterable[Member]) -> dict[str, Member]:
    """Return {digest: the first member that has it}; in a whole study, this member names the trial's folder."""
    found = {}
    for member in members:
        if not member.refusal:
            found.setdefault(member.digest, member)
    return found


def _name_of(asked: str) -> str:
    """Return the name of a group or suite, given a name or a path below configs/experiments/; other paths stay."""
    path = expanded(asked)
    places = [loading.ROOT / path, path.absolute()]
    if len(path.parts) > 1 and not any(place.exists() and EXPERIMENTS in place.parents for place in places):
        return asked
    return path.name.removesuffix(".py").replace("_", "-")


def _groups(suite: str) -> dict[str, Group]:
    files = [path for path in source_files(EXPERIMENTS / suite, "*.py") if path.stem != SUITE]
    return {file.stem.replace("_", "-"): _declared(file, Group) for file in files}


def _declared(file: pathlib.Path, kind: type) -> Suite | Group:
    """Return the SUITE or GROUP of a file; ConfigError if it fails or has none."""
    name = kind.__name__.upper()

    def result(module) -> Suite | Group:
        if not isinstance(vars(module).get(name), kind):
            raise ValueError(f"it has no {name} = {kind.__name__}(...), which configs/group.py describes")
        return vars(module)[name]

    return loading.run_file(file, str(file.relative_to(loading.ROOT)), result)


def _base(suite: Suite, suite_name: str, base: str) -> str:
    if base not in suite.bases:
        near = did_you_mean(similar(base, suite.bases))
        raise ConfigError(f"--base={shown(base)} is not a base of {suite_name}{near} (all: {', '.join(suite.bases)})")
    return base


def member_of(
    base: Base, recipe: tuple, group: str, name: str, changes: Changes, topology: str, overrides: dict[str, str]
) -> Member:
    """Return a resolved configuration, with the seed of the recipe; `recipe` is that of loading.run_recipe."""
    typed = {key: str(value) for key, value in (base.changes | changes).items()} | overrides
    try:
        loaded = loaded_from(recipe, typed, topology)
        validation.validate(loaded.config, topologies.get(topology).chips if topology else 1, loaded)
    except ConfigError as error:
        return Member(group, name, 0, base.recipe, typed, {}, str(error))
    values = flat(loaded.config)
    return Member(group, name, values[SEED], base.recipe, typed, values)


def loaded_from(recipe: tuple, typed: dict[str, str], topology: str) -> loading.Loaded:
    """Return a configuration that is not validated; ConfigError if a typed key or value is not valid."""
    config, origins = recipe
    return resolve(config.copy_and_resolve_references(), dict(origins), "", "", topology, typed, environment={})


def _with_seed(member: Member, seed: int) -> Member:
    """Return a configuration with another seed; the name of seed 0 stays, so that adding seeds keeps its trial."""
    seed_in_name = f"-seed{seed}" if seed else ""
    return dataclasses.replace(
        member, name=f"{member.name}{seed_in_name}", seed_in_name=seed_in_name, seed=seed,
        changes=member.changes | {SEED: str(seed)}, values=member.values and member.values | {SEED: seed},
    )  # fmt: skip


def folder(root: str, member: Member) -> str:
    """Return the trial's workdir: a path below a local root, or an address below a bucket's."""
    return folder_of(root, member.group, member.name)


def folder_of(root: str, group: str, name: str) -> str:
    """Return the folder of a configuration; see `folder`."""
    return f"{root.rstrip('/')}/{group}/{name}"


def folders(root: str, members: Iterable[Member]) -> dict[str, str]:
    """Return {GROUP/NAME: folder of its trial}; ConfigError if a member has no name, or two have the same folder."""
    found = {}
    for member in members:
        place = folder(root, member)
        if not (member.group and member.name):
            raise ConfigError(f"{place} is the folder of a configuration without a name; give it one")
        if place in found.values():
            raise ConfigError(f"{place} is the folder of two configurations; rename one")
        found[member.title] = place
    return found


def runs_of(root: str) -> str:
    """Return the root of a study's folders for workers in any folder: an absolute path, or the address of a bucket."""
    return root if "://" in root else str(expanded(root).absolute())
