# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: requests enter free rows of one key-value cache while other rows go on decoding.

    batch = Batch(engine, num_rows=32, vocab_size=tokenizer.vocab_size)  # in the run's mesh
    done = batch.run([Request(prompt, max_tokens=64) for prompt in prompts])

A batch has a cache of `num_rows` rows. The programs of inference/rows.py use it. `extend` has a program for each entry
of CHUNKS, and all but `decode` have two numbers of rows. `Batch.compile` compiles all of them.

A prompt that shares a prefix with a row computes only the rest: further samples of one prompt, the next turn of a
conversation, the branches of a search.

Letters: R rows of a chunk, T tokens of a chunk, V vocabulary.
"""

import array
import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Sequence

import jax
import numpy as np

from inference import rows
from inference.choice import Choice, Drawn, Sampling, choice_of
from inference.engine import NO_TOKEN, Engine
from layers.axes import bytes_of_device, mesh_axes, num_shards, platform

CHUNKS = (16, 64, 128, 192, 256, 512)  # tokens of a prompt that one call computes, with padding
SHARE_OF_COPY = 0.1  # of the memory of a GPU: what a second copy of the weights may take, also while a run trains
DECODE_EVERY = 4  # steps, while prompts are computed
CHUNK_ROWS = 8  # prompts that one call computes at most


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A prompt to continue.

    Attributes:
      prompt: token ids, at least one.
      max_tokens: most tokens of the continuation, at least 1.
      sampling: how they are drawn.
      ends: tokens that end the continuation; they are not part of it.
      first_V: bool [vocabulary], what the first token may be; None: any.
      wants_top: whether the likeliest tokens at each place are reported.
      redrawn: the last token of the text, which the prompt is without; if it is drawn first, it is not one of
        `max_tokens`.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    ends: Collection[int] = ()
    first_V: np.ndarray | None = None
    wants_top: bool = False
    redrawn: int | None = None

    @property
    def most(self) -> int:
        """The most tokens of the prompt and its continuation together."""
        return len(self.prompt) + (self.redrawn is not None) + self.max_tokens


@dataclasses.dataclass(eq=False)
class Continuation:
    """What a request has so far.

    Attributes:
      tokens: drawn so far.
      log_probs: of each by the model itself, before truncation, penalty, bias and the temperature of the draws.
      tops: for each place {token: log-probability} of the NUM_TOP likeliest, if the request asks for them.
      reason: why it ended: "end" for one of the ends, "length", or "cancelled"; "" while it goes on.
      end: the token that ended it, which `tokens` does not have; none for the other reasons.
      row: of the cache; None while it waits, and once it has ended.
      num_computed: tokens of the prompt that are in the cache.
    """

    request: Request
    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    tops: list[dict[int, float]] = dataclasses.field(default_factory=list)
    reason: str = ""
    end: tuple[int, ...] = ()
    row: int | None = None
    num_computed: int = 0

    @functools.cached_property
    def prompt_T(self) -> np.ndarray:
        """The prompt as int32 [tokens]."""
        return np.array(self.request.prompt, np.int32)

    @property
    def num_new(self) -> int:
        """The number of its tokens that are not the prompt's own."""
        return len(self.tokens) - (self.tokens[:1] == [self.request.redrawn])


class Batch:
    """Requests that are decoded together; needs a mesh in context.

    Attributes:
      num_prompt_tokens: computed so far, without padding.
      num_shared_tokens: of prompts, taken from other rows instead.
      waiting: continuations without a row.
    """

    def __init__(self, engine: Engine, *, num_rows: int, vocab_size: int):
        """Allocate the cache: `engine.length` tokens in each of `num_rows` rows.

        Args:
          num_rows: rounded up to a multiple of the mesh's batch shards.
          vocab_size: ids from here on are never drawn; nor are those that the model does not have.

        Raises ValueError if `num_rows` is below 1.
        """
        if num_rows < 1:
            raise ValueError(f"num_rows={num_rows} must be 1 or more")
        shards = num_shards(mesh_axes(("batch",))[0])
        num_rows = -(-num_rows // shards) * shards
        self._head_size = engine.head_size()
        self.length, self.num_rows, self.vocab_size = engine.length, num_rows, min(vocab_size, self._head_size)
        self.engine = with_padding(engine.separate_layers() if _separates(engine.params) else engine)
        self.waiting: collections.deque[Continuation] = collections.deque()
        self.num_prompt_tokens = self.num_shared_tokens = 0
        self._running: list[Continuation | None] = [None] * num_rows
        self._cached = [array.array("i") for _ in range(num_rows)]  # tokens of each row in the cache
        self._awaited: tuple[Continuation, Continuation, int] | None = None  # who waits, for whom, for how many tokens
        self._used = [0] * num_rows  # when each row was last given to a request
        self._clock = itertools.count(1)
        self._few, self._many = rows_of_chunks(num_rows)
        self._since_decoded = 0  # steps
        self._rows = rows.empty(self.engine, num_rows, self._head_size)

    def compile(self) -> None:
        """Compile every program, so that no request waits for it; no row changes."""
        smallest, *others = (size for size in CHUNKS if size <= self.engine.length)
        for num_rows in dict.fromkeys((self._few, self._many)):
            self._begin([], num_rows)
            self._draw_first([], self._extend([], num_rows, smallest))
            for size in others:  # not called, since a large chunk takes seconds on a CPU
                tokens_RT = np.full((num_rows, size), NO_TOKEN, np.int32)
                rows.extend.lower(self.engine, self._rows.cache, np.full(num_rows, self.num_rows), tokens_RT).compile()
        self._decode([])

    def add(self, request: Request) -> Continuation:
        """Queue a request; `step` gives it a row as soon as one is free.

        Raises:
          ValueError: prompt and continuation do not fit in the cache, no token is asked for, or the model does not have
            a token.
        """
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens={request.max_tokens} must be at least 1")
        if unknown := [token for token in request.prompt if not 0 <= token < self.vocab_size]:
            raise ValueError(f"the prompt has the token {unknown[0]}; the model has {self.vocab_size}")
        if request.most > self.length:
            raise ValueError(
                f"a prompt of {request.most - request.max_tokens} tokens and {request.max_tokens} more exceed the "
                f"{self.length} tokens of a row"
            )
        self.waiting.append(Continuation(request))
        return self.waiting[-1]

    def cancel(self, one: Continuation) -> None:
        """End a continuation and free its row, if it goes on."""
        if one in self.waiting:
            self.waiting.remove(one)
        if not one.reason:
            self._end(one, "cancelled")

    @property
    def running(self) -> list[Continuation]:
        """Continuations that have a row."""
        return [one for one in self._running if one]

    def run(self, requests: Sequence[Request]) -> list[Continuation]:
        """Decode requests to their ends; return their continuations in the same order."""
        added = [self.add(request) for request in requests]
        while not all(one.reason for one in added):
            self.step()
        return added

    def step(self) -> list[Continuation]:
        """Give rows to waiting requests, compute a part of some prompts, and decode a token of every other row.

        While more rows wait for their prompts than have them, most of the work of decoding would be wasted. Then
        only one step of DECODE_EVERY decodes. Return the continuations that have a new token or that ended.
        """
        self._admit()
        decoding = [one for one in self.running if one.tokens]
        self._since_decoded += 1
        decodes = decoding and (2 * len(decoding) >= len(self.running) or self._since_decoded >= DECODE_EVERY)
        self._since_decoded = 0 if decodes else self._since_decoded
        return self._compute_chunk() + (self._decode(decoding) if decodes else [])

    def _admit(self) -> None:
        """Give free rows to waiting requests, the longest waiting first."""
        free = {row for row, one in enumerate(self._running) if one is None}
        while group := self._next_group(free):
            self._begin(group, self._num_rows_of_call(len(group)))

    def _next_group(self, free: set[int]) -> list[tuple[Continuation, int]]:
        """Return (continuation, row that shares most of its prompt) for the next requests that get a row.

        A group is copied at once, so a row that one of them takes may be what another copies.
        """
        group = []
        while free and self.waiting and len(group) < self._many:
            if self._still_awaits(self.waiting[0]):
                break
            prefix = self.waiting[0].prompt_T[:-1]  # the last token is computed, for the logits after it
            shared = [_common_prefix(np.asarray(tokens), prefix) for tokens in self._cached]
            computing, soon = self._soon_shared(prefix)
            if soon > max(shared):
                self._awaited = self.waiting[0], computing, soon
                break
            source = max(range(self.num_rows), key=lambda row: (shared[row], row in free))
            one = self.waiting.popleft()
            one.row = source if source in free and shared[source] else min(free, key=self._used.__getitem__)
            one.num_computed = shared[source]
            self._running[one.row], self._used[one.row] = one, next(self._clock)
            free.discard(one.row)
            group.append((one, source))
        return group

    def _still_awaits(self, one: Continuation) -> bool:
        """Return whether what a continuation was found to wait for is not computed yet; no prompt is compared."""
        if self._awaited is None or self._awaited[0] is not one:
            return False
        _, computing, soon = self._awaited
        return computing.row is not None and computing.num_computed < soon

    def _soon_shared(self, prefix: np.ndarray) -> tuple[Continuation | None, int]:
        """Return whose prompt, of those being computed, has most tokens of a prefix, and how many; 0 if few."""
        computing = [(one, _common_prefix(one.prompt_T, prefix)) for one in self.running if not one.tokens]
        most = max(computing, key=lambda pair: (pair[1], pair[0].num_computed), default=(None, 0))
        return most if most[1] >= CHUNKS[0] else (None, 0)

    def _begin(self, admitted: list[tuple[Continuation, int]], num_rows: int) -> None:
        """Copy the shared tokens into the rows of new continuations, by the program of `num_rows` rows."""
        row_R, shape = np.full(num_rows, self.num_rows), (num_rows, self._head_size)
        sources, kept = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        seen, bias = np.zeros(shape, bool), np.full(shape, -np.inf, np.float32)
        bias[:, : self.vocab_size] = 0
        for index, (one, source) in enumerate(admitted):
            row_R[index], sources[index], kept[index] = one.row, source, one.num_computed
            seen[index, list(one.request.prompt)] = True
            for token, added in one.request.sampling.logit_bias.items():
                bias[index, token] += added
        self._rows = rows.copy(self.engine, self._rows, row_R, sources, kept, seen, bias)
        tokens = [self._cached[source][: one.num_computed] for one, source in admitted]
        for (one, _), cached in zip(admitted, tokens, strict=True):
            self._cached[one.row] = cached
            self.num_shared_tokens += len(cached)

    def _compute_chunk(self) -> list[Continuation]:
        """Compute a part of some prompts, of the longest waiting one at least; return those with a first token."""
        unfinished = sorted((one for one in self.running if not one.tokens), key=lambda one: self._used[one.row])
        if not unfinished:
            return []
        leader = unfinished[0]
        size = self._chunk_size(_remaining(leader), leader.num_computed)
        others = [one for one in unfinished[1:] if one.num_computed + size <= self.engine.length]
        others.sort(key=lambda one: (_remaining(one) > size, -_remaining(one)))
        chosen = [leader, *others][: self._many]
        logits_RV = self._extend(chosen, self._num_rows_of_call(len(chosen)), size)
        complete = [(index, one) for index, one in enumerate(chosen) if not _remaining(one)]
        if complete:
            self._draw_first(complete, logits_RV)
        return [one for _, one in complete]

    def _extend(self, chosen: list[Continuation], num_rows: int, size: int) -> jax.Array:
        """Compute up to `size` tokens of prompts by the program of `num_rows` rows; return logits [R, V] after them."""
        row_R, tokens_RT = np.full(num_rows, self.num_rows), np.full((num_rows, size), NO_TOKEN, np.int32)
        for index, one in enumerate(chosen):
            part = list(one.request.prompt[one.num_computed : one.num_computed + size])
            row_R[index], tokens_RT[index, : len(part)] = one.row, part
            one.num_computed += len(part)
            self.num_prompt_tokens += len(part)
            self._cached[one.row].extend(part)
        cache, logits_RV = rows.extend(self.engine, self._rows.cache, row_R, tokens_RT)
        self._rows = self._rows._replace(cache=cache)
        return logits_RV

    def _draw_first(self, complete: list[tuple[int, Continuation]], logits_RV: jax.Array) -> None:
        """Draw the first tokens of continuations, from the logits at their indices."""
        num_rows = len(logits_RV)
        row_R, first_RV = np.full(num_rows, self.num_rows), np.ones((num_rows, self._head_size), bool)
        by_row: list[Continuation | None] = [None] * num_rows
        for index, one in complete:
            row_R[index], by_row[index] = one.row, one
            if one.request.first_V is not None:
                first_V = one.request.first_V[: self._head_size]
                first_RV[index] = np.pad(first_V, (0, self._head_size - len(first_V)))
        past, drawn = rows.draw_first(self._rows.past, row_R, logits_RV, first_RV, *self._how(by_row))
        self._rows = self._rows._replace(past=past)
        self._append(complete, drawn)

    def _num_rows_of_call(self, count: int) -> int:
        """Return the rows of the program that computes `count` rows."""
        return self._few if count <= self._few else self._many

    def _chunk_size(self, remaining: int, num_computed: int) -> int:
        """Return the smallest chunk that holds the remaining tokens, or the largest that fits in the row."""
        fitting = [size for size in CHUNKS if num_computed + size <= self.engine.length]
        return next((size for size in fitting if size >= remaining), fitting[-1])

    def _decode(self, decoding: list[Continuation]) -> list[Continuation]:
        """Draw a token of each of these rows."""
        is_active = np.zeros(self.num_rows, bool)
        by_row: list[Continuation | None] = [None] * self.num_rows
        for one in decoding:
            is_active[one.row], by_row[one.row] = True, one
            self._cached[one.row].append(one.tokens[-1])
        self._rows, drawn = rows.decode(self.engine, self._rows, is_active, *self._how(by_row))
        self._append([(one.row, one) for one in decoding], drawn)
        return decoding

    def _how(self, ones: Sequence[Continuation | None]) -> tuple[Choice, np.ndarray]:
        """Return how the tokens of rows are drawn, and whether a request wants the likeliest tokens."""
        greedy = Sampling(temperature=0.0), 0
        draws = [(one.request.sampling, len(one.tokens)) if one else greedy for one in ones]
        wants_top = any(one.request.wants_top for one in ones if one)
        return choice_of(draws), np.array(wants_top)

    def _append(self, complete: list[tuple[int, Continuation]], drawn: Drawn) -> None:
        """Give each continuation the token that was drawn in a row; end it there if it must."""
        drawn = Drawn(*(np.asarray(jax.device_get(leaf)) for leaf in drawn))
        for index, one in complete:
            token = int(drawn.token_B[index])
            if token in one.request.ends:
                one.end = (token,)
                self._end(one, "end")
                continue
            one.tokens.append(token)
            one.log_probs.append(float(drawn.log_prob_B[index]))
            if one.request.wants_top:
                top = zip(drawn.top_tokens_BK[index].tolist(), drawn.top_log_probs_BK[index].tolist(), strict=True)
                one.tops.append({token: log_prob for token, log_prob in top if log_prob > -math.inf})
            if one.num_new == one.request.max_tokens:
                self._end(one, "length")

    def _end(self, one: Continuation, reason: str) -> None:
        one.reason = reason
        if one.row is not None:
            self._running[one.row] = None
            one.row = None


def _separates(params: dict) -> bool:
    """Return whether a batch gives each layer weights of its own: on CPUs, and on a GPU that has room for the copy.

    Several processes, which might find different room, must run the same programs.
    """
    if platform() != "gpu" or jax.process_count() > 1:
        return platform() == "cpu"
    memory = jax.local_devices()[0].memory_stats() or {}
    return bytes_of_device(params) <= SHARE_OF_COPY * memory.get("bytes_limit", 0)


def with_padding(engine: Engine) -> Engine:
    """Return an engine whose cache also has room for the padding of a chunk."""
    return dataclasses.replace(engine, length=engine.length + CHUNKS[0])


def rows_of_chunks(num_rows: int) -> tuple[int, int]:
    """Return the two numbers of rows that a chunk may have, for a batch of `num_rows`."""
    shards = num_shards(mesh_axes(("batch",))[0])
    return shards, max(shards, min(CHUNK_ROWS, num_rows) // shards * shards)


def _remaining(one: Continuation) -> int:
    """Return the tokens of a prompt that are not in the cache."""
    return len(one.request.prompt) - one.num_computed


def _common_prefix(first_T: np.ndarray, second_T: np.ndarray) -> int:
    """Return the number of equal tokens at the start."""
    length = min(len(first_T), len(second_T))
    differs_T = first_T[:length] != second_T[:length]
    return int(differs_T.argmax()) if differs_T.any() else length
