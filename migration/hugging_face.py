# SPDX-License-Identifier: Apache-2.0
"""Imports models in Hugging Face's format as the checkpoint of step 0, and exports runs to that format.

Both process tensors a few rows at a time. So an import, and its export, needs little memory for a model of any size.
Each file of a trained run has several layers, so its export needs memory for its weights in float32.
hugging_face_families.py maps the configuration and tensors of each family to those of Torus. "Their" means Hugging
Face's, "our" means Torus's.
"""

import contextlib
import fcntl
import functools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from checkpointing import array_files
from checkpointing.checkpoints import Checkpoints
from checkpointing.retention import Retention
from checkpointing.shared_folder import FilledFolder
from checkpointing.source_run import check_complete, newest_checkpoint, reader
from checkpointing.state_names import PARAMS
from checkpointing.workdir import open_workdir
from configs import base
from configs.errors import ConfigError
from core import assembly
from files.json_reader import JsonError, read_json
from files.paths import expanded
from inference import prompts
from input_pipeline.chat.encoding import format_of_tokenizer
from input_pipeline.errors import DataError
from input_pipeline.tokenization import open_tokenizer
from migration import hugging_face_families as families
from migration import safetensors_files
from migration.hugging_face_config import Config
from migration.hugging_face_tensors import Tensor, folded, tensors_of
from migration.safetensors_files import DTYPES, Stored, WeightsError, check_names
from settings import stored_config, validation
from settings.architecture import head_dim
from settings.keys import flat

KEPT = "hugging_face"  # folder in a workdir with the published files other than weights, which an export copies
WRITTEN = ("*.safetensors", "*.safetensors.index.json")  # published files that are not kept; an export writes its own
OTHER_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*", "README*")  # kept with the weights
TEMPLATE = "chat_template.jinja"
TOKENIZERS = {
    "tokenizer.json": ("tokenizer.json", "tokenizer_config.json", TEMPLATE),
    "tokenizer.model": ("tokenizer.model",),
}
GENERATION = "generation_config.json"
TYPES = "types.json"  # in KEPT: {tensor: its type in the files}
NAME = "name.txt"  # in KEPT: the folder or the hub's model that was imported


class Published:
    """A folder in Hugging Face's format, with its configuration and the headers of its files.

    Attributes:
      config: of a run with its model, and its tokenizer if it has one.
      num_parameters: of the model.

    Raises:
      ConfigError: no model of Torus has this configuration; names the key.
      WeightsError: files cannot be read, or their tensors differ from the model's; names the first one.
    """

    def __init__(self, folder: pathlib.Path, workdir: pathlib.Path, name: str = ""):
        """Read a folder that is to be imported as a run in `workdir`; `name` on the hub, if it is a copy from there."""
        self.folder, self.workdir, self.name = folder, workdir, name or str(folder.absolute())
        self.config, self.family, self.model = configuration(folder)
        self.tokenizer = next((name for name in TOKENIZERS if (folder / name).is_file()), None)
        if self.tokenizer:
            _check_tokenizer(folder / self.tokenizer)
        self.config.data.tokenizer = str(workdir.absolute() / self.tokenizer) if self.tokenizer else ""
        run = assembly.assemble(self.config, devices=jax.devices()[:1])
        self.params, self.num_parameters = run.abstract_state.params, run.models.num_parameters
        self.tensors = tensors_of(self.family, self.params)
        self.stored = safetensors_files.find(folder)
        check(self.stored, self.tensors, folder, tied=self.model["tie_embeddings"])

    def make_run(self, record: dict) -> None:
        """Make the folder of the run atomically, with the weights as the checkpoint of step 0.

        Raises:
          ConfigError: the folder exists already.
          SaveFailed: it cannot be written.
        """
        with new_folder(self.workdir, "workdir") as part:
            self._keep(part)
            open_workdir(part, flat(self.config), None)
            fixed = ["model.name", *(f"model.{key}" for key in self.model)]
            store = FilledFolder(part, self._fill)
            with Checkpoints(part, Retention(1, 0, 0), store=store) as checkpoints:
                checkpoints.save_at_once(0, {PARAMS: self.params}, record | {"weights_only": fixed})

    def _keep(self, part: pathlib.Path) -> None:
        """Write the tokenizer, and copy all files that came with the weights."""
        kept = part / KEPT
        kept.mkdir()
        names = {path.name for pattern in OTHER_FILES for path in self.folder.glob(pattern) if path.is_file()}
        names -= {path.name for pattern in WRITTEN for path in self.folder.glob(pattern)}
        for name in names:
            shutil.copyfile(self.folder / name, kept / name)
        (kept / TYPES).write_text(json.dumps({tensor.name: self.stored[tensor.name].dtype for tensor in self.tensors}))
        (kept / NAME).write_text(self.name)
        for name in TOKENIZERS.get(self.tokenizer, ()):
            if name in names:
                shutil.copyfile(kept / name, part / name)

    def _fill(self, folder: pathlib.Path) -> None:
        """Write every array of the checkpoint, one block at a time."""
        shapes, arrays = flatten_dict(self.params, sep="."), {}
        for tensor in self.tensors:
            if tensor.ours not in arrays:
                ones, dim = (1,) * len(tensor.index), tensor.split
                chunks = (*ones, *tensor.inner[:dim], tensor.step, *tensor.inner[dim + 1 :])
                name = f"{PARAMS}.{tensor.ours}"
                arrays = {tensor.ours: array_files.create(folder, name, shapes[tensor.ours].shape, chunks)}
            for where, first, last in tensor.blocks():
                rows = self.stored[tensor.name].rows(first, last)
                arrays[tensor.ours][where].write(tensor.from_rows(rows)).result()
        for name in self.family.zeros:
            shape = shapes[name].shape
            array_files.create(folder, f"{PARAMS}.{name}", shape, shape).write(np.zeros(shape, np.float32)).result()


def _check_tokenizer(path: pathlib.Path) -> None:
    """Raise ConfigError if a tokenizer cannot be used: a run with it could not be continued."""
    try:
        open_tokenizer(str(path))
    except DataError as error:
        raise ConfigError(f"{error}; or remove {path}, to import without it") from None


def read_config(folder: pathlib.Path) -> dict:
    """Return the config.json of a folder; ConfigError if there is none or a value is invalid."""
    try:
        return dict(read_json(folder / "config.json", Config))
    except OSError as error:
        raise ConfigError(
            f"--hf={folder}: {error.strerror} (config.json); name a folder with a model in Hugging Face's format, or "
            "org/name on the hub"
        ) from None
    except JsonError as error:
        raise ConfigError(f"{error}; download it again") from None


def configuration(folder: pathlib.Path) -> tuple[ConfigDict, families.Family, dict]:
    """Return a configuration with a folder's model, its family, and the keys of `model` that the folder determines.

    Raises:
      ConfigError: as in Published.
    """
    values, config = read_config(folder), base.get_config()
    try:
        family, model = families.family_of(values), families.model_section(values)
        config.model.update(model)
        config.update_from_flattened_dict(family.settings)
        config.train.sequence_length = min(config.train.sequence_length, model["max_length"])
        validation.validate(config, 1)
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from None
    return config, family, model


def check(stored: dict[str, Stored], tensors: list[Tensor], folder: pathlib.Path, *, tied: bool) -> None:
    """Raise WeightsError for the first tensor that is missing, unknown or has another shape."""
    expected = {tensor.name: tensor.shape for tensor in tensors}
    unread = (*families.UNREAD, "lm_head.weight") if tied else families.UNREAD
    given = [name for name in stored if name in expected or not name.endswith(unread)]
    check_names(given, expected, folder, "its config.json describes another model")
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise WeightsError(
                f"{stored[name].file}: {name} has shape {list(stored[name].shape)}, but config.json means {list(shape)}"
            )


@contextlib.contextmanager
def new_folder(target: pathlib.Path, flag: str) -> Iterator[pathlib.Path]:
    """Yield a folder that is renamed to the target after the block, and removed if the block fails.

    Raises:
      ConfigError: the target exists and is not empty, or it cannot be made, or another process writes it.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--{flag}={target} exists already; name another folder, or remove it")
    place = pathlib.Path(os.path.realpath(target))  # what a link names
    if place.is_mount():
        raise ConfigError(f"--{flag}={target} is where a disk is mounted; name a folder in it")
    if place == pathlib.Path.cwd():
        raise ConfigError(f"--{flag}={target} is the folder you are in, which would be replaced; name another one")
    part = place.with_name(f".{place.name}.unfinished")
    try:
        part.mkdir(parents=True, exist_ok=True)  # it may be there, of an interrupted process
        opened = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"--{flag}={target}: {error.strerror}; name a folder that can be written") from None
    try:
        _lock(opened, part, f"--{flag}={target}")
        _empty(part, f"--{flag}={target}")
        try:
            yield part
            part.rename(place)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    finally:
        os.close(opened)


def _lock(opened: int, folder: pathlib.Path, what: str) -> None:
    """Lock an open folder, where the file system has locks; ConfigError if another process has it or renamed it."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        has_name = folder.exists() and os.path.samestat(os.fstat(opened), folder.stat())
    except OSError as error:
        has_name = not isinstance(error, BlockingIOError)
    if not has_name:
        raise ConfigError(f"{what}: another process writes it; name another folder, or wait for its end")


def _empty(folder: pathlib.Path, what: str) -> None:
    """Remove what an interrupted process has left in a folder; ConfigError if that is impossible."""
    try:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    except OSError as error:
        raise ConfigError(f"{what}: {error.filename} cannot be removed ({error.strerror}); remove it") from None


class Saved:
    """The evaluated weights of a checkpoint, for an export as the given tensors of the given types (default F32).

    They are read in parts, and rounded to the exported type.
    """

    def __init__(self, checkpoints: Checkpoints, step: int, tensors: Sequence[Tensor] = (), types: dict | None = None):
        self.opened = functools.cache(reader(checkpoints, step))
        self.tensors, self.last = {tensor.name: tensor for tensor in tensors}, ""
        self.types = {tensor.name: (types or {}).get(tensor.name, "F32") for tensor in tensors}
        self.type_of = {(tensor.ours, tensor.index[:1]): self.types[tensor.name] for tensor in tensors}

    def written(self) -> dict[str, tuple[str, tuple]]:
        """Return {name: (type, shape)} of all exported tensors."""
        return {name: (self.types[name], tensor.shape) for name, tensor in self.tensors.items()}

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """Yield the rows of an exported tensor, some at a time."""
        tensor = self.tensors[name]
        if tensor.ours != self.last:  # drop cached parts of files of several layers
            self.opened.cache_clear()
        self.last, array = tensor.ours, self.opened(tensor.ours)
        for where, _, _ in tensor.blocks():
            rows = tensor.to_rows(array(where))
            yield rows * np.float32(tensor.factor) if tensor.factor != 1.0 else rows

    def read(self, ours: str, index: tuple = (), rows: np.ndarray | None = None) -> np.ndarray:
        """Return float32 of an array of ours: one layer, whose experts share an exported type, or rows of a table."""
        values = self.opened(ours)(index if rows is None else (*index, rows))
        return values.astype(DTYPES[self.type_of.get((ours, index), "F32")]).astype(np.float32)


def kept_in(config, workdir: pathlib.Path) -> pathlib.Path | None:
    """Return the folder KEPT of a run, or else of the nearest run that it descends from; None: none has one."""
    found = (folder / KEPT for folder in _ancestors(config, workdir) if (folder / KEPT / TYPES).is_file())
    return next(found, None)


def _ancestors(config, workdir: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield the folder of a run, the folder of its train.init_from, then that run's train.init_from, and so on."""
    seen, source = [workdir], config.train.init_from
    yield workdir
    while source and (folder := expanded(source)) not in seen:
        yield folder
        seen.append(folder)
        source = stored_config.read_config(folder)["train.init_from"] if stored_config.is_run(folder) else ""


def kept_types(kept: pathlib.Path) -> dict[str, str]:
    """Return {tensor: its type in the files that were imported}."""
    return read_json(kept / TYPES, dict[str, Literal[tuple(DTYPES)]], max_bytes=safetensors_files.INDEX_BYTES)


def as_published(
    config, workdir: pathlib.Path, params: dict
) -> tuple[dict, list[Tensor], dict[str, str], pathlib.Path | None]:
    """Return (config.json, tensors, their types, KEPT) of a run, from its import or from a family that fits it.

    KEPT is None if the run has no import, or another model.

    Raises:
      ConfigError: no family has such a model.
    """
    model = dict(config.model) | {"head_dim": head_dim(config.model)}
    if kept := kept_in(config, workdir):
        values = read_config(kept)
        if all(model[key] == value for key, value in families.model_section(values).items()):
            return values, tensors_of(families.family_of(values), params), kept_types(kept), kept
    if values := families.config_json(model):
        return values, tensors_of(families.family_of(values), params), {}, None
    plain = model | {"embed_scale": 1.0, "tie_embeddings": False, "mup_base_dim": 0}
    values = families.config_json(plain)
    if values is None:
        raise ConfigError(
            f"none of the families {', '.join(families.FAMILIES)} has the model of {workdir}; {families.nearest(plain)}"
        )
    return values, folded(model, tensors_of(families.family_of(values), params)), {}, None


def export(run: assembly.Run, workdir: pathlib.Path, folder: pathlib.Path, verify: Callable) -> int:
    """Write the evaluated weights of a run's newest checkpoint as a folder; return its step.

    Args:
      verify: (the folder, the run, its exported weights) -> raises if the folder computes another model; the folder is
        then removed.

    Raises:
      ConfigError: the folder exists already, or no family has such a model.
      CheckpointError: the run has no checkpoint.
    """
    values, tensors, types, kept = as_published(run.config, workdir, run.abstract_state.params)
    contents = described(run.config, workdir, values, kept)
    with Checkpoints(workdir) as checkpoints:
        step = newest_checkpoint(checkpoints, run.config)
        weights = Saved(checkpoints, step, tensors, types)
        check_zeros(families.family_of(values), weights, step)
        with check_complete(checkpoints, step), new_folder(folder, "hf") as part:
            safetensors_files.write(part, weights.written(), weights.blocks)
            for file in copied(workdir, kept):
                shutil.copyfile(file, part / file.name)
            for name, content in contents.items():
                (part / name).write_text(json.dumps(content, indent=2) + "\n")
            verify(part, run, weights)
    return step


def check_zeros(family: families.Family, weights: Saved, step: int) -> None:
    """Raise ConfigError if an array that the family lacks is not 0."""
    for name in family.zeros:
        if weights.read(name).any():
            settings = ", ".join(f"--config.{key}={value}" for key, value in family.settings.items())
            raise ConfigError(
                f"{name} of step {step} is not 0, and {family.architecture} has no such tensor; "
                f"train from the start with {settings}"
            )


def copied(workdir: pathlib.Path, kept: pathlib.Path | None) -> list[pathlib.Path]:
    """Return the files of an export other than weights: those of the import, and then the run's own tokenizer.

    The run was trained with its own tokenizer; its chat template may differ from the import's.
    """
    own = [workdir / name for names in TOKENIZERS.values() for name in names if (workdir / name).is_file()]
    left = (TYPES, NAME, TEMPLATE) if (workdir / "tokenizer.json").is_file() else (TYPES, NAME)
    return [*(file for file in (kept.iterdir() if kept else ()) if file.name not in left), *own]


def described(config: ConfigDict, workdir: pathlib.Path, values: dict, kept: pathlib.Path | None) -> dict[str, dict]:
    """Return {name: content} of config.json and generation_config.json; for an import, only what its files lack.

    They have the tokens that end a text. A run on conversations may have learned another end of a turn.
    """
    if kept and not prompts.is_of_turns(config):
        return {}
    tokenizer, learned, files = _own_tokenizer(config, workdir), [], {}
    if tokenizer and prompts.is_of_turns(config):
        learned = prompts.answer_ends(tokenizer, format_of_tokenizer(tokenizer, config.data.tokenizer))
    if not kept:
        end = {"eos_token_id": tokenizer.end_of_document} if tokenizer else {}
        files, before = {"config.json": values | end, GENERATION: end}, end
    elif (kept / GENERATION).is_file():
        before = read_json(kept / GENERATION, dict[str, object])
    else:  # then transformers takes these from config.json
        of_import = read_json(kept / "config.json", dict[str, object])
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        before = {name: of_import[name] for name in names if of_import.get(name) is not None}
    known = before.get("eos_token_id")
    known = known if isinstance(known, list) else [] if known is None else [known]
    if new := [token for token in learned if token not in known]:
        files[GENERATION] = before | {"eos_token_id": [*known, *new]}
    return files


def _own_tokenizer(config: ConfigDict, workdir: pathlib.Path):
    """Return the tokenizer in the folder of a run, or the built-in one of the run; None if it has neither."""
    name = config.data.tokenizer
    has_one = any((workdir / file).is_file() for file in TOKENIZERS) or name in base.BUILT_IN_TOKENIZERS
    return open_tokenizer(name) if name and has_one else None
