# SPDX-License-Identifier: Apache-2.0
"""Batches that an objective samples from the live parameters before each step."""

import io
import json
import pathlib
import zipfile
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all

from checkpointing.bucket import path_of
from cluster import processes
from core import assembly, decoding
from core.assembly import Run
from core.evaluators import engine_of
from files.atomic import writing
from input_pipeline.errors import DataError
from objectives.objective import Objective, Sampled
from parallelism import resharding
from parallelism.mesh import mesh_context
from parallelism.placement import check_batch, check_ids, with_rows
from reporting.metrics import OF_A_LINE
from settings.decoding import for_decoding


def samples(objective: Objective) -> bool:
    """Return whether an objective samples batches; asking it would cost others a dispatch in each step."""
    return type(objective).sample_batch is not Objective.sample_batch


class BatchSampler:
    """Samples batches. Weights are copied to the mesh and the layout in which a token is decoded fastest.

    An objective may train on a batch for several steps. If a checkpoint is saved between them, the batch is saved
    before it, as rollouts/STEP.npz in the run's folder or bucket, so that a run that resumes there trains on it too.
    """

    def __init__(self, address):
        """Sample for the run in a folder, which is a path or the address of a bucket folder."""
        self._folder, self._is_local, self._run = path_of(address) / "rollouts", "://" not in str(address), None
        self._step, self._kept = 0, {}  # the last step, and the batch that it trained on

    def sample(self, run: Run, params: dict, frozen: dict, batch: dict[str, jax.Array], step: int) -> Sampled:
        """Return what the objective of `run` samples in place of `batch`, with its arrays on the devices.

        Raises ValueError if the sampled batch has other names, shapes or types than `objective.batch()`, or numbers
        that are not ids of the model, ValueError or TypeError for a record that a line of rollouts.jsonl cannot hold,
        and DataError if the run resumes between steps on the same batch, and its file cannot be read.
        """
        wanted = with_rows(run.abstract_batch, len(batch["tokens"]))
        if self._is_first(run, step):
            sampled = self._sampled(run, params, frozen, batch, step)
        else:
            sampled = Sampled(self._kept if self._step == step - 1 else self._read(step - 1, wanted))
        self._step, self._kept = step, sampled.batch
        what = f"the batch that train.objective={run.config.train.objective} sampled"
        check_batch(sampled.batch, wanted, what)
        if "segments" in wanted and isinstance(sampled.batch["tokens"], np.ndarray):  # else it is that of the data
            check_ids(sampled.batch, run.config.model.vocab_size, what)
        for record in sampled.records:
            check_record(record, f"train.objective={run.config.train.objective}")
        return sampled._replace(batch=_placed(sampled.batch, run))

    def saving(self, step: int, run: Run, steps: Callable[[], list[int]]) -> Callable[[], None]:
        """Return a function that writes the batch of a step, if the next step trains on it too, before its checkpoint.

        A run that resumed at this step has read it. Batches of other steps than `steps()`, those of the checkpoints,
        are deleted.
        """
        keeps = samples(run.objective) and processes.index() == 0 and not self._is_first(run, step + 1)
        if not keeps or self._step != step:
            return lambda: None
        batch = self._kept

        def write() -> None:
            content, place = io.BytesIO(), self._folder / f"{step}.npz"
            np.savez(content, **batch)
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._is_local:
                with writing(pathlib.Path(place)) as file:  # on disk before the checkpoint that needs it
                    file.write(content.getvalue())
            else:
                place.write_bytes(content.getvalue())  # an object of a bucket is replaced as a whole
            kept = {f"{number}.npz" for number in (step, *steps())}
            for old in self._folder.iterdir():  # not glob, for which the folder's own name would be a pattern
                if old.name.endswith(".npz") and old.name not in kept:
                    old.unlink()

        return write

    def _is_first(self, run: Run, step: int) -> bool:
        """Return whether a step is the first one on its batch."""
        return (step - 1) % run.objective.steps_of_batch == 0

    def _read(self, step: int, wanted: dict) -> dict[str, np.ndarray]:
        """Return the batch that `saving` wrote, with the names, shapes and types of `wanted`.

        Process 0 reads it and sends it to the others, whose folders need not have it.
        """
        found, problem = self._read_here(step, wanted) if processes.index() == 0 else ({}, "")
        if problem := processes.shared("sampled batch", lambda: problem):
            raise DataError(problem)
        zeros = {name: np.zeros(array.shape, array.dtype) for name, array in wanted.items()}
        return broadcast_one_to_all(found or zeros, is_source=processes.index() == 0)

    def _read_here(self, step: int, wanted: dict) -> tuple[dict[str, np.ndarray], str]:
        """Return the batch in the file of a step, and why it cannot be used; "" if it can."""
        file = self._folder / f"{step}.npz"
        try:
            with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as arrays:
                found = dict(arrays)
            rows, now = len(found["tokens"]), wanted["tokens"].shape[0]
            if rows != now:
                return {}, (
                    f"step {step + 1} trains on the {rows} answers that were drawn before it, so "
                    f"train.global_batch={now} cannot begin there; resume with {rows} rows, or type "
                    f"--config.train.global_batch after a step that ends its grpo.updates"
                )
            check_batch(found, wanted, str(file))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            return {}, (
                f"{file} cannot be read, and step {step + 1} trains on the answers in it; copy it back, or remove "
                f"checkpoints/{step} to resume at an earlier step ({error})"
            )
        return found, ""

    def _sampled(self, run: Run, params: dict, frozen: dict, batch: dict, step: int) -> Sampled:
        """Return what the objective samples, or `batch` itself, on the host."""
        if run is not self._run:
            self._begin(run)
        weights = self._copied(run.models.merge_base(params, frozen))
        with mesh_context(self._decoding.mesh):
            key = jax.random.fold_in(jax.random.key(run.config.train.seed), step)
            sampled = run.objective.sample_batch(engine_of(self._decoding, weights), batch, key)
        if sampled is None:
            return Sampled(batch)
        return sampled._replace(batch={name: np.asarray(array) for name, array in sampled.batch.items()})

    def _copied(self, params: dict) -> dict:
        """Return a copy of parameters for decoding. The intermediate copy that it is made from is freed on return."""
        moved = resharding.reshard(self._copy(params), self._weights)
        with mesh_context(self._decoding.mesh):
            return self._place(moved)

    def _begin(self, run: Run) -> None:
        devices = run.mesh.devices.flatten().tolist()
        self._run, self._decoding = run, assembly.assemble(for_decoding(run.config, len(devices)), devices=devices)
        with mesh_context(self._decoding.mesh):
            self._place, self._weights = decoding.placer(self._decoding), decoding.stacked_weights(self._decoding)
        types = jax.tree.map(lambda weight: weight.dtype, self._weights)
        self._copy = jax.jit(lambda params: jax.tree.map(lambda one, of: jnp.copy(one.astype(of)), params, types))


def check_record(record: Mapping, what: str) -> None:
    """Raise TypeError or ValueError for a record that a line of rollouts.jsonl cannot hold; `what` names its objective.

    A number that is not finite becomes null, if it is not inside of a list or a dictionary.
    """
    if not isinstance(record, Mapping) or not all(isinstance(name, str) for name in record):
        raise TypeError(f"{what} sampled the record {record!r:.60}; a record is a dictionary with texts as keys")
    for name, value in record.items():
        if name in OF_A_LINE:
            raise ValueError(f"{what}: a line of rollouts.jsonl has its own {name!r}; rename the key of the record")
        try:
            json.dumps(value, allow_nan=isinstance(value, float))
        except (TypeError, ValueError) as error:
            line = f"{what}: {name!r} of a record is {value!r:.60}, which is not a value of JSON ({error})"
            raise type(error)(f"{line}; give numbers of Python, texts, lists and dictionaries") from None


def _placed(batch: dict, run: Run) -> dict[str, jax.Array]:
    """Return a batch that all processes have as arrays on all devices, sharded as the step wants it."""
    return {name: _on_devices(batch[name], array.sharding) for name, array in run.abstract_batch.items()}


def _on_devices(values, sharding: jax.sharding.Sharding) -> jax.Array:
    if isinstance(values, jax.Array) and values.sharding == sharding:
        return values
    host = np.asarray(values)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
