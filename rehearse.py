# SPDX-License-Identifier: Apache-2.0
"""Estimate a training step on hardware that you do not have: python rehearse.py --config=FILE --topology=v4-32

Compiles train.py's own step for the topology on this machine, with the compiler of the topology. Reports whether it
fits, its expected speed, where the time goes, its cost, and changes that would help.
"""

import sys

from core import command_line, output_files
from core.command_line import FLAGS, flags
from core.overrides import split_overrides

OTHERS = ("search", "compare", "scaling", "advise_sharding", "prove", "decode")  # flags in place of one rehearsal
UNPRICED = ("advise_sharding", "prove")  # of these
MODES = ("same_batch", "any_batch", "model")
NOT_READ = ("workdir", "join_seconds")  # flags of the other commands
MOST_DIMS = 6  # of a tensor; every mesh axis may shard each of them
MOST_PROCESSES = 1_000
MOST_ROWS, MOST_TOKENS, USUAL_LENGTH = 100_000, 100_000_000, 2048  # of --decode
ROLES = ("weights", "gradients", "optimizer", "activations")
flags.DEFINE_string("json", "", "write the report to this file as JSON")
flags.DEFINE_string("html", "", "write the report to this file as a page with plots")
flags.DEFINE_string("hlo", "", "write the optimised, scheduled HLO text to this file")
flags.DEFINE_enum(
    "search", None, MODES, "find the fastest mesh, microbatch and remat that fit, with the same_batch (also without a "
    "value) or any_batch; or the largest model that fits",
)  # fmt: skip
flags.DEFINE_list("compare", [], "rehearse on these topologies, separated by commas, and rank them by cost per token")
flags.DEFINE_bool("scaling", False, "rehearse on data = 1, 2, 4, 8 and fsdp = 1, 2, 4: throughput per chip")
flags.DEFINE_bool("checklist", False, "judge ten points that a long run needs, with evidence")
flags.DEFINE_bool("prove", False, "compare the step of a small copy on simulated chips with that of one device")
flags.DEFINE_bool("decode", False, "rehearse a server: prefill and decode of --rows prompts of --length tokens")
flags.DEFINE_integer("rows", 64, "prompts that are decoded together", 1, MOST_ROWS)
flags.DEFINE_integer(
    "length", None, f"tokens of a row, prompt and continuation; default: {USUAL_LENGTH}, at most model.max_length", 1,
    MOST_TOKENS,
)  # fmt: skip
flags.DEFINE_list("advise_sharding", [], "rank all shardings of a tensor of these sizes, as in 4096,11008")
flags.DEFINE_enum("role", "weights", ROLES, "role of that tensor")
flags.DEFINE_integer(
    "advice_seconds", 60, "seconds for compiling suggested changes; 0: suggest them unverified", 0, 1_000_000
)
flags.DEFINE_integer("processes", None, "concurrent compilations; default: half the cores", lower_bound=1)
flags.DEFINE_float("price", None, "dollars per chip-hour; default: the topology's list price")

if __name__ == "__main__":
    sys.argv = [{"--search": "--search=same_batch"}.get(argument, argument) for argument in sys.argv]
    LOADED = command_line.parse_configuration(
        __doc__, use=lambda flags: command_line.IGNORE, not_read=NOT_READ, why="a rehearsal trains nothing"
    )

import dataclasses
import json
import math
import os
import re

from cluster import startup
from cluster.hub import RunError
from settings import layouts, loading, validation
from configs import topologies
from configs.base import batch_shards
from configs.errors import ConfigError, shown
from settings.decoding import for_decoding
from settings.keys import check_no_secrets
from settings.resolving import Loaded
from input_pipeline.cache import cache_folder
from rehearsal import assumptions, checklist, decoding, phases, report, rollout, sections, sharding
from rehearsal.layouts import advice, compare, search
from rehearsal.compiler import GIB, Compiler, check_compiler
from training import fit


def main(loaded: Loaded) -> None:
    """Run the rehearsal, search or comparison that the flags select."""
    check_flags(loaded)
    cache = cache_folder(loaded.config.data.cache_dir) / "rehearsals"
    display = report.Display(Compiler(cache, FLAGS.processes or max(1, os.cpu_count() // 2)))
    if FLAGS.compare:
        wanted = [priced(name) for name in dict.fromkeys(FLAGS.compare)]
        return show(compare.slices(load_for, wanted, display), display)
    if FLAGS.prove:
        return prove(loaded, display)
    topology = priced(loaded.topology.name)
    if topology.accelerator == "cpu" and (FLAGS.search or FLAGS.scaling):
        raise ConfigError(f"--topology={topology.name}: --search and --scaling are only for slices of TPUs and GPUs")
    if FLAGS.scaling:
        return show(compare.scaling(loaded, topology, display), display)
    validation.validate(loaded.config, topology.chips, loaded)
    if FLAGS.decode:
        return decode(loaded, topology, display)
    if FLAGS.advise_sharding:
        shape = tuple(map(int, FLAGS.advise_sharding))
        return show(sharding.advise(loaded.config, topology, shape, FLAGS.role), display)
    fit_batch(loaded.config, topology, display)
    if FLAGS.search == "model":
        return show(search.largest_model(loaded, topology, display), display)
    if FLAGS.search:
        return show(search.fastest(loaded, topology, display, any_batch=FLAGS.search == "any_batch"), display)
    return rehearse(loaded, topology, display)


def fit_batch(config, topology: topologies.Topology, display) -> None:
    """With batch.fit=auto, set the fewest microbatches that fit into a chip's memory."""
    limit = config.batch.memory_gib or math.inf

    def fits(candidate) -> bool:
        compiled = display.compile(candidate, topology)
        count, needed = candidate.train.gradient_accumulation, compiled.total_bytes / GIB
        display.line(f"train.gradient_accumulation={count} needs {needed:.2f} GiB a chip")
        return compiled.fits and needed <= limit

    if config.batch.fit == "auto":
        fit.fit(config, fits)


def load_for(name: str) -> Loaded:
    """Return the configuration of the command line for the topology `name`."""
    overrides, _ = split_overrides(sys.argv)
    return loading.load(command_line.recipe(overrides), name, overrides, os.environ)


def check_flags(loaded: Loaded) -> None:
    """Raise ConfigError for invalid flags, before anything is compiled."""
    asked = [name for name in OTHERS if FLAGS[name].value]
    check_no_secrets(loaded.typed)
    check_tensor()
    if len(asked) > 1:
        raise ConfigError(f"--{asked[0]} and --{asked[1]} cannot be combined; give one")
    if not loaded.topology and not FLAGS.compare:
        raise ConfigError(f"--topology is not given; name one of {', '.join(topologies.SLICES)}")
    if loaded.config.batch.fit == "auto" and asked:
        raise ConfigError(f"batch.fit=auto is for a single rehearsal; leave it out with --{asked[0]}")
    if loaded.topology and FLAGS.compare:
        raise ConfigError("--compare names its topologies itself; leave out --topology")
    if not all(FLAGS.compare):
        raise ConfigError("--compare needs topologies, separated by commas: --compare=v4-32,v5e-16")
    if FLAGS.price is not None and not 0 <= FLAGS.price < math.inf:
        raise ConfigError(f"--price={FLAGS.price} must be 0 or greater: dollars per chip-hour")
    if FLAGS.processes and FLAGS.processes > MOST_PROCESSES:
        raise ConfigError(f"--processes={shown(FLAGS.processes)} must be at most {MOST_PROCESSES:,}")
    output_files.check_all("json", "html", "hlo")
    for name in ("html", "hlo", "checklist", "advice_seconds"):
        if asked and FLAGS[name].present and FLAGS[name].value:
            raise ConfigError(f"--{name} is for a single rehearsal; leave out --{asked[0]}")
    if FLAGS.price is not None and (unpriced := [name for name in UNPRICED if FLAGS[name].value]):
        raise ConfigError(f"--price is for the cost of a step; leave out --price or --{unpriced[0]}")
    check_decoding(loaded)


def check_decoding(loaded: Loaded) -> None:
    """Raise ConfigError if --decode cannot rehearse the model on the topology, or if its own flags lack it."""
    given = [name for name in ("rows", "length") if FLAGS[name].present]
    if given and not FLAGS.decode:
        raise ConfigError(f"--{given[0]} is for --decode; give both, or neither")
    if not FLAGS.decode:
        return
    longest = loaded.config.model.max_length
    if loaded.config.model.name != "decoder_lm":
        raise ConfigError(f"--decode is for language models, and model.name={loaded.config.model.name} has no cache")
    if loaded.topology.accelerator != "tpu":
        raise ConfigError(f"--topology={loaded.topology.name}: --decode is only for slices of TPUs")
    if FLAGS.length and FLAGS.length > longest:
        raise ConfigError(f"--length={FLAGS.length} exceeds model.max_length={longest}; use at most {longest}")


def check_tensor() -> None:
    """Raise ConfigError if the sizes of the tensor are invalid, or if --role is given without them."""
    sizes = FLAGS.advise_sharding
    if not sizes and (FLAGS["advise_sharding"].present or FLAGS["role"].present):
        raise ConfigError("--advise_sharding and --role need the sizes of a tensor: --advise_sharding=4096,11008")
    wrong = [size for size in sizes if not re.fullmatch("0{0,9}[1-9][0-9]{0,11}", size)]
    if wrong:
        what = "is not a whole number greater than 0 with at most 12 digits"
        raise ConfigError(f"--advise_sharding: {shown(wrong[0])!r} {what}; write as in 4096,11008")
    if len(sizes) > MOST_DIMS:
        raise ConfigError(f"--advise_sharding has {len(sizes)} sizes; give at most {MOST_DIMS}")


def priced(name: str) -> topologies.Topology:
    """Return a topology, with the price of --price if given."""
    topology = topologies.get(name, "--compare" if FLAGS.compare else "--topology")
    check_compiler(topology)
    assumptions.check(topology)
    return topology if FLAGS.price is None else dataclasses.replace(topology, price_per_chip_hour=FLAGS.price)


def rehearse(loaded: Loaded, topology: topologies.Topology, display) -> None:
    """Compile one configuration and report on it."""
    compiled = display.compile(loaded.config, topology)
    figures = report.figures(loaded, compiled)
    both = rollout.rehearse(loaded, compiled, figures, display)
    both |= phases.rehearse(compiled, figures | both, display) if figures["compiled"] else {}
    if FLAGS.checklist and figures["compiled"]:
        both["checklist"] = [point._asdict() for point in checklist.of_rehearsal(compiled, figures)]
    display.sections(sections.of_step(figures | both))
    display.sections([*phases.sections(both), *checklist.sections(both)])
    figures |= advice.advise(compiled, figures, display, seconds=FLAGS.advice_seconds)
    display.sections(sections.of_changes(figures))
    write(figures | both, compiled)


def prove(loaded: Loaded, display) -> None:
    """Prove the layout on each mesh of the run, on simulated devices.

    Raises RunError if a step on one of them does not compute what one device computes.
    """
    from core import layout_proof  # imports jax, which otherwise only the processes that compile do

    chips = loaded.topology.chips
    validation.validate(loaded.config, chips, loaded)
    startup.simulate(chips)
    startup.update_imported_jax(jax_platforms="cpu")
    found, not_proved = {}, layout_proof.not_proved(loaded.config)
    for _, sizes in layouts.meshes(loaded.config):
        mesh = layouts.text(sizes)
        display.line(f"compiling a small copy of the step for {mesh}, simulated, and for one device (a minute or two)")
        found[mesh] = layout_proof.layout_differences(layouts.on_mesh(loaded.config, sizes))
        for difference in found[mesh]:
            display.line(difference)
    write_json({"topology": loaded.topology.name, "differences": found, "not_proved": not_proved})
    if differing := [mesh for mesh, differences in found.items() if differences]:
        raise RunError(f"the layout ({differing[0]}) does not compute what one device computes; see the lines above")
    if not_proved:
        display.line(f"not part of the proof: {', '.join(not_proved)}")
    meshes = ", then ".join(found)
    display.line(f"The layout ({meshes}) computes what one device computes: loss, gradients, update and state.")


def decode(loaded: Loaded, topology: topologies.Topology, display) -> None:
    """Compile the programs of a server and report on them."""
    keep_mesh = any(key.startswith("mesh.") for key in loaded.typed)
    config = for_decoding(loaded.config, topology.chips, keep_mesh=keep_mesh)
    if FLAGS.rows % (shards := batch_shards(config.mesh)):
        raise ConfigError(f"--rows={FLAGS.rows} is not a multiple of the {shards} chips that share the rows")
    length = FLAGS.length or min(USUAL_LENGTH, config.model.max_length)
    found = decoding.rehearse(loaded, config, topology, FLAGS.rows, length, display)
    display.sections(decoding.sections(found))
    write_json(found)


def write(figures: dict, compiled) -> None:
    """Write the files of --json, --html and --hlo, each atomically."""
    write_json(figures)
    if FLAGS.html:
        from rehearsal.page import page

        output_files.write("html", page(figures))
    if FLAGS.hlo and compiled.facts["out_of_memory"]:
        print(f"--hlo={FLAGS.hlo} is not written: a step that does not fit has no program")
    elif FLAGS.hlo:
        output_files.write("hlo", compiled.program())


def show(result: dict, display) -> None:
    """Print a table, and write it to the file of --json if given."""
    display.table(result)
    write_json(result)


def write_json(result: dict) -> None:
    """Write a report to the file of --json if given."""
    if FLAGS.json:
        output_files.write("json", json.dumps(result, indent=1, allow_nan=False))


if __name__ == "__main__":
    main(LOADED)
