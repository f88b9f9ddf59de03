# SPDX-License-Identifier: Apache-2.0
"""A caller's loader of batches, as `train` and its evaluations take them.

    train(config, workdir, Loader(batches), evaluators=[LoaderLoss(100, heldout)])

A batch has any number of rows: `tokens` and `targets`, and `segments` and `positions` if wanted; or `input_ids`, and
`labels` (of the same places, -100 where there is no loss), `attention_mask`, `segments` and `position_ids` if there are
any. Segments are documents of a row, from 1; 0 is padding.

On several hosts the loader returns the same rows in every process, and each process takes its share of them.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from cluster import processes
from configs.errors import ConfigError
from core.callbacks import Callback
from core.evaluation import summary_of, summed_figures
from core.evaluators import Evaluator
from input_pipeline.cache import digest
from parallelism.placement import check_ids, local_rows, place

NAMES = ("tokens", "targets", "segments", "positions")
OF_INPUT_IDS = ("input_ids", "labels", "attention_mask", "segments", "positions", "position_ids")
WHOLE = {"attention_mask", "segments", "positions", "position_ids"}
SMALLEST, LARGEST = np.iinfo(np.int32).min, np.iinfo(np.int32).max
ONCE = "can be read only once; give a list or a data loader"


def as_ours(batch: Mapping) -> dict[str, np.ndarray]:
    """Return the arrays of NAMES, int32 [B, T]; ConfigError if the batch has neither form."""
    if not isinstance(batch, Mapping):
        raise ConfigError(f"a batch is a {type(batch).__name__}; it needs to be a dictionary of arrays")
    names = OF_INPUT_IDS if "input_ids" in batch else NAMES
    unread = [name for name in ("attention_mask", "position_ids") if names is NAMES and batch.get(name) is not None]
    if unread:
        raise ConfigError(f"a batch has {unread[0]} without input_ids; leave it out, and give segments and positions")
    arrays = {name: _array(name, batch[name]) for name in names if name in batch}
    tokens = arrays.get("input_ids", arrays.get("tokens"))
    for name, array in arrays.items() if tokens is not None else ():
        if array.ndim != 2 or array.shape != tokens.shape:
            wanted = "[rows, length]" if tokens.ndim != 2 else f"{list(tokens.shape)} as the ids have"
            raise ConfigError(f"a batch has {name} of shape {list(array.shape)}; it needs {wanted}")
    for name in arrays.keys() & WHOLE:
        if not np.array_equal(arrays[name], np.trunc(arrays[name])):
            raise ConfigError(f"a batch has {name} with numbers that are not whole; give whole ones")
    if "input_ids" in arrays:
        arrays = _of_input_ids(**arrays)
    if not {"tokens", "targets"} <= arrays.keys():
        raise ConfigError(f"a batch has {', '.join(batch) or 'nothing'}; it needs input_ids, or tokens and targets")
    if floats := [name for name in ("tokens", "targets") if arrays[name].dtype.kind not in "iub"]:
        raise ConfigError(f"a batch has {floats[0]} of {arrays[floats[0]].dtype}; ids are integers")
    shape = arrays["tokens"].shape
    arrays = {"segments": np.ones(shape), "positions": np.broadcast_to(np.arange(shape[1]), shape)} | arrays
    for name in NAMES:
        if (wrong := arrays[name][(arrays[name] < SMALLEST) | (arrays[name] > LARGEST)]).size:
            raise ConfigError(f"a batch has {wrong[0]} in {name}; numbers are from {SMALLEST} to {LARGEST}")
    return {name: arrays[name].astype(np.int32) for name in NAMES}


def _array(name: str, given) -> np.ndarray:
    try:
        found = np.asarray(given)
    except ValueError:  # rows of several lengths
        raise ConfigError(f"a batch has {name} with rows of several lengths; pad them to one length") from None
    if found.dtype.kind in "USMm":  # texts and times
        raise ConfigError(f"a batch has {name} of {found.dtype}; it needs numbers")
    return found


def _of_input_ids(
    input_ids: np.ndarray, labels=None, attention_mask=None, segments=None, positions=None, position_ids=None
) -> dict[str, np.ndarray]:
    """Return the arrays of a batch in the form of Hugging Face's models."""
    mask = np.ones_like(input_ids) if attention_mask is None else attention_mask
    positions = position_ids if positions is None else positions
    if segments is None:
        segments = mask if positions is None else _documents(positions)
    segments = np.where(mask > 0, segments, 0)
    labels = input_ids if labels is None else labels
    labels = labels.astype(np.int64) if labels.dtype.kind == "u" else labels
    labels = np.where(mask > 0, np.maximum(labels, -1), -1)  # -1 has no loss
    labels = np.where(segments[:, 1:] == segments[:, :-1], labels[:, 1:], -1)  # no token follows another document's
    targets = np.pad(labels, ((0, 0), (0, 1)), constant_values=-1)
    arrays = {"tokens": input_ids, "targets": targets, "segments": segments}
    return arrays | ({} if positions is None else {"positions": positions})


def _documents(positions: np.ndarray) -> np.ndarray:
    """Return the number of the document of each place, from 1: one begins where positions do not go on by 1."""
    steps = np.diff(positions.astype(np.int64), axis=1)
    return np.pad(np.cumsum(steps != 1, axis=1), ((0, 0), (1, 0))) + 1


class Loader(Callback):
    """Iterator of the batches of a run: the rows of a loader, again and again, as many as each step needs.

    As a callback of the run it learns the size of batches, and how many rows a resumed run has seen; these are left
    out, so the loader has to return the same rows each time.
    """

    def __init__(self, loader: Iterable[Mapping]):
        """Read the first batch; `length` is that of its rows."""
        batches = _endless(loader)
        first = next(batches)
        self.length, self._loader, self._first = first["tokens"].shape[1], loader, _summary([first])
        self._stages = None  # of the last run that read it
        self._rows = _rows(itertools.chain([first], batches))

    def on_start(self, job, record):
        """Leave out the rows of the steps before; a second run reads the loader from its beginning.

        Raises ConfigError if another process has other rows.
        """
        processes.check_same(self._first, "the first batch of their loaders")
        if self._stages is not None:
            check_repeats(self._loader, "the loader")
            self._rows = _rows(_endless(self._loader))
        self._stages = job.stages
        self._rows = itertools.islice(self._rows, record["examples"] if record else 0, None)

    def __iter__(self):
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """Return the next batch, of the present size; ConfigError outside a run, which sets the size."""
        if self._stages is None:
            raise ConfigError("a Loader gives batches only within a run: train.train(config, workdir, Loader(batches))")
        return _stacked(itertools.islice(self._rows, self._stages.rows))


class LoaderLoss(Evaluator):
    """The means of the objective's figures over all rows of a loader."""

    name = "eval_loader"

    def __init__(self, every: int, loader: Iterable[Mapping], *, ranks_checkpoints: bool = True):
        """Evaluate every `every` steps, 0 for never, and at the end; ConfigError if a second pass is not possible.

        In a run on a corpus, whose held-out loss ranks the checkpoints, this one must not; nor may two.
        """
        if every:
            check_repeats(loader, "eval_loader")
        self.every, self.loader, self.ranks_checkpoints = every, loader, ranks_checkpoints

    def evaluate(self, context):
        """Return the figures; ConfigError if there are no rows."""
        run = context.run
        batches = place(self._local(run), run.batch_sharding, run.eval_rows)
        sums = summed_figures(context, batches)
        if sums == {}:
            raise ConfigError("eval_loader has no batches")
        return sums and summary_of(run, sums)

    def lines(self, context, figures):
        return [f"eval_loader: loss {figures['loss']:.4f}"]

    def _local(self, run) -> Iterator[dict]:
        """Yield this process's rows of each batch; the last batch is filled with padding."""
        rows, own = _rows(map(as_ours, self.loader)), local_rows(run.batch_sharding, run.eval_rows)
        while part := _same_everywhere(list(itertools.islice(rows, run.eval_rows))):
            padding = [{name: np.zeros_like(row) for name, row in part[0].items()}] * (run.eval_rows - len(part))
            batch = _stacked([*part, *padding])
            length, most = batch["tokens"].shape[1], run.config.model.max_length
            if length > most:
                raise ConfigError(f"eval_loader has rows of {length} tokens, more than model.max_length={most}")
            check_ids(batch, run.config.model.vocab_size, "eval_loader")
            yield {name: array[own] for name, array in batch.items()}


def check_repeats(loader: Iterable[Mapping], name: str) -> None:
    """Raise ConfigError for an iterator, which a second loop would find empty."""
    if isinstance(loader, Iterator):
        raise ConfigError(f"{name} {ONCE}")


def _endless(loader: Iterable[Mapping]) -> Iterator[dict]:
    while True:
        num_rows = 0
        for batch in map(as_ours, loader):
            num_rows += len(batch["tokens"])
            yield batch
        if not num_rows:
            raise ConfigError(f"the loader has no rows, or {ONCE}")


def _rows(batches: Iterable[dict]) -> Iterator[dict]:
    return ({name: array[n] for name, array in batch.items()} for batch in batches for n in range(len(batch["tokens"])))


def _same_everywhere(rows: list[dict]) -> list[dict]:
    """Return the rows; ConfigError if another process has other ones: it would wait for those that one lacks."""
    processes.check_same(_summary(rows), "the rows of eval_loader")
    return rows


def _summary(arrays: list[dict]) -> dict[str, object]:
    """Return what tells one list of batches or rows from another."""
    return {"amount": len(arrays), "checksum": digest(*(one[name].tobytes() for one in arrays for name in NAMES))}


def _stacked(rows: Iterable[dict]) -> dict[str, np.ndarray]:
    rows = list(rows)
    if len(lengths := {len(row["tokens"]) for row in rows}) > 1:
        raise ConfigError(
            f"a loader has rows of {' and '.join(map(str, sorted(lengths)))} tokens; pad them to one length"
        )
    return {name: np.stack([row[name] for row in rows]) for name in NAMES}
