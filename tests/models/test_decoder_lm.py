# SPDX-License-Identifier: Apache-2.0
"""The decoder: the whole against numpy, what no change may break, and its counts."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

from core import assembly
from models import decoder_lm
from objectives import language_modeling
from parallelism.mesh import make_mesh, mesh_context
from settings import loading
from tests.layers import references
from tests.support import RECIPES, ROOT, assert_close, forward, make_model, model_config, packed_batch, relative_error

T, V = 11, 37
VARIANTS = {
    "plain": {},
    "tied": {"tie_embeddings": True},
    "qk_norm": {"qk_norm": True},
    "logit_soft_cap": {"logit_soft_cap": 2.0},
    "attention_soft_cap": {"attention_soft_cap": 0.5},
    "sliding_window": {"sliding_window": 3},
    "global_every": {"sliding_window": 3, "global_every": 2},
    "rope_linear": {"rope_scaling": "linear", "rope_factor": 8.0},
    "rope_llama3": {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_length": 128},
    "rope_yarn": {"rope_scaling": "yarn", "rope_factor": 8.0, "rope_original_length": 128},
    "biases_qkv": {"biases": "qkv"},
    "biases_all": {"biases": "all"},
    "mup": {"mup_base_dim": 5},
    "mup_tied": {"mup_base_dim": 5, "tie_embeddings": True},
    "dropout": {"dropout": 0.5},
    "head_dim": {"head_dim": 0, "num_heads": 10},
    "gemma": {  # and what it has in common with others above
        "norm_from_one": True, "post_norms": True, "embed_scale": 3.0, "query_scalar": 3.0, "activation": "gelu_tanh",
        "qk_norm": True, "sliding_window": 3, "global_every": 2, "local_rope_theta": 100.0, "rope_scaling": "linear",
        "rope_factor": 8.0,
    },
}  # fmt: skip
TOGETHER = {  # as many of them together as possible
    "tie_embeddings": True, "qk_norm": True, "biases": "all", "sliding_window": 3, "global_every": 2,
    "attention_soft_cap": 0.5, "logit_soft_cap": 2.0, "mup_base_dim": 5, "dropout": 0.5, **VARIANTS["rope_yarn"],
}  # fmt: skip
VARIANTS["together"] = TOGETHER


@functools.cache
def variant(name: str):
    """Return (graph, params)."""
    return make_model(model_config(**VARIANTS[name]))


def one_document(seed: int = 0) -> dict:
    return packed_batch([[T], [T]], T, V, seed)


def reference_logits(params, batch, config) -> np.ndarray:
    """Compute the logits in numpy."""
    weights = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    segments, positions, epsilon = batch["segments"], batch["positions"], config.norm_epsilon
    scaling = config.rope_scaling, config.rope_factor, config.rope_original_length
    head_dim = decoder_lm.head_dim(config)
    rope = local_rope = references.rotary_frequencies(head_dim, config.rope_theta, *scaling)
    if config.local_rope_theta:
        local_rope = references.rotary_frequencies(head_dim, config.local_rope_theta)
    query_scale = np.sqrt(head_dim / config.query_scalar) if config.query_scalar else 1.0
    if config.norm_from_one:
        weights = jax.tree_util.tree_map_with_path(lambda path, w: w + (path[-1].key == "scale"), weights)
    table = weights["embed"]["embedding"]
    x = table[batch["tokens"]] * (config.embed_scale or np.sqrt(config.embed_dim))
    for layer in range(config.num_layers):
        block = jax.tree.map(lambda w: w[layer], weights["stack"]["blocks"])  # noqa: B023
        is_global = config.global_every and (layer + 1) % config.global_every == 0
        seen = references.mask(segments, segments, positions, positions, 0 if is_global else config.sliding_window)
        turned = rope if is_global or not config.sliding_window else local_rope
        options = config.attention_soft_cap, query_scale, config.activation
        x = references.block(x, block, positions, seen, turned, epsilon, *options)
    x = references.rms_norm(x, weights["norm"]["scale"], epsilon)
    logits = x @ (table.T if config.tie_embeddings else weights["head"]["kernel"])
    cap, base = config.logit_soft_cap, config.mup_base_dim
    logits *= np.sqrt(base / config.embed_dim) if base else 1
    return cap * np.tanh(logits / cap) if cap else logits


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_numpy_on_packed_documents(name):
    graph, params = variant(name)
    batch = packed_batch([[4, 7], [2, 5, 3]], T, V)
    real = batch["segments"] > 0
    expected = reference_logits(params, batch, model_config(**VARIANTS[name]))
    assert_close(np.asarray(forward(graph, params, batch))[real], expected[real])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_later_token_changes_no_earlier_output(name):
    graph, params = variant(name)
    batch = one_document()
    before = np.asarray(forward(graph, params, batch))
    for position in (T - 1, 5):
        changed = batch["tokens"].copy()
        changed[:, position] = (changed[:, position] + 7) % V
        after = np.asarray(forward(graph, params, batch | {"tokens": changed}))
        np.testing.assert_array_equal(after[:, :position], before[:, :position])
        reached = (after[:, position:] != before[:, position:]).any(-1).all()
        assert reached or name == "sliding_window"


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("plain", "head_dim", "dropout")])
def test_every_option_changes_the_output(name):
    """Also from the option that it goes with: global layers from the window alone, all biases from some."""
    other = {"global_every": "sliding_window", "biases_all": "biases_qkv", "mup_tied": "tied"}.get(name, "plain")
    (other_graph, others), (graph, params) = variant(other), variant(name)
    # Weights that both have are equal: only the option differs.
    params, batch = merged(params, others), one_document()
    assert relative_error(forward(graph, params, batch), forward(other_graph, others, batch)) > 0.05


def merged(weights: dict, others: dict) -> dict:
    """Return `weights`, with the values of `others` for those that both have."""
    shared = weights.keys() & others.keys()
    take = {key: merged(weights[key], others[key]) if isinstance(weights[key], dict) else others[key] for key in shared}
    return weights | take


def test_dropout_zeroes_embeddings_too():
    """The blocks add nothing here, so that the stream leaves as it entered."""
    graph, params = make_model(model_config(dropout=0.3))
    params["stack"]["blocks"]["attention"]["out"] *= 0
    params["stack"]["blocks"]["mlp"]["down"] *= 0
    batch = packed_batch([[61]] * 4, 61, V)

    @jax.jit
    def stream(params, key):
        model = nnx.merge(graph, params)
        model.norm = lambda x: x
        return model(batch["tokens"], batch["positions"], batch["segments"], key=key)[0]

    entering, dropped = (np.asarray(stream(params, key)) for key in (None, jax.random.key(0)))
    kept = dropped != 0
    assert abs(kept.mean() - 0.7) < 4 * (0.3 * 0.7 / kept.size) ** 0.5
    np.testing.assert_allclose(dropped[kept], entering[kept] / 0.7, rtol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_with_mup_frozen_weights_have_the_head_of_trained_ones(tied):
    """So that a model is no other than its reference, with which DPO begins."""
    config = model_config(mup_base_dim=7, tie_embeddings=tied)
    model = nnx.merge(*make_model(config, dtype=jnp.bfloat16))
    head_DV = model.head_weight().astype(jnp.bfloat16)
    stored = model.embed.embedding if tied else model.head.kernel
    stored[...] = stored[...].astype(jnp.bfloat16)
    np.testing.assert_array_equal(model.head_weight().astype(jnp.bfloat16), head_DV)


def test_dropout_is_the_same_on_any_mesh():
    graph, params = make_model(model_config(dropout=0.5, vocab_size=40))
    batch = packed_batch([[5, 7], [12], [3, 4, 5], [12]], 12, 40)
    one_device = loss_and_gradients(graph, params, batch, jax.random.key(3))
    with mesh_context(make_mesh({"data": 2, "fsdp": 1, "context": 2, "expert": 1, "model": 2})):
        assert_close(loss_and_gradients(graph, params, batch, jax.random.key(3)), one_device)
    other = loss_and_gradients(graph, params, batch, jax.random.key(4))
    assert relative_error(other[0][0], one_device[0][0]) > 1e-3


def test_without_a_key_a_model_with_dropout_is_the_one_without():
    (plain_graph, plain), (graph, params) = variant("plain"), variant("dropout")
    assert_close(params, plain)
    np.testing.assert_array_equal(forward(graph, params, one_document()), forward(plain_graph, plain, one_document()))


def test_sliding_window_forgets_what_lies_behind_it():
    """Three layers of a window of 3 reach 6 tokens back, and not one more."""
    graph, params = variant("sliding_window")
    batch = one_document()
    changed = batch["tokens"].copy()
    changed[:, 2] = (changed[:, 2] + 7) % V
    before, after = (np.asarray(forward(graph, params, batch | {"tokens": t})) for t in (batch["tokens"], changed))
    moved = (before != after).any(-1)
    np.testing.assert_array_equal(moved, np.broadcast_to((np.arange(T) >= 2) & (np.arange(T) <= 8), moved.shape))


def test_a_global_layer_reaches_all_that_lies_behind():
    """Of three layers the second alone is global: token 2 moves everything after it."""
    graph, params = variant("global_every")
    batch = one_document()
    changed = batch["tokens"].copy()
    changed[:, 2] = (changed[:, 2] + 7) % V
    before, after = (np.asarray(forward(graph, params, batch | {"tokens": t})) for t in (batch["tokens"], changed))
    np.testing.assert_array_equal((before != after).any(-1), np.broadcast_to(np.arange(T) >= 2, (2, T)))


def test_logit_soft_cap_bounds_the_logits():
    graph, params = variant("logit_soft_cap")
    logits = forward(graph, params, one_document())
    assert 1.5 < np.abs(logits).max() <= 2.0


@functools.partial(jax.jit, static_argnames="graph")
def loss_and_gradients(graph, params, batch, key=None):
    """Return (((sum of the loss, tokens)), gradients of the sum)."""
    loss = language_modeling.LanguageModeling(0, 0, 1, 0.1).loss

    def total(params):
        pair, _ = loss(nnx.merge(graph, params), {}, batch, key)
        return pair

    return jax.value_and_grad(total, has_aux=True)(params)


def test_packed_documents_are_as_each_alone_in_outputs_and_gradients():
    """Also where they stand: positions restart at each, and what pads the rest of a row counts for nothing."""
    graph, params = variant("together")
    rows = [[4, 7], [2, 5, 3]]
    batch = packed_batch(rows, T, V)
    packed, packed_logits = jax.device_get((loss_and_gradients(graph, params, batch), forward(graph, params, batch)))
    alone = []
    for row, sizes in enumerate(rows):
        for start, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
            document = {name: np.zeros((2, T), np.int32) for name in batch}
            for name, values in batch.items():
                document[name][0, :size] = values[row, start : start + size]
            document["segments"][0, :size] = 1
            np.testing.assert_array_equal(document["positions"][0, :size], np.arange(size))
            logits = np.asarray(forward(graph, params, document))
            assert_close(packed_logits[row, start : start + size], logits[0, :size])
            alone.append(jax.device_get(loss_and_gradients(graph, params, document)))
    assert_close(packed, jax.tree.map(lambda *parts: sum(parts), *alone))


def test_positions_matter_only_by_their_distance():
    graph, params = variant("plain")
    batch = one_document()
    logits = forward(graph, params, batch)
    assert_close(forward(graph, params, batch | {"positions": batch["positions"] + 5}), logits)
    assert relative_error(forward(graph, params, batch | {"positions": batch["positions"] * 2}), logits) > 0.01


@functools.partial(jax.jit, static_argnames="graph")
def extend(graph, params, cache, tokens, positions, segments):
    """Return (logits, cache)."""
    model = nnx.merge(graph, params)
    stream, cache = model(tokens, positions, segments, cache)
    return model.logits(stream), cache


@pytest.mark.parametrize("name", ["plain", "sliding_window", "global_every", "gemma", "together"])
def test_cached_decoding_equals_the_full_forward(name):
    """Rows of 5 and 9 tokens, padded on the left, are prefilled together and then extended token by token."""
    graph, params = variant(name)
    lengths, prefill, steps = (5, 9), 9, 2
    documents = packed_batch([[T], [T]], T, V)
    full = np.asarray(forward(graph, params, documents))

    positions = np.stack([np.arange(prefill) - (prefill - length) for length in lengths])
    segments, positions = (positions >= 0).astype(np.int32), np.maximum(positions, 0).astype(np.int32)
    tokens = np.take_along_axis(documents["tokens"], positions, axis=1)
    cache = nnx.merge(graph, params).empty_cache(2, prefill + steps)
    logits, cache = jax.device_get(extend(graph, params, cache, tokens, positions, segments))
    for row, length in enumerate(lengths):
        assert_close(logits[row, prefill - length :], full[row, :length])
    for step in range(steps):
        positions = np.array(lengths, np.int32)[:, None] + step
        tokens = np.take_along_axis(documents["tokens"], positions, axis=1)
        logits, cache = jax.device_get(extend(graph, params, cache, tokens, positions, np.ones_like(tokens)))
        assert_close(logits[:, 0], full[np.arange(2), positions[:, 0]])
    assert cache["start"].tolist() == [prefill + steps] * 2


def test_unrolled_layers_extend_the_cache_as_scanned_ones_do():
    (scanned, params), batch = variant("global_every"), one_document()
    unrolled, _ = make_model(model_config(**VARIANTS["global_every"]), scan=False)
    rows = [batch[name] for name in ("tokens", "positions", "segments")]
    results = []
    for graph in (unrolled, scanned):
        logits, cache = extend(graph, params, nnx.merge(graph, params).empty_cache(2, T + 1), *rows)
        layers = cache.pop("layers", None) or jax.tree.map(lambda *each: jnp.stack(each), *cache.pop("each_layer"))
        results.append((logits, layers, cache))
    assert_close(*results)


@pytest.mark.parametrize(("embed_dim", "num_layers", "tied"), [(256, 4, False), (64, 32, True)])
def test_initial_activations_have_near_unit_variance(embed_dim, num_layers, tied):
    """Tokens enter with variance 1. Each of the 2 L sublayers adds at most 1 / (2 L), attention less, as it averages:
    so the stream leaves with 1.4 to 2.1 at any width and depth, and the logits, of a normalised stream, with 1."""
    config = model_config(
        num_layers=num_layers, embed_dim=embed_dim, num_heads=4, num_kv_heads=2, head_dim=0, mlp_dim=3 * embed_dim,
        vocab_size=1009, tie_embeddings=tied,
    )  # fmt: skip

    @jax.jit
    def mean_squares(batch):
        model = decoder_lm.make(config, dtype=jnp.float32, scan=True, rngs=nnx.Rngs(0))
        seen, norm = [model.embed(batch["tokens"], jnp.float32)], model.norm
        model.norm = lambda x: seen.append(x) or norm(x)
        stream, _ = model(batch["tokens"], batch["positions"], batch["segments"])
        return [jnp.mean(x**2) for x in (*seen, model.logits(stream))]

    batch = packed_batch([[61]] * 4, 61, 1009)
    entering, leaving, logits = (float(mean) for mean in mean_squares(batch))
    assert abs(entering - 1) < 0.1
    assert 1.4 < leaving < 2.1
    assert 0.8 < logits < (1.5 if tied else 1.2)  # tied, a token's own logit stands out


def test_flops_per_token_equals_a_hand_count():
    """Per layer 4 x 4 weights for queries, 4 x 2 each for keys and values, 4 x 4 out, 3 x 4 x 3 for the MLP: 84.

    2 layers and a head of 4 x 5 are 188 weights, 6 FLOPs each. Attention sees 3 keys on average; scores and values
    take 2 x 2 x 4 FLOPs a key and layer, three times with the backward pass.
    """
    sizes = dict(num_layers=2, embed_dim=4, num_heads=2, num_kv_heads=1, head_dim=2, mlp_dim=3, vocab_size=5)
    assert decoder_lm.flops_per_token(model_config(**sizes), 6) == 6 * 188 + 3 * (2 * 2 * 4) * 2 * 3
    assert decoder_lm.flops_per_token(model_config(**sizes | {"head_dim": 0}), 6) == 6 * 188 + 288


@pytest.mark.parametrize(("window", "every"), [(0, 0), (7, 0), (100, 0), (1000, 0), (7, 2), (100, 3), (100, 5)])
def test_flops_count_the_keys_that_a_window_leaves(window, every):
    length, config = 512, model_config(num_layers=7, sliding_window=window, global_every=every)
    windows = [0 if every and layer % every == 0 else window for layer in range(1, 8)]
    counted = sum(np.mean([min(position + 1, w or length) for position in range(length)]) for w in windows)
    per_key = 12.0 * config.num_heads * config.head_dim
    weights = decoder_lm.flops_per_token(config, 0)
    keys = (decoder_lm.flops_per_token(config, length) - weights) / per_key
    assert abs(keys - counted) <= 7 * 0.5  # the formula is that of a continuous position


def test_parameter_count_with_biases_is_that_of_qwen():
    """Qwen 2.5 0.5B: 24 layers of 896 in 14 heads and 2, 4,864 in the MLP, tied; 494,032,768 parameters."""
    sizes = dict(num_layers=24, embed_dim=896, num_heads=14, num_kv_heads=2, head_dim=64, mlp_dim=4864)
    config = model_config(**sizes, vocab_size=151_936, tie_embeddings=True, biases="qkv")
    model = nnx.eval_shape(lambda: decoder_lm.make(config, dtype=jnp.float32, scan=True, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) == 494_032_768


@functools.cache
def num_parameters(recipe: str) -> int:
    config = loading.load(f"configs/{recipe}.py", "", {"mesh.fsdp": "8"}).config
    return assembly.assemble(config).models.num_parameters


@pytest.mark.parametrize(("recipe", "published"), [("llama2_7b", 6_738_415_616), ("llama3_8b", 8_030_261_248)])
def test_parameter_count_is_the_published_one(recipe, published):
    assert num_parameters(recipe) == published


DOCSTRINGS = {recipe: (ROOT / f"configs/{recipe}.py").read_text() for recipe in RECIPES}
STATED = re.compile(r"([\d.,]+)( M)?[- ]parameters?\b")  # 6,738,415,616 parameters; 27 M parameters


@pytest.mark.parametrize("recipe", [name for name, text in DOCSTRINGS.items() if STATED.search(text)])
def test_parameter_count_is_the_one_of_the_recipes_docstring(recipe):
    number, millions = STATED.search(DOCSTRINGS[recipe]).groups()
    decimals = len(number.partition(".")[2])
    actual = num_parameters(recipe) / (1e6 if millions else 1)
    assert f"{actual:,.{decimals}f}" == number


def test_no_gradient_in_bfloat16_is_summed_over_tokens_in_bfloat16():
    """Such a sum stops at 256 times what is added: with these 4,096 tokens, biases lost up to a third of theirs."""
    config = model_config(num_layers=2, biases="all", qk_norm=True, post_norms=True)
    batch = packed_batch([[64]] * 64, 64, 37)
    batch["targets"] = batch["targets"] % 3  # so that tokens agree on where the weights have to go

    def gradients(dtype) -> dict:
        graph, params = make_model(config, dtype=dtype)
        objective = language_modeling.LanguageModeling(64, 64, vocab_size=37)

        def loss(params):
            return objective.loss(nnx.merge(graph, params), {}, batch, None)[0][0]

        return flatten_dict(jax.jit(jax.grad(loss))(params))

    exact, found = gradients(jnp.float32), gradients(jnp.bfloat16)
    off = {name: relative_error(found[name], exact[name]) for name in exact}
    assert max(off.values()) < 0.1, sorted(off.items(), key=lambda item: -item[1])[:3]


def test_flops_of_experts_are_those_of_the_mlps_that_a_token_goes_through():
    """Of 8 experts 2 and the shared one, 3 x 4 x 3 weights each, and the router's 4 x 8; frozen weights take 4 each."""
    sizes = dict(num_layers=2, embed_dim=4, num_heads=2, num_kv_heads=1, head_dim=2, mlp_dim=3, vocab_size=5)
    experts = model_config(**sizes, num_experts=8, experts_per_token=2, shared_experts=1)
    more = 2 * (2 * 36 + 32)  # weights in two layers
    assert decoder_lm.flops_per_token(experts, 0) == 6 * (188 + more)
    assert decoder_lm.flops_per_token(experts, 6, frozen=True) == 4 * (188 + more) + 288
