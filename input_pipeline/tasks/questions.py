# SPDX-License-Identifier: Apache-2.0
"""Questions with answers that can be checked, made at random by a generator of reasoning-gym, and their windows.

A question is a conversation: the user asks it, and the assistant answers. The package reasoning-gym is an extra, and is
imported here alone. A generator makes a question from its number, so that a number is enough to score an answer.
"""

import difflib
import functools
import json
import sys
import threading
from collections.abc import Iterator

import numpy as np

from input_pipeline.cache import digest_of_json
from input_pipeline.chat.encoding import IDS, LEARNED, ChatTokenizer, format_of_tokenizer
from input_pipeline.chat.messages import ASSISTANT
from input_pipeline.errors import DataError
from input_pipeline.order import mix
from input_pipeline.packing import KEYS, empty_rows, put_sequence
from input_pipeline.tasks.expressions import is_arithmetic, is_formula, is_list
from input_pipeline.tasks.generated import GeneratedRows
from input_pipeline.tasks.hashes import is_held_out
from input_pipeline.tokenization import open_tokenizer

HELDOUT_SHARE = 1 / 16  # of the questions
NUMBERS = 1 << 20  # of questions; some generators allocate a list of this length
FEWER = dict.fromkeys(("acre", "word_ladder"), 20_000)  # one makes all at once, the other allows no more
HASHED = (  # generators that draw from sets of texts, whose order differs between processes without PYTHONHASHSEED
    "intermediate_integration", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note",
    "word_ladder",
)  # fmt: skip
EVALUATED = {  # generators that evaluate an answer as Python, and which answers they are given
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), is_list),
    **dict.fromkeys(("countdown", "puzzle24"), is_arithmetic),
    **dict.fromkeys(("polynomial_multiplication", "simple_integration", "intermediate_integration"), is_formula),
}
MOST_DRAWS = 1000  # of questions in a row that are too long or belong to the other stream
SOURCES = "reasoning_gym", "reasoning_gym_rollouts"  # values of data.source
UNSCORABLE = ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError


class Generator:
    """A generator of reasoning-gym, with its default difficulty; it has the questions 0 to `size` - 1."""

    def __init__(self, name: str):
        """Make the generator; DataError if the package is missing, or has no generator of this name."""
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise DataError(
                "data.source=reasoning_gym needs the package reasoning-gym: run `make setup EXTRAS=reasoning`"
            ) from error
        if name not in DATASETS:
            near = ", ".join(difflib.get_close_matches(name, DATASETS, 3, 0.5)) or ", ".join(sorted(DATASETS))
            raise DataError(f"data.path={name!r} is not a generator of reasoning-gym; use one of {near}")
        if name in HASHED and sys.flags.hash_randomization:
            raise DataError(
                f"data.path={name} makes other questions in each process; set PYTHONHASHSEED=0 before Python starts"
            )
        self.size = FEWER.get(name, NUMBERS)
        try:
            self._made = reasoning_gym.create_dataset(name, seed=0, size=self.size)
        except AssertionError as error:
            raise DataError(f"data.path={name} is a generator that needs settings of its own: {error}") from error
        self._find = reasoning_gym.utils.extract_answer
        self._may_score = EVALUATED.get(name, lambda text: True)
        self._lock = threading.Lock()  # some generators draw from numpy's global state

    def entry(self, number: int) -> dict:
        """Return a question as the package has it: `question` and `answer`, and what scores an answer."""
        with self._lock:
            return self._made[number]

    def score(self, number: int, answer: str) -> float:
        """Return the package's score of an answer, from 0 to 1; 0 if the package fails on it.

        The text between <answer> and </answer> is scored; without these tags, the whole text. An answer that the
        package would run as a program has the score 0.
        """
        found = self._find(answer)
        text = answer.strip() if found is None else found
        if not self._may_score(text):
            return 0.0
        try:
            return float(self._made.score_answer(text, self.entry(number)))
        except UNSCORABLE:
            return 0.0


generator = functools.cache(Generator)


def is_heldout(question: str) -> bool:
    """Return whether a question is held out, by a hash of its text."""
    return is_held_out(question.encode(), HELDOUT_SHARE)


class QuestionWindows(GeneratedRows):
    """Rows of questions with their answers.

    Only answers are learned: other targets are IGNORED. No question of the training rows is held out. Questions that do
    not fit in a row are left out.
    """

    learns = True  # whether answers are learned, so that every question must have one

    def __init__(self, name: str, tokenizer: str, seed: int, stream: str):
        """Prepare the rows of a stream; `name` names the generator, and `tokenizer` is a value of data.tokenizer."""
        super().__init__(seed, stream)
        self.name = name
        self.tokenizer = open_tokenizer(tokenizer)
        self.vocab_size = self.tokenizer.vocab_size
        self.digest = digest_of_json(["reasoning_gym", name, self.tokenizer.digest, seed])
        self._generator, self._form = generator(name), format_of_tokenizer(self.tokenizer, tokenizer)
        self._chat = ChatTokenizer(self.tokenizer)

    def _sequences(self, key, length):
        left = length
        for _, tokens in self._questions(key, length):
            left -= len(tokens) - 1
            if left < 0:
                return
            yield tokens & IDS, tokens & LEARNED

    def _questions(self, key: int, length: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (number, marked tokens) of the questions of a row that belong to the stream and fit in a row."""
        vain = 0
        while True:
            (key,) = mix([key]).tolist()
            number = key % self._generator.size
            entry = self._generator.entry(number)
            if is_heldout(entry["question"]) == (self.stream == "heldout"):
                tokens = self._encoded(entry)
                if len(tokens) - 1 <= length:
                    vain = 0
                    yield number, tokens
                    continue
            vain += 1
            if vain == MOST_DRAWS:
                raise DataError(
                    f"data.path={self.name}: of {MOST_DRAWS:,} questions none is of the {self.stream} stream and fits "
                    f"in train.sequence_length={length} tokens; use longer rows or a generator with more questions"
                )

    def _encoded(self, entry: dict) -> np.ndarray:
        """Return the tokens of a question and its answer, with the marks of input_pipeline/chat/encoding.py."""
        if self.learns and entry["answer"] is None:
            raise DataError(
                f"data.path={self.name} has questions without an answer to learn; use --config.data.source={SOURCES[1]}"
            )
        said = [("user", entry["question"]), (ASSISTANT, str(entry["answer"]))]
        try:
            pieces = self._form.pieces([{"role": role, "content": content} for role, content in said])
        except ValueError as error:
            raise DataError(f"data.tokenizer: its chat template refuses a question: {error}") from None
        return self._chat.encode_batch([json.dumps([pieces])])[0]


class QuestionRollouts(QuestionWindows):
    """Rows of one question each for `train.objective=grpo`, which draws answers; `numbers` has the number of each."""

    fills = dict.fromkeys((*KEYS, "numbers"), 0)
    learns = False

    def read(self, indices: np.ndarray, sequence_length: int) -> dict[str, np.ndarray]:
        """Return the arrays of QuestionWindows, and `numbers`, int32 [len(indices)]."""
        batch = empty_rows(len(indices), sequence_length) | {"numbers": np.zeros(len(indices), np.int32)}
        for row, key in enumerate(self._keys(indices)):
            batch["numbers"][row], tokens = next(self._questions(key, sequence_length))
            put_sequence(batch, row, 0, 1, tokens & IDS, tokens & LEARNED)
        return batch
