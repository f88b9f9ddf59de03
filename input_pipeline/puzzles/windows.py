# SPDX-License-Identifier: Apache-2.0
"""Window sources of a puzzle data set: a window is an example, with its index on disk as its number."""

from functools import cached_property, lru_cache
from types import MappingProxyType

import numpy as np

from input_pipeline.errors import DataError
from input_pipeline.order import MASK, mix, permute
from input_pipeline.puzzles.arc import TaskInFile, grid_of
from input_pipeline.puzzles.dataset import Split, read_json
from input_pipeline.windows import Windows

IGNORED = -100  # a label with weight 0
KEPT_EPOCHS = 16  # epochs whose layout is cached; a batch spans fewer


class PuzzleWindows(Windows):
    """All examples of a split, each once per epoch in stored order; held-out examples are read like this.

    Attributes:
        vocab_size: number of tokens, including padding (0).
        seq_len: cells of an example.
        num_identifiers: rows of the table of puzzle embeddings, including the blank 0.
        folder: of the data set; `digest` covers all its splits.
        num_groups, num_documents (puzzles), num_tokens (cells of a pass).
    """

    fills = MappingProxyType({"inputs": 0, "labels": IGNORED, "puzzle_identifiers": 0})
    batch_exceeds_pass = True

    def __init__(self, split: Split, digest: str):
        self._split, self.digest, self.folder = split, digest, split.folder
        self.vocab_size, self.seq_len = split.metadata["vocab_size"], split.metadata["seq_len"]
        self.num_identifiers = split.metadata["num_puzzle_identifiers"]
        self.num_groups, self.num_documents = len(split.groups) - 1, len(split.identifiers)
        self.num_tokens = self._pass_examples() * self.seq_len
        self.fills = self.fills | {
            "inputs": split.metadata["pad_id"],
            "puzzle_identifiers": split.metadata["blank_identifier_id"],
        }

    @cached_property
    def identifiers(self) -> list[str]:
        """The names of identifiers; ARC has a million. DataError if the file has fewer than the data set."""
        path = self.folder / "identifiers.json"
        names = read_json(path, list[str])
        if len(names) < self.num_identifiers:
            raise DataError(
                f"{path}: has {len(names):,} names for {self.num_identifiers:,} identifiers; build it again"
            )
        return names

    @cached_property
    def test_puzzles(self) -> dict:
        """The held-out ARC tasks by name: {"train": pairs, "test": pairs} of {"input": rows, "output": rows}.

        An output may be missing or empty. Raises DataError if a grid of a test pair is not a rectangle of colours.
        """
        path = self.folder / "test_puzzles.json"
        found = read_json(path, dict[str, TaskInFile]) if path.exists() else {}
        for name, task in found.items():
            for grid in (grid for pair in task["test"] for grid in pair.values() if grid):
                grid_of(f"{path}: task {name:.80}", grid)
        return found

    def num_examples(self, sequence_length: int) -> int:
        """Return how many examples an epoch has; DataError if sequence_length is not that of the examples."""
        if sequence_length != self.seq_len:
            raise DataError(
                f"train.sequence_length={sequence_length} is not the {self.seq_len} cells of the puzzles in "
                f"{self.folder}; use --config.train.sequence_length={self.seq_len}"
            )
        return self._pass_examples()

    def read(self, indices: np.ndarray, sequence_length: int) -> dict[str, np.ndarray]:
        """Return int32 `inputs` and `labels` [n, seq_len], and `puzzle_identifiers` [n].

        Where there is no label, it is IGNORED. Raises DataError if an example has a token outside the vocabulary.
        """
        indices, split = np.asarray(indices, np.int64), self._split
        # 64 bits, until no token is beyond the vocabulary: a file may have tokens that 32 do not hold.
        inputs, labels = (np.asarray(array[indices], np.int64) for array in (split.inputs, split.labels))
        ignored = split.metadata["ignore_label_id"]
        if ignored is not None:
            labels[labels == ignored] = IGNORED
        for tokens in (inputs, labels[labels != IGNORED]):
            wrong = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
            if wrong.size:
                raise DataError(
                    f"{self.folder}: has the token {wrong[0]}, but vocab_size={self.vocab_size}; build it again"
                )
        identifiers = split.identifiers[self._puzzles(indices)].astype(np.int32)
        tokens = {"inputs": inputs.astype(np.int32), "labels": labels.astype(np.int32)}
        return tokens | {"puzzle_identifiers": identifiers}

    def document_name(self, document: int) -> str:
        """Return a window's group, puzzle in the group and example in the puzzle, and the puzzle's name."""
        puzzle = int(self._puzzles(np.array([document]))[0])
        group = int(np.searchsorted(self._split.groups, puzzle, side="right")) - 1
        place = f"group {group}, puzzle {puzzle - self._split.groups[group]}"
        example = f"example {document - self._split.puzzles[puzzle]}"
        identifier = int(self._split.identifiers[puzzle])
        blank = identifier == self._split.metadata["blank_identifier_id"]
        return f"{place}, {example}" if blank else f"{place}, {example} ({self.identifiers[identifier]})"

    def _puzzles(self, examples: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._split.puzzles, examples, side="right") - 1

    def _pass_examples(self) -> int:
        return len(self._split.inputs)


class PuzzleEpochs(PuzzleWindows):
    """Training examples: an epoch visits every group once, and each epoch has its own order.

    One puzzle of each group is drawn, and its examples come in order. Their number is that of the largest puzzle of the
    group; a smaller puzzle repeats its first examples. The example with a given number is a pure function of the seed
    and that number.
    """

    def __init__(self, split: Split, digest: str):
        sizes = np.diff(split.puzzles)
        self._sizes = np.maximum.reduceat(sizes, split.groups[:-1])  # of each group
        self._epoch = lru_cache(KEPT_EPOCHS)(self._layout)
        super().__init__(split, digest)

    def order(self, indices: np.ndarray, sequence_length: int, seed: int) -> np.ndarray:
        """Return the stored example for each number in `indices`: int64 of the same shape."""
        epochs, places = np.divmod(np.asarray(indices, np.int64), self.num_examples(sequence_length))
        examples = np.zeros_like(places)
        for epoch in np.unique(epochs).tolist():
            rows = epochs == epoch
            examples[rows] = self._examples(epoch, places[rows], seed)
        return examples

    def _examples(self, epoch: int, places: np.ndarray, seed: int) -> np.ndarray:
        groups, ends, key = self._epoch(epoch, seed)
        visits = np.searchsorted(ends, places, side="right")
        group = groups[visits]
        nth = places - ends[visits] + self._sizes[group]
        first, last = self._split.groups[group], self._split.groups[group + 1]
        puzzle = first + (mix(key ^ group.astype(np.uint64)) % (last - first).astype(np.uint64)).astype(np.int64)
        begin, end = self._split.puzzles[puzzle], self._split.puzzles[puzzle + 1]
        return begin + nth % (end - begin)

    def _layout(self, epoch: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (the groups of an epoch in order, the place after each one's examples, the key of its draws)."""
        order, draws = mix(mix(mix(seed & MASK) + np.uint64(epoch)) ^ np.arange(2, dtype=np.uint64))
        groups = permute(np.arange(self.num_groups), self.num_groups, order)
        return groups, np.cumsum(self._sizes[groups]), draws

    def _pass_examples(self) -> int:
        return int(self._sizes.sum())
