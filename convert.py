# SPDX-License-Identifier: Apache-2.0
"""Weights of the Tiny Recursive Model's public reference, taken in and given out as safetensors.

python convert.py import --trm=FILE.safetensors --workdir=runs/mine --config=configs/trm/sudoku.py
python convert.py export --workdir=runs/mine --trm=FILE.safetensors

What is imported is the checkpoint of step 0 of a run, which train.py takes up with the same --config and generate.py
and train.py --evaluate_only use as it is. What is exported are the parameters that are evaluated.
"""

import sys

import command_line

command_line.flags.DEFINE_string("trm", "", "file of weights, .safetensors, to read from or to write")
VERBS = ("import", "export")
if __name__ == "__main__":
    VERB = sys.argv.pop(1) if sys.argv[1:2] and sys.argv[1] in VERBS else ""
    COMMAND = command_line.parse(__doc__, stored=lambda flags: VERB == "export", one_device=True)

import dataclasses
import pathlib
import time

import jax

import assembly
from configs.base import ConfigError
from configs.loading import flat
from migration import trm_reference
from parallelism.mesh import mesh_context
from training import workdir as workdirs
from training.checkpoints import CheckpointError, Checkpoints
from training.clock import Clock
from training.goodput import Goodput
from training.retention import Retention


def main(command: command_line.Command, verb: str) -> None:
    """Import or export, on one device, and say what was done."""
    config, file = command.config, pathlib.Path(command_line.FLAGS.trm).expanduser()
    if not verb:
        raise ConfigError(f"convert.py {' or '.join(VERBS)}? Name one of them first, see --help")
    if not command_line.FLAGS.trm:
        raise ConfigError(f"convert.py {verb} needs a file of weights, --trm=FILE.safetensors")
    if config.model.name != "trm":
        raise ConfigError(
            f"model.name={config.model.name} is not the model that the reference has; "
            "use a recipe or a run of model.name=trm, such as --config=configs/trm/sudoku.py"
        )
    if verb == "export":
        step = export_weights(config, command.address, file)
        print(f"step {step} of {command.address} is in {file}")
    elif command.bucket:
        raise ConfigError(f"--workdir={command.address}: import into a local folder, and copy that to the bucket")
    else:
        num_parameters = import_weights(config, command.workdir, file)
        print(f"{num_parameters:,} parameters of {file} are the checkpoint of step 0 in {command.workdir}")


def import_weights(config, workdir: pathlib.Path, file: pathlib.Path) -> int:
    """Make weights of the reference the checkpoint of step 0 of a new run; return how many parameters they are.

    Nothing is written unless they fit. Moments and all else are as at the start of a run; the average is the weights.

    Raises:
      WeightsError: the file cannot be read, or has not the weights of the configured model.
      CheckpointError: the folder has a checkpoint, or cannot be used.
    """
    run = assembly.assemble(config, devices=jax.devices()[:1])
    refuse_checkpoints(Checkpoints(workdir))
    weights = trm_reference.load(file, run.abstract_state.params)
    with (
        workdirs.exclusive(workdir),
        Checkpoints(workdir, Retention(config.checkpoint.keep, 0, 0)) as checkpoints,
        mesh_context(run.mesh),
    ):
        refuse_checkpoints(checkpoints)
        workdirs.open_workdir(workdir, flat(config), None)
        checkpoints.save_and_wait(0, state_with(run, weights), record_of_start(config, workdir))
    return run.num_parameters


def export_weights(config, address, file: pathlib.Path) -> int:
    """Write the evaluated parameters of a run's newest checkpoint, as the reference names them; return its step.

    Raises:
      ConfigError: there is such a file, or no folder for it.
      WeightsError: the model has weights that the reference does not know.
      CheckpointError: the run has no checkpoint.
    """
    if file.exists():
        raise ConfigError(f"--trm={file} exists; name another file, or remove it")
    if not file.parent.is_dir():
        raise ConfigError(f"--trm={file}: there is no folder {file.parent}")
    run = assembly.assemble(config, devices=jax.devices()[:1])
    with Checkpoints(address) as checkpoints, mesh_context(run.mesh):
        step = checkpoints.newest_or_error()
        params = checkpoints.restore_evaluated(step, run.abstract_state)
    trm_reference.save(file, jax.device_get(params))
    return step


def refuse_checkpoints(checkpoints: Checkpoints) -> None:
    """Raise CheckpointError where a run has saved anything."""
    if there := checkpoints.files.there():
        raise CheckpointError(f"{checkpoints.address} has checkpoint {there[0]} already; name another --workdir")


def state_with(run: assembly.Run, weights: dict):
    """Return the state at the start of a run that has these weights."""
    params = jax.tree.map(lambda array, leaf: jax.device_put(array, leaf.sharding), weights, run.abstract_state.params)
    state = run.init()
    return dataclasses.replace(state, params=params, average=params if state.average else {})


def record_of_start(config, workdir: pathlib.Path) -> dict:
    """Return the record of a checkpoint that was not trained, on whatever corpus will be taken."""
    goodput = Goodput(Clock(time.monotonic()), workdir / "workers" / "0.json", None)
    return {
        "step": 0, "examples": 0, "config": flat(config), "corpus": None, "mixture": [], "skips": [], "losses": {},
        "topology": None, "total_tokens": 0, "goodput": goodput.record(),
    }  # fmt: skip


if __name__ == "__main__":
    main(COMMAND, VERB)
