# SPDX-License-Identifier: Apache-2.0
"""How fast does the engine decode a batch, against one row, no cache, and transformers' `generate`?

A model of 6 layers and 256 wide continues 32 prompts of 16 to 256 tokens by 64 tokens each, greedily, on this machine.
All ways have the same float32 weights and prompts, take turns, and count their prefill. The median of the rounds
counts, since other work on the machine slows some of them. Without a cache, a text goes through the model for every
token, padded to a multiple of BUCKET that holds its final length; UNCACHED prompts are timed in this way. transformers
runs where torch is installed (make setup EXTRAS=interop). Gate: all ways have the same tokens.

Then `tiny` is trained for some steps, and its held-out loss computed with cached keys and values as they are, and
rounded to int8.
"""

import functools
import importlib.util
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import support

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from configs import base
from core.evaluation import heldout_batches
from inference import rows
from inference.batching import Batch, Request
from inference.choice import Sampling
from inference.engine import CACHE_TYPES, Engine
from input_pipeline.corpus import prepare_to_evaluate
from migration import hugging_face_families as families
from migration.hugging_face import tensors_of
from models import decoder_lm
from parallelism.mesh import make_mesh, mesh_context
from trained_run import open_run

VOCAB, ROWS, NEW_TOKENS, LENGTH = 8192, 32, 64, 320
NUM_PROMPTS, ROUNDS = (4, 1) if support.QUICK else (32, 5)
UNCACHED, BUCKET = 4, 64
SHARED_PROMPT, SAMPLES = 512, 16
STEPS = 20 if support.QUICK else 60


def model_config():
    """Return the `model` section; its shape is one of the Llama family."""
    config = base.get_config().model
    config.update(
        num_layers=6, embed_dim=256, num_heads=8, num_kv_heads=8, head_dim=32, mlp_dim=1024, vocab_size=VOCAB,
        max_length=1024, dtype="float32", tie_embeddings=False, embed_scale=1.0,
    )  # fmt: skip
    return config


def random_model() -> tuple[nnx.GraphDef, nnx.State]:
    """Return the graph and the parameters of a model that was not trained."""
    return nnx.split(decoder_lm.make(model_config(), dtype=jnp.float32, scan=False, rngs=nnx.Rngs(0)))


def requests_for(prompts: list[list[int]]) -> list[Request]:
    """Return greedy requests."""
    return [Request(prompt, NEW_TOKENS, Sampling(temperature=0.0)) for prompt in prompts]


def by_engine(engine: Engine, num_rows: int) -> Callable[[list], list]:
    """Return a function from prompts to continuations by a batch of this many rows."""

    def run(prompts):
        batch = Batch(engine, num_rows=num_rows, vocab_size=VOCAB)
        return [one.tokens for one in batch.run(requests_for(prompts))]

    return run


def padded_length(size: int) -> int:
    """Return the length to which the text of a prompt of `size` tokens is padded."""
    return math.ceil((size + NEW_TOKENS) / BUCKET) * BUCKET


def without_cache(engine: Engine) -> Callable[[list], list]:
    """Return a function from prompts to continuations, one after the other, by full forward passes."""

    @jax.jit
    def next_token(params, tokens_1T, length):
        model = nnx.merge(engine.graph, params)
        places_1T = jnp.arange(tokens_1T.shape[1])[None]
        stream_1TD, _ = model(tokens_1T, places_1T, (places_1T < length).astype(jnp.int32))
        return jnp.argmax(model.logits(jax.lax.dynamic_slice_in_dim(stream_1TD, length - 1, 1, axis=1)))

    def run(prompts):
        continuations = []
        for prompt in prompts:
            text = list(prompt)
            length = padded_length(len(prompt))
            for _ in range(NEW_TOKENS):
                padded = np.zeros((1, length), np.int32)
                padded[0, : len(text)] = text
                text.append(int(next_token(engine.params, padded, len(text))))
            continuations.append(text[len(prompt) :])
        return continuations

    return run


def by_transformers(engine: Engine) -> Callable[[list], list]:
    """Return a function from prompts to continuations by `generate` on one padded batch."""
    import torch
    import transformers

    values = families.config_json(dict(model_config()))
    arrays = {".".join(path): np.asarray(leaf) for path, leaf in flatten_dict(engine.params).items()}
    weights = {}
    for tensor in tensors_of(families.family_of(values), engine.params):
        rows = [tensor.to_rows(arrays[tensor.ours][where]) * tensor.factor for where, _, _ in tensor.blocks()]
        weights[tensor.name] = torch.tensor(np.concatenate(rows).reshape(tensor.shape))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**values)).eval()
    model.load_state_dict(weights)

    def run(prompts):
        longest = max(map(len, prompts))
        tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            text = model.generate(
                tokens, attention_mask=mask, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
                pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
        return text[:, longest:].tolist()

    return run


def shared_prefix_saving(engine: Engine) -> float:
    """Return how many times fewer tokens of a prompt are computed, when many samples share it."""
    prompt = np.random.default_rng(1).integers(1, VOCAB, SHARED_PROMPT).tolist()
    batch = Batch(Engine(engine.graph, engine.params, 2 * SHARED_PROMPT), num_rows=SAMPLES, vocab_size=VOCAB)
    batch.run([Request(prompt, 2, Sampling(seed=seed)) for seed in range(SAMPLES)])
    return SAMPLES * SHARED_PROMPT / batch.num_prompt_tokens


def heldout_losses() -> dict[str, float]:
    """Return nats per token of held-out text by the type of the cache, through which all keys and values go."""
    with tempfile.TemporaryDirectory() as workdir:
        support.train(support.QUIET | {"train.steps": STEPS}, workdir=workdir)
        trained = open_run(workdir)
        corpus = prepare_to_evaluate(trained.config.data, vocab_size=trained.config.model.vocab_size)

    @functools.partial(jax.jit, static_argnums=2)
    def summed_loss(params, batch, cache_dtype):
        model = nnx.merge(trained.run.graph, params)
        cache = model.empty_cache(*batch["tokens"].shape, CACHE_TYPES[cache_dtype])
        stream_BTD, _ = model(batch["tokens"], batch["positions"], batch["segments"], cache)
        log_probs_BTV = jax.nn.log_softmax(model.logits(stream_BTD))
        chosen_BT = jnp.take_along_axis(log_probs_BTV, jnp.maximum(batch["targets"], 0)[..., None], axis=-1)[..., 0]
        is_target_BT = batch["targets"] >= 0
        return -jnp.sum(jnp.where(is_target_BT, chosen_BT, 0)), jnp.sum(is_target_BT)

    sums = dict.fromkeys(CACHE_TYPES, 0.0)
    with mesh_context(trained.run.mesh):
        for batch in heldout_batches(trained.run, corpus, 2):
            sums = {name: sums[name] + np.array(summed_loss(trained.params, batch, name), float) for name in sums}
    return {f"heldout_loss_{name}_cache": round(float(total / count), 5) for name, (total, count) in sums.items()}


def main() -> None:
    """Time each way in turn, and print."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, VOCAB, rng.integers(16, 257)).tolist() for _ in range(NUM_PROMPTS)]
    with mesh_context(make_mesh(dict.fromkeys(base.MESH_AXES, 1), jax.devices()[:1])):
        graph, params = jax.jit(random_model)()
        engine = Engine(graph, nnx.to_pure_dict(params), LENGTH)
        ways = {"batched": by_engine(engine, ROWS), "cached": by_engine(engine, 1), "uncached": without_cache(engine)}
        if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
            ways["transformers"] = by_transformers(engine)
        rounds, texts = {name: [] for name in ways}, {}
        given = {name: prompts[:UNCACHED] if name == "uncached" else prompts for name in ways}
        for name, way in ways.items():
            way(given[name])  # compile
        compilations = sum(program._cache_size() for program in (rows.decode, rows.extend, rows.copy, rows.draw_first))
        for number in range(ROUNDS):
            for name, way in ways.items():
                start = time.perf_counter()
                texts[name] = way(given[name])
                rounds[name].append(len(given[name]) * NEW_TOKENS / (time.perf_counter() - start))
                print(f"round {number + 1}: {name} {rounds[name][-1]:,.0f} tokens/s", flush=True)
        saving = shared_prefix_saving(engine)
    losses = heldout_losses()
    rates = {name: statistics.median(of_way) for name, of_way in rounds.items()}
    figures = {f"{name}_tokens_per_second": round(rate, 1) for name, rate in rates.items()}
    others = {name: text for name, text in texts.items() if name != "batched"}
    equal = {name: sum(a == b for a, b in zip(text, texts["batched"], strict=False)) for name, text in others.items()}
    figures |= {
        "batched_speedup": round(rates["batched"] / rates["cached"], 2), "shared_prefix_saving": round(saving, 1),
        "compilations": compilations, "prompts": len(prompts),
    } | {f"equal_{name}": f"{count} of {len(others[name])}" for name, count in equal.items()}  # fmt: skip
    support.finish("decoding", figures | losses)
    if different := [name for name, count in equal.items() if count < len(others[name])]:
        sys.exit(f"decoding: {' and '.join(different)} decode other tokens than a batch")


if __name__ == "__main__":
    main()
