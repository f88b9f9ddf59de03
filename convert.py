# SPDX-License-Identifier: Apache-2.0
"""Import and export published models, and compute logits to compare them.

python convert.py import --hf=FOLDER_OR_NAME --workdir=runs/mine    # Hugging Face format; a name is org/name of its hub
python convert.py export --workdir=runs/mine --hf=FOLDER
python convert.py export --workdir=runs/mine --peft=FOLDER          # only the adapters of a run, for PEFT
python convert.py import --trm=FILE.safetensors --workdir=runs/mine --config=configs/trm/sudoku.py    # public TRM
python convert.py export --workdir=runs/mine --trm=FILE.safetensors
python convert.py logits --workdir=runs/mine --tokens=IN.npy --out=OUT.npy

An import becomes the checkpoint of step 0. `train.py --workdir=runs/mine` trains it further (a TRM needs the same
--config). generate.py and `train.py --evaluate_only` can use it directly. An export contains the parameters that are
evaluated. An export to the Hugging Face format is only written if a second reader computes the same logits from it.
`logits` reads int32 [batch, length], each row a document, and writes float32 [batch, length, vocabulary].
"""

import sys

from core import command_line
from configs.base import OF_A_MODULE
from configs.errors import ConfigError

command_line.flags.DEFINE_string("trm", "", "file of weights, .safetensors, to import or export")
command_line.flags.DEFINE_string(
    "hf", "", "folder in Hugging Face's format, to import or export; or a name on its hub, to import"
)
command_line.flags.DEFINE_string("peft", "", "folder to export adapters to, in PEFT's format")
command_line.flags.DEFINE_string("tokens", "", "logits: file to read, .npy")
command_line.flags.DEFINE_string("out", "", "logits: file to write, .npy")
VERBS = {"import": ("hf", "trm"), "export": ("hf", "trm", "peft"), "logits": ("tokens", "out")}  # the flags of each


def use_of_run(parsed, verb: str) -> str:
    """Return the use of the run in --workdir; ConfigError for an unknown verb or the flags of another verb."""
    if verb not in VERBS:
        raise ConfigError(f"convert.py {verb or '...'}: the first argument must be import, export or logits")
    unread = [flag for flags in VERBS.values() for flag in flags if flag not in VERBS[verb]]
    if verb == "import" and parsed.hf:
        unread += ["config"]
        if not parsed.workdir:
            raise ConfigError("convert.py import --hf needs --workdir=FOLDER, the folder of the new run")
    if given := [flag for flag in unread if parsed[flag].present]:
        raise ConfigError(f"--{given[0]} is not read by this convert.py {verb}; leave it out")
    return command_line.IGNORE if verb == "import" else command_line.READ


if __name__ == "__main__":
    VERB = sys.argv.pop(1) if sys.argv[1:] and not sys.argv[1].startswith("-") else ""
    COMMAND = command_line.parse(__doc__, use=lambda parsed: use_of_run(parsed, VERB), one_device=True)

import pathlib
import shlex
import time

import jax

from core import assembly, output_files
from settings.keys import flat
from migration import hugging_face, hugging_face_hub, logits, peft, trm_reference
from files.paths import expanded
from parallelism.mesh import mesh_context
from checkpointing import workdir as workdirs
from checkpointing.checkpoints import CheckpointError, Checkpoints
from reporting.clock import Clock
from reporting.goodput import Goodput
from checkpointing.source_run import check_complete, newest_checkpoint
from checkpointing.retention import Retention


def main(command: command_line.Command, verb: str) -> None:
    """Import, export or compute logits on one device, and print the result."""
    flags = command_line.FLAGS
    command_line.ending.continues(False)
    formats = [name for name in ("hf", "trm", "peft") if flags[name].value]
    if verb == "logits":
        return write_logits(command, expanded(flags.tokens), expanded(flags.out))
    if len(formats) != 1:
        more = ", --peft=FOLDER" if verb == "export" else ""
        raise ConfigError(f"convert.py {verb} needs one of --hf=FOLDER{more} and --trm=FILE.safetensors")
    if verb == "import" and command.bucket:
        raise ConfigError(f"--workdir={command.address}: import into a local folder, and copy it to the bucket")
    place = expanded(flags[formats[0]].value)
    if formats == ["trm"]:
        check_trm(command.config)
    elif verb == "export":
        check_local_language_model(command)
    return CONVERSIONS[verb, formats[0]](command, place)


def import_hugging_face(command: command_line.Command, _: pathlib.Path) -> None:
    """Import a model in Hugging Face's format, from a folder or the hub, as a run."""
    if typed := list(command.loaded.typed):
        raise ConfigError(
            f"--config.{typed[0]} is not read by an import, whose config.json determines the model; give it to train.py"
        )
    name = command_line.FLAGS.hf
    folder = hugging_face_hub.folder_of(name)
    published = hugging_face.Published(folder, command.workdir, "" if folder == expanded(name) else name)
    published.make_run(record_of_start(published.config, command.workdir))
    print(
        f"{published.num_parameters:,} parameters of {name} are the checkpoint of step 0 "
        f"in {command.workdir}; train.py {shlex.quote(f'--workdir={command.workdir}')} continues from there"
    )
    if not published.tokenizer:
        print(f"{name} has no tokenizer; train.py and generate.py need the model's own, --config.data.tokenizer=FILE")


def export_hugging_face(command: command_line.Command, folder: pathlib.Path) -> None:
    """Write a folder in Hugging Face's format."""
    source = command.config.train.init_from
    if source and not expanded(source).exists():
        print(f"Note: there is no train.init_from={source} here; if it is an import, its number types are not known")
    step = hugging_face.export(logits.float32_run(command.config), command.workdir, folder, logits.check_same)
    tokenizer = any((folder / name).is_file() for name in hugging_face.TOKENIZERS)
    print(f"step {step} of {command.address} is in {folder}" + ("" if tokenizer else ", without a tokenizer"))


def export_adapters(command: command_line.Command, folder: pathlib.Path) -> None:
    """Write adapters in PEFT's format."""
    step = peft.export(logits.float32_run(command.config), command.workdir, folder)
    print(f"the adapters of step {step} of {command.address} are in {folder}")


def import_trm(command: command_line.Command, file: pathlib.Path) -> None:
    """Import weights of the Tiny Recursive Model's public reference as the checkpoint of step 0 of a new run.

    Nothing is written unless they fit. The average becomes a copy of the weights; the other state is initialized.

    Raises:
      WeightsError: the file cannot be read, or does not have the weights of the configured model.
      CheckpointError: the folder has a checkpoint, or cannot be used.
    """
    config, workdir = command.config, command.workdir
    run = assembly.assemble(config, devices=jax.devices()[:1])
    refuse_checkpoints(Checkpoints(workdir))
    weights = trm_reference.load(file, run.abstract_state.params)
    with (
        workdirs.exclusive(workdir),
        Checkpoints(workdir, Retention(config.checkpoint.keep, 0, 0)) as checkpoints,
        mesh_context(run.mesh),
    ):
        refuse_checkpoints(checkpoints)
        workdirs.open_workdir(workdir, flat(config), None, command.origin)
        checkpoints.save_and_wait(0, run.init(weights), record_of_start(config, workdir))
    print(f"{run.models.num_parameters:,} parameters of {file} are the checkpoint of step 0 in {workdir}")


def export_trm(command: command_line.Command, file: pathlib.Path) -> None:
    """Write the evaluated parameters of a run's newest checkpoint under the names of the reference.

    Raises:
      ConfigError: the file exists, or its folder does not.
      WeightsError: the model has weights that the reference lacks.
      CheckpointError: the run has no checkpoint.
    """
    refuse_file("trm", file)
    run = assembly.assemble(command.config, devices=jax.devices()[:1])
    with Checkpoints(command.address) as checkpoints, mesh_context(run.mesh):
        step = newest_checkpoint(checkpoints, command.config)
        params = checkpoints.restore_eval_params(step, run.abstract_state.params)
    try:
        trm_reference.save(file, jax.device_get(params))
    except OSError as error:
        raise ConfigError(f"--trm={file}: {error.strerror or error}; name a file that can be written") from None
    print(f"step {step} of {command.address} is in {file}")


CONVERSIONS = {
    ("import", "hf"): import_hugging_face,
    ("export", "hf"): export_hugging_face,
    ("export", "peft"): export_adapters,
    ("import", "trm"): import_trm,
    ("export", "trm"): export_trm,
}


def check_trm(config) -> None:
    """Raise ConfigError if the configuration is not of a Tiny Recursive Model that the reference computes."""
    if config.model.name != "trm":
        raise ConfigError(
            f"model.name={config.model.name} is not the model of the reference; "
            "use a recipe or a run with model.name=trm, such as --config=configs/trm/sudoku.py"
        )
    for key, allowed in trm_reference.COMPUTED.items():
        if config.model[key] not in allowed:
            one_of = " or ".join(map(str, allowed))
            raise ConfigError(f"the reference has no model.{key}={config.model[key]}, only model.{key}={one_of}")


def check_local_language_model(command: command_line.Command) -> None:
    """Raise ConfigError for a run of another kind of model, or one in a bucket."""
    if command.config.model.name != "decoder_lm":
        raise ConfigError(f"{command.address} has model.name={command.config.model.name}, but this needs a decoder_lm")
    if (objective := command.config.train.objective) in OF_A_MODULE:
        raise ConfigError(
            f"{command.address} has the module of train.objective={objective}, which is not part of a language model "
            "elsewhere; convert the run of its train.init_from"
        )
    if command.bucket:
        raise ConfigError(f"--workdir={command.address}: copy the run from the bucket, and name the local copy")


def write_logits(command: command_line.Command, tokens_file: pathlib.Path, file: pathlib.Path) -> None:
    """Write the logits of the evaluated parameters of a run's newest checkpoint to a file, atomically."""
    check_local_language_model(command)
    if not command_line.FLAGS.tokens or not command_line.FLAGS.out:
        raise ConfigError("convert.py logits needs --tokens=IN.npy and --out=OUT.npy")
    refuse_file("out", file)
    tokens_BT = logits.read_tokens(tokens_file, command.config.model)
    run = logits.float32_run(command.config)
    with Checkpoints(command.workdir) as checkpoints:
        step = newest_checkpoint(checkpoints, command.config)
        weights = hugging_face.Saved(checkpoints, step)
        rows = logits.of_run(run, weights.read, tokens_BT)
        with check_complete(checkpoints, step):
            logits.write(file, (*tokens_BT.shape, run.config.model.vocab_size), rows)
    print(f"logits of step {step} of {command.address} are in {file}")


def refuse_file(flag: str, file: pathlib.Path) -> None:
    """Raise ConfigError if an output file exists, or its folder does not."""
    if file.exists():
        raise ConfigError(f"--{flag}={file} exists already; name another file, or remove it")
    output_files.check(flag)


def refuse_checkpoints(checkpoints: Checkpoints) -> None:
    """Raise CheckpointError if there are checkpoints."""
    if there := checkpoints.store.existing():
        raise CheckpointError(f"{checkpoints.address} has checkpoint {there[0]} already; name another --workdir")


def record_of_start(config, workdir: pathlib.Path) -> dict:
    """Return the record of an untrained checkpoint of step 0, which fits any corpus."""
    goodput = Goodput(Clock(time.monotonic()), workdir / "workers" / "0.json", None)
    return {
        "step": 0, "examples": 0, "config": flat(config), "corpus": None, "mixture": [], "skips": [], "losses": {},
        "topology": None, "total_tokens": 0, "goodput": goodput.record(),
    }  # fmt: skip


if __name__ == "__main__":
    main(COMMAND, VERB)
