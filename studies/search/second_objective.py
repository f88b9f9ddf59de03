# SPDX-License-Identifier: Apache-2.0
"""The second objective of a search: a cost of a configuration that is known without training it."""

from collections.abc import Callable

from configs import topologies
from configs.errors import ConfigError
from input_pipeline.cache import cache_folder
from rehearsal.compiler import CompileError, Compiler, check_compiler
from rehearsal.estimate import estimate
from settings.keys import from_flat
from studies.cost import rehearsals
from studies.report import sizes
from studies.suites import Member

STEP_SECONDS = "step_seconds"
NAMES = (sizes.PARAMETERS, STEP_SECONDS)
ONE_OBJECTIVE = ("cmaes", "pbt")  # methods that compare one value, as pruners do


def check(name: str, method: str, prune: str, topology: str) -> None:
    """Raise ConfigError if a search on this hardware preset cannot have this second objective, one of NAMES."""
    if method in ONE_OBJECTIVE:
        fitting = "evolution, local_search, tpe or random"
        raise ConfigError(f"--method={method} minimizes one value; with --also use {fitting}")
    if prune != "none":
        raise ConfigError(f"--prune={prune} compares one value; with --also leave it out")
    if name == STEP_SECONDS:
        if not topology:
            raise ConfigError(f"--also={STEP_SECONDS} is the rehearsed time on a slice: name one with --topology")
        check_compiler(topologies.get(topology))


def value_of(name: str, member: Member, topology: str, waiting: Callable[[float], None]) -> float:
    """Return the parameters, or the seconds of a step on a slice, of a configuration.

    The seconds come from a recorded rehearsal, or from the cache of rehearsals. If there is none, the step is compiled
    as `rehearse.py` does, which takes up to some minutes and fills the cache. `waiting` is called several times a
    second meanwhile, with the seconds.

    Raises:
      ConfigError: the mesh does not divide a dimension.
      CompileError: the step does not fit in the memory of a chip, or the compiler refuses it.
    """
    if name == sizes.PARAMETERS:
        return float(sizes.num_parameters(member.values))
    if recorded := rehearsals.step_seconds(member.values, topology):
        return recorded
    compiler = Compiler(cache_folder(member.values["data.cache_dir"]) / "rehearsals")
    compiled = compiler.compile(from_flat(member.values), topologies.get(topology), waiting=waiting)
    if not compiled.fits:
        raise CompileError(f"the step does not fit in the memory of a chip of {topology}")
    return estimate(compiled)["step_seconds"]
