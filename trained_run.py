# SPDX-License-Identifier: Apache-2.0
"""Opens a trained model for use from Python; see docs/python.md.

from trained_run import open_run
run = open_run("runs/tiny")
print(run.step, run.generate(["def "])[0])
"""

import functools
import numbers
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpointing.bucket import path_of
from checkpointing.checkpoints import Checkpoints
from checkpointing.source_run import newest_checkpoint, restore_eval_params
from configs.base import BUILT_IN_TOKENIZERS
from configs.errors import ConfigError
from core import assembly, solving
from core.evaluators import engine_of
from files.paths import expanded
from inference import sampling
from inference.prompts import text_prompt, text_start
from input_pipeline import tokenization
from parallelism.mesh import mesh_context
from reasoning.solving import Solved
from reporting.metrics import read_lines, steps_of
from settings import stored_config, validation
from settings.decoding import dropless
from settings.together import TASKS

KINDS = ("train", "eval", "event")  # of lines of metrics.jsonl that any run may have
NOT_OF_TEXT = ("recursive", "classification")  # objectives of other models than language models
SURROGATE = re.compile("[\ud800-\udfff]")


def open_run(workdir: str | pathlib.Path) -> "TrainedRun":
    """Return the run in a folder, with its newest valid checkpoint on the first device.

    Raises:
      ConfigError: there is no run in the folder, it is not local, or its configuration is damaged.
      CheckpointError: it has no valid checkpoint.
    """
    if "://" in str(workdir):
        raise ConfigError(f"{workdir}: only a local folder can be opened; copy the run, or use `generate.py --workdir`")
    folder = expanded(workdir)
    loaded = stored_config.load_to_read(folder, {})
    validation.validate(loaded.config, 1, loaded)
    data = loaded.config.data
    if data.tokenizer not in (*BUILT_IN_TOKENIZERS, ""):
        data.tokenizer = os.path.abspath(data.tokenizer)  # it is read when it is needed, maybe after os.chdir
    return TrainedRun(folder, loaded.config)


def tokenizer_of(address, config) -> tokenization.AnyTokenizer:
    """Return the tokenizer of a run; ConfigError if it was not trained on text."""
    if config.data.source in ("synthetic", "labeled", *TASKS) or config.train.objective in NOT_OF_TEXT:
        raise ConfigError(f"{address} was not trained on text, so it has no tokenizer")
    return tokenization.open_tokenizer(config.data.tokenizer)


class TrainedRun:
    """A run's model with the parameters for evaluation.

    Attributes:
      address: of the run's folder, local or in a bucket.
      config: of the run.
      step: of the checkpoint; a finished run has `config.train.steps`.
      run: see `assembly.Run`.
      params: tree of parameters.
    """

    def __init__(self, address, config, devices: Sequence[jax.Device] | None = None):
        """Restore the newest valid checkpoint of a run with this validated configuration; by default on one device."""
        self.address, self.config = address, config
        self._folder = str(address) if "://" in str(address) else os.path.abspath(address)
        self.run = assembly.assemble(dropless(config), devices=devices or jax.devices()[:1])
        with mesh_context(self.run.mesh), Checkpoints(address) as checkpoints:
            self.step = newest_checkpoint(checkpoints, config)
            self.params = restore_eval_params(checkpoints, self.step, self.run.abstract_params)

    @functools.cached_property
    def tokenizer(self) -> tokenization.AnyTokenizer:
        """The run's tokenizer; ConfigError if it was not trained on text."""
        return tokenizer_of(self.address, self.config)

    @functools.cached_property
    def text_start(self) -> list[int]:
        """The tokens before a text, see inference/prompts.py."""
        return text_start(self.tokenizer, self.config, is_trained=self.step > 0)  # an import is step 0

    def describe(self) -> str:
        """Return a text with the run, the step, and whether the run has finished."""
        steps = self.config.train.steps
        if self.step == 0:
            return f"{self.address}, imported weights"
        return f"{self.address} at step {self.step:,}" + ("" if self.step == steps else f" of {steps:,}, not finished")

    def logits(self, tokens_BT: np.ndarray) -> np.ndarray:
        """Return float32 logits [B, T, V] of tokens, each row one document.

        Raises:
          ValueError: the tokens are not whole numbers below the vocabulary's size in two dimensions, or rows of more
            than `model.max_length`.
          ConfigError: the run is not a language model.
        """
        if self.config.train.objective in NOT_OF_TEXT:
            raise ConfigError(f"{self.address} is not a language model, so it has no logits of tokens")
        tokens_BT, most = _array(tokens_BT), self.config.model.vocab_size
        if not tokens_BT.size:
            tokens_BT = tokens_BT.astype(np.int32)  # numpy takes an empty list for float64
        if tokens_BT.ndim != 2 or not np.issubdtype(tokens_BT.dtype, np.integer):
            raise ValueError(f"tokens are {tokens_BT.dtype} {list(tokens_BT.shape)}; give whole numbers [rows, length]")
        if tokens_BT.size and not 0 <= tokens_BT.min() <= tokens_BT.max() < most:
            raise ValueError(f"tokens are {tokens_BT.min()} to {tokens_BT.max()}; the vocabulary has 0 to {most - 1}")
        B, T = tokens_BT.shape
        if self.config.model.max_length < T:
            raise ValueError(f"rows of {T} tokens are longer than model.max_length={self.config.model.max_length}")
        positions_BT = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
        with mesh_context(self.run.mesh):
            found = _logits(self.run.graph, self.params, np.asarray(tokens_BT, np.int32), positions_BT)
        return np.asarray(found)

    def generate(
        self, prompts: list[str], *, max_tokens: int | None = None, temperature: float = 0.7, **how
    ) -> list[str]:
        """Return each prompt with its continuation; `how` are top_k, top_p and seed, see inference/choice.py.

        Without `max_tokens`, a continuation has as many tokens as fit, at most 64.

        Raises:
          ValueError: `prompts` is a single text, or a value is out of its range, as the flags of generate.py say.
        """
        prompts, how = checked(prompts), _numbers(max_tokens=max_tokens, temperature=temperature, **how)
        with mesh_context(self.run.mesh):
            return sampling.continue_texts(self.run, self.params, self.tokenizer, prompts, start=self.text_start, **how)

    def answer(
        self, messages: list[str], *, max_tokens: int | None = None, temperature: float = 0.7, **how
    ) -> list[str]:
        """Return the answer to each message; ConfigError if the model never saw a conversation.

        Raises:
          ValueError: as `generate`.
        """
        messages, how = checked(messages), _numbers(max_tokens=max_tokens, temperature=temperature, **how)
        sampling.check_answers(self.config, self.tokenizer, self.address)
        with mesh_context(self.run.mesh):
            return sampling.answers(self.run, self.params, self.tokenizer, messages, **how)

    def solve(self, problems: list[str], seed: int = 0) -> list[Solved]:
        """Search for the answer to each problem, as the keys of `config.tot` say; ConfigError for a wrong problem.

        Raises:
          ValueError: as `generate`.
        """
        problems = checked(problems)
        solving.check(self.config, problems, "")
        with mesh_context(self.run.mesh):
            return solving.solve(engine_of(self.run, self.params), self.config, problems, seed)[0]

    def stream(
        self, prompt: str = "", *, message: str | None = None, max_tokens: int | None = None, temperature: float = 0.7,
        **how,
    ) -> Iterator[str]:  # fmt: skip
        """Yield the text of `generate` for a prompt, or of `answer` for a message, in parts while it is decoded."""
        checked([prompt if message is None else message])
        how = _numbers(max_tokens=max_tokens, temperature=temperature, **how)
        if message is None:
            asked = text_prompt(self.tokenizer, prompt, self.text_start)
        else:
            sampling.check_answers(self.config, self.tokenizer, self.address)
            asked = sampling.message_prompt(self.tokenizer, self.config, message)
        parts = sampling.stream(self.run, self.params, self.tokenizer, asked, **how)
        while True:
            with mesh_context(self.run.mesh):  # not while the caller uses a part
                part = next(parts, None)
            if part is None:
                return
            yield part

    def metrics(self, kind: str = "train") -> list[dict]:
        """Return the lines of metrics.jsonl of a kind, the last of each step, in order.

        Raises ValueError for a kind that this run has no lines of, unless any run may have them.
        """
        path = path_of(self._folder) / "metrics.jsonl"
        lines = read_lines(path) if path.is_file() else []  # an import has none
        found = steps_of(lines, kind)
        if not found and kind not in KINDS:
            kinds = ", ".join(sorted({line["kind"] for line in lines})) or "none"
            raise ValueError(f"{self.address}/metrics.jsonl has no lines of the kind {kind!r}; it has {kinds}")
        return found


LIMITS = {  # of what generate.py has as flags: kind, least, most
    "max_tokens": (numbers.Integral, 1, 2**31 - 1), "temperature": (numbers.Real, 0, 1e30),
    "top_k": (numbers.Integral, 0, 2**31 - 1), "top_p": (numbers.Real, 0, 1),
    "seed": (numbers.Integral, -(2**63), 2**63 - 1),
}  # fmt: skip


def checked(texts: Iterable[str]) -> list[str]:
    """Return the texts as a list; ValueError if there are others than texts that can be tokenized."""
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise ValueError(f"{str(texts)[:40]!r} is one text; give a list of texts")
    texts = list(texts)
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise ValueError(f"{type(wrong[0]).__name__} is not a text; give str")
    if wrong := [text for text in texts if SURROGATE.search(text)]:
        raise ValueError(f"{wrong[0]!r:.60} has an unpaired surrogate, which no tokenizer can read")
    return texts


def _array(tokens) -> np.ndarray:
    try:
        return np.asarray(tokens)
    except ValueError:
        raise ValueError("tokens have rows of different lengths; give whole numbers [rows, length]") from None


def _numbers(**how) -> dict:
    """Return the arguments as numbers of Python; ValueError for what the flags of generate.py refuse."""
    how = {name: value.item() if isinstance(value, np.generic) else value for name, value in how.items()}  # no overflow
    for name, value in how.items():
        if name not in LIMITS:
            raise ValueError(f"{name} is not one of the arguments, which are {', '.join(LIMITS)}")
        kind, least, most = LIMITS[name]
        is_right = isinstance(value, kind) and not isinstance(value, bool) and least <= value <= most
        if not is_right and (name, value) != ("max_tokens", None):
            what = "a whole number" if kind is numbers.Integral else "a number"
            raise ValueError(f"{name}={value!r} must be {what} from {least} to {most}")
    return how


@functools.partial(jax.jit, static_argnums=0)
def _logits(graph: nnx.GraphDef, params: dict, tokens_BT, positions_BT) -> jax.Array:
    model = nnx.merge(graph, params)
    stream_BTD, _ = model(tokens_BT, positions_BT, jnp.ones_like(tokens_BT))
    return model.logits(stream_BTD)
