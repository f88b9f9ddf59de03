# SPDX-License-Identifier: Apache-2.0
"""Does the causal analysis find what is known to be there, and does estimation recover known effects?

--mechanism=off runs the same with the usual shortcuts in place of the mechanisms: differences without adjustment, a
threshold on correlations, prompts without an interchange, and the heads whose outputs differ most between two prompts.
It then fails the gates. The judges are closed forms, the graphs that the data came from, the weights that were set by
hand, and a forward pass in numpy; none of them calls causality/.

- ate_error, naive_sign_wrong: the largest error of the adjusted effect in a Simpson-type model, n = 20,000, over SEEDS
  seeds, and the share of seeds in which the plain difference has the wrong sign.
- pc_f1: of the skeletons of 200 random linear Gaussian graphs of 5 nodes, n = 2,000, alpha 0.01;
  threshold_f1: of |correlation| > 0.1.
- interchange_trained, interchange_untrained: interchange-intervention accuracy on held-out pairs of a decoder that was
  trained on hierarchical equality, (a == b) == (c == d), for the variable a == b, and of the same decoder with random
  weights. 16 of 64 dimensions, found by distributed alignment search; the worst and the best of the seeds. A block sees
  two tokens, so all that is known of a and b passes through one position of each block. (With full attention, some
  seeds spread it over several positions, and no single one has the variable.) After b and after d the decoder is also
  trained to say whether the pair is equal: without that, two of three seeds learn nothing in 3,000 steps.
- planted_patching, planted_attribution, planted_tracing: share of planted circuits whose copying head ranks first.
- induction_patching: share of trained induction models in which the copying head ranks first. It is the head without
  whose reading of the copied token the answer loses most, by a forward pass in numpy: all heads of a layer usually
  attend to that token. induction_loss is the largest loss of the copied tokens, in nats.
"""

import functools
import sys

import support


import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from causality import adjustment, discovery, interchange, patching, tracing
from causality.sites import run, sources_of
from causality.structural import StructuralModel, binary
from parallelism.mesh import mesh_context
from tests.causality import circuits
from tests.layers import references
from tests.support import make_model, model_config, one_device_mesh

ON = "--mechanism=off" not in sys.argv
OPTIONS = "--quick", "--mechanism=on", "--mechanism=off"
SEEDS, GRAPHS, CIRCUITS = (2, 20, 3) if support.QUICK else (10, 200, 12)
MODELS = 1 if support.QUICK else 3  # trained for each of the two tasks
EFFECT, SYMBOLS, LENGTH = 0.12, 16, 12
EPSILON = 1e-5  # of the norms of the models here
NO, YES, ASK, VOCABULARY = SYMBOLS, SYMBOLS + 1, SYMBOLS + 2, 32
ASKED = 4  # position of ASK after a, b, c, d
SITES = [(0, 1), (1, 2)]  # (layer, position) that the alignment is searched at
GATES = {  # figure: (least, most)
    "ate_error": (0, 0.02), "naive_sign_wrong": (1, 1), "pc_f1": (0.93, 1), "interchange_trained": (0.98, 1),
    "interchange_untrained": (0, 0.6), "planted_patching": (1, 1), "planted_attribution": (1, 1),
    "planted_tracing": (1, 1), "induction_patching": (1, 1),
}  # fmt: skip


def simpson() -> StructuralModel:
    """Return a model in which treatment x helps by EFFECT in both strata of z, and z causes treatment and bad luck."""
    return StructuralModel({
        "z": binary(lambda: 0.5),
        "x": binary(lambda z: 0.2 + 0.6 * z, "z"),
        "y": binary(lambda z, x: 0.7 - 0.45 * z + EFFECT * x, "z", "x"),
    })  # fmt: skip


def estimation() -> dict[str, float]:
    """Return the figures of the adjusted and the plain effect."""
    samples = [simpson().sample(20_000, np.random.default_rng(seed)) for seed in range(SEEDS)]
    naive = [adjustment.naive_effect(sample, "x", "y") for sample in samples]
    found = [adjustment.adjusted_effect(sample, "x", "y", ["z"]) for sample in samples] if ON else naive
    wrong = np.mean([effect < 0 for effect in naive])
    return {"ate_error": float(max(abs(effect - EFFECT) for effect in found)), "naive_sign_wrong": float(wrong)}


def graphs() -> dict[str, float]:
    """Return the F1 of the skeletons, over all edges of all graphs."""
    counts = {"pc_f1": np.zeros(3), "threshold_f1": np.zeros(3)}
    for seed in range(GRAPHS):
        rng = np.random.default_rng(seed)
        weights = np.triu(rng.random((5, 5)) < 0.4, 1) * rng.uniform(0.5, 1.5, (5, 5)) * rng.choice([-1, 1], (5, 5))
        data = rng.standard_normal((2000, 5)) @ np.linalg.inv(np.eye(5) - weights)
        order = rng.permutation(5)
        true = (weights + weights.T != 0)[np.ix_(order, order)]
        threshold = (np.abs(np.corrcoef(data[:, order], rowvar=False)) > 0.1) & ~np.eye(5, dtype=bool)
        found = discovery.pc(data[:, order]) if ON else threshold
        for name, graph in (("pc_f1", found | found.T), ("threshold_f1", threshold)):
            counts[name] += (graph & true).sum(), graph.sum(), true.sum()
    return {name: float(2 * hits / (found + there)) for name, (hits, found, there) in counts.items()}


@functools.cache
def decoder(num_layers: int, num_heads: int, window: int = 0):
    """Return (graph, function of a seed to random parameters); the same graph each time, so programs compile once."""
    config = model_config(
        vocab_size=VOCABULARY, embed_dim=64, num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_heads,
        head_dim=16, mlp_dim=128, sliding_window=window,
    )  # fmt: skip
    graph, abstract = make_model(config)

    def initial(seed: int) -> dict:
        rng = np.random.default_rng(seed)

        def draw(path, weight):
            names = [part.key for part in path]
            if names[-1] == "scale":
                return np.ones(weight.shape, np.float32)
            inputs = num_heads * 16 if names[-1] == "out" else 128 if names[-1] == "down" else 64
            return (inputs**-0.5 * rng.standard_normal(weight.shape)).astype(np.float32)

        return jax.tree_util.tree_map_with_path(draw, abstract)

    return graph, initial


def trained(graph: nnx.GraphDef, params: dict, batches: np.ndarray, targets: np.ndarray, rate: float = 2e-3):
    """Return (parameters, losses of the steps): Adam on batches [steps, B, T]; targets of -1 have no loss."""
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0, rate, 100, len(batches)))

    def loss(params, tokens_BT, targets_BT):
        model = nnx.merge(graph, params)
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        stream_BTD, _ = model(tokens_BT, positions_BT, jnp.ones_like(tokens_BT))
        each = optax.softmax_cross_entropy_with_integer_labels(model.logits(stream_BTD), jnp.maximum(targets_BT, 0))
        return (each * (targets_BT >= 0)).sum() / (targets_BT >= 0).sum()

    def step(state, batch):
        value, gradient = jax.value_and_grad(loss)(state[0], *batch)
        change, moments = optimizer.update(gradient, state[1])
        return (optax.apply_updates(state[0], change), moments), value

    scan = jax.jit(lambda params, batches: jax.lax.scan(step, (params, optimizer.init(params)), batches))
    (params, _), losses = scan(jax.tree.map(jnp.asarray, params), (batches, targets))
    return params, np.asarray(losses)


def equalities(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return prompts [count, 5] "a b c d ASK", whether a == b, and whether c == d; each holds half of the time."""
    symbols = rng.integers(0, SYMBOLS, (count, 4))
    equal = rng.random((count, 2)) < 0.5
    for pair in (0, 1):
        other = (symbols[:, 2 * pair] + rng.integers(1, SYMBOLS, count)) % SYMBOLS
        symbols[:, 2 * pair + 1] = np.where(equal[:, pair], symbols[:, 2 * pair], other)
    return np.concatenate([symbols, np.full((count, 1), ASK)], 1).astype(np.int32), equal[:, 0], equal[:, 1]


def pairs(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return base and source prompts, and the answer of the causal model whose a == b is the source's."""
    base, _, second = equalities(rng, count)
    source, first, _ = equalities(rng, count)
    return base, source, np.where(first == second, YES, NO).astype(np.int32)


def aligned_accuracy(graph, params: dict, seed: int) -> float:
    """Return the accuracy on held-out pairs at the site that is best on the pairs of the search."""
    rng, found = np.random.default_rng(1000 + seed), []
    search, heldout = pairs(rng, 4000), pairs(rng, 2000)
    for layer, position in SITES:
        rotation = interchange.align(
            graph, params, *search, layer, position, size=16, steps=400, batch=128, key=jax.random.key(seed)
        )

        def accuracy(base, source, wanted, where=(layer, position), rotation=rotation) -> float:
            put = source if ON else base
            labels = interchange.labels_after(graph, params, base, put, *where, (NO, YES), rotation)
            return interchange.accuracy(labels, wanted)

        found.append((accuracy(*search), accuracy(*heldout)))
        print(f"equality {seed}: layer {layer}, position {position}: {found[-1][1]:.3f}", flush=True)
    return max(found)[1]


def equality() -> dict[str, float]:
    """Return the interchange accuracies; the task's own accuracy is of held-out prompts without an interchange."""
    graph, initial = decoder(4, 4, window=2)
    steps, figures = 400 if support.QUICK else 1500, {"task": [], "trained": [], "untrained": []}
    for seed in range(MODELS):
        rng = np.random.default_rng(seed)
        tokens, first, second = equalities(rng, steps * 128)
        targets = np.full(tokens.shape, -1, np.int32)
        for position, true in ((1, first), (3, second), (ASKED, first == second)):
            targets[:, position] = np.where(true, YES, NO)
        shape = (steps, 128, 5)
        params, _ = trained(graph, initial(seed), tokens.reshape(shape), targets.reshape(shape))
        tokens, first, second = equalities(rng, 2000)
        logits = np.asarray(jax.jit(run, static_argnums=0)(graph, params, tokens))
        figures["task"].append(float(((logits[:, YES] > logits[:, NO]) == (first == second)).mean()))
        figures["trained"].append(aligned_accuracy(graph, params, seed))
        figures["untrained"].append(aligned_accuracy(graph, initial(100 + seed), seed))
    return {
        "equality_accuracy": min(figures["task"]), "interchange_trained": min(figures["trained"]),
        "interchange_untrained": max(figures["untrained"]),
    }  # fmt: skip


def outputs_that_differ(graph, params, pair: patching.Contrast) -> np.ndarray:
    """Return [L, N], how much the output of each head differs between the prompts: a correlation, not an effect."""
    clean, corrupt = (sources_of(graph, params, tokens[None])["heads"] for tokens in (pair.clean_T, pair.corrupt_T))
    return np.asarray(((clean - corrupt) ** 2).sum((1, 2, 4)))


def ranks_first(table: np.ndarray, place: tuple[int, int]) -> bool:
    """Return whether the largest entry of a table is at this place."""
    return np.unravel_index(np.argmax(table), table.shape) == place


def planted() -> dict[str, float]:
    """Return the share of planted circuits whose copying head each method ranks first."""
    counts = dict.fromkeys(("planted_patching", "planted_attribution", "planted_tracing", "planted_differs"), 0.0)
    for seed in range(CIRCUITS):
        place = divmod(seed, circuits.HEADS)
        graph, params = circuits.planted(*place, seed=seed)
        clean, corrupt, _ = circuits.prompts(seed)
        pair = patching.contrast(graph, params, clean, corrupt)
        differs = outputs_that_differ(graph, params, pair)
        tables = dict.fromkeys(counts, differs)
        if ON:
            noised, key = clean != corrupt, jax.random.key(seed)
            tables["planted_patching"] = patching.restore(graph, params, pair)["heads"]
            tables["planted_attribution"] = patching.attribute(graph, params, pair)["heads"]
            traced = tracing.trace(graph, params, clean, noised, pair.answer, key=key)
            tables["planted_tracing"] = traced.effects["heads"]
        for name, table in tables.items():
            counts[name] += ranks_first(table, place) / CIRCUITS
    return {name: round(share, 6) for name, share in counts.items()}


def repeats(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return [count, 2 * LENGTH] random tokens, each row twice."""
    once = np.stack([rng.permutation(VOCABULARY)[:LENGTH] for _ in range(count)])
    return np.concatenate([once, once], 1).astype(np.int32)


def induction() -> dict[str, float]:
    """Train models that continue repeated sequences; return how often patching ranks the copying head first."""
    graph, initial = decoder(2, 4)
    steps, hits, differs, worst = 400 if support.QUICK else 2500, 0.0, 0.0, 0.0
    for seed in range(MODELS):
        rng = np.random.default_rng(seed)
        tokens = repeats(rng, steps * 64).reshape(steps, 64, -1)
        targets = np.roll(tokens, -1, -1)
        targets[..., : LENGTH - 1] = targets[..., -1] = -1
        params, losses = trained(graph, initial(seed), tokens, targets, 3e-3)
        worst = max(worst, float(losses[-20:].mean()))
        tables, norms, copied_by = [], [], []
        for _ in range(8):
            row, end = repeats(rng, 1)[0], int(rng.integers(LENGTH + 2, 2 * LENGTH - 2))
            clean, copied = row[: end + 1], end - LENGTH + 1  # the position of the token that is copied
            corrupt = clean.copy()
            corrupt[copied] = next(token for token in rng.permutation(VOCABULARY) if token not in row)
            pair = patching.contrast(graph, params, clean, corrupt, (int(clean[copied]), int(corrupt[copied])))
            norms.append(outputs_that_differ(graph, params, pair))
            tables.append(patching.restore(graph, params, pair)["heads"] if ON else norms[-1])
            copied_by.append(copying(params, clean, copied, pair.answer, pair.other))
        place = np.unravel_index(np.mean(copied_by, 0).argmax(), copied_by[0].shape)
        hits += ranks_first(np.mean(tables, 0), place) / MODELS
        differs += ranks_first(np.mean(norms, 0), place) / MODELS
        print(f"induction {seed}: loss {losses[-20:].mean():.4f}, copying head {place}\n{np.mean(tables, 0)}")
        print(np.mean(copied_by, 0), flush=True)
    return {"induction_loss": worst, "induction_patching": round(hits, 6), "induction_differs": round(differs, 6)}


def copying(params: dict, tokens_T: np.ndarray, position: int, answer: int, other: int) -> np.ndarray:
    """Return [L, N], by how much logit(answer) - logit(other) falls without what a head reads at `position`."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    num_layers, num_heads = params["stack"]["blocks"]["attention"]["out"].shape[:2]
    whole, *without = [
        forward(params, tokens_T, position, place)
        for place in [None, *((layer, head) for layer in range(num_layers) for head in range(num_heads))]
    ]
    falls = [(whole - logits)[answer] - (whole - logits)[other] for logits in without]
    return np.reshape(falls, (num_layers, num_heads))


def forward(params: dict, tokens_T: np.ndarray, position: int, place: tuple[int, int] | None) -> np.ndarray:
    """Return the logits [V] after the last token, by numpy; the head at `place` reads nothing at `position` for it."""
    blocks, T = params["stack"]["blocks"], len(tokens_T)
    x_TD = params["embed"]["embedding"][tokens_T] * params["embed"]["embedding"].shape[1] ** 0.5
    frequencies = references.rotary_frequencies(16, 10_000.0)[0]
    for layer in range(len(blocks["attention"]["out"])):
        weights = {name: weight[layer] for name, weight in blocks["attention"].items()}
        h_TD = references.rms_norm(x_TD, blocks["attention_norm"]["scale"][layer], EPSILON)
        q, k, v = (np.einsum("TD,DNH->TNH", h_TD, weights[name]) for name in ("query", "key", "value"))
        q, k = (references.rotary(each[None], np.arange(T)[None], frequencies)[0] for each in (q, k))
        scores_NTS = np.einsum("TNH,SNH->NTS", q, k) / 4
        scores_NTS = np.exp(np.where(np.tri(T, dtype=bool), scores_NTS, -np.inf))
        scores_NTS /= scores_NTS.sum(-1, keepdims=True)
        if place and place[0] == layer:
            scores_NTS[place[1], -1, position] = 0
        x_TD = x_TD + np.einsum("NTS,SNH,NHD->TD", scores_NTS, v, weights["out"])
        h_TD = references.rms_norm(x_TD, blocks["mlp_norm"]["scale"][layer], EPSILON)
        x_TD = x_TD + references.swiglu(h_TD, {name: weight[layer] for name, weight in blocks["mlp"].items()})
    return references.rms_norm(x_TD[-1:], params["norm"]["scale"], EPSILON)[0] @ params["head"]["kernel"]


def main() -> None:
    """Measure everything; end with status 1 if a gate is not passed."""
    if unknown := [word for word in sys.argv[1:] if word not in OPTIONS]:
        support.usage_error(f"{unknown[0]} is not an option of this benchmark; there are {', '.join(OPTIONS)}")
    figures = estimation() | graphs()
    with mesh_context(one_device_mesh()):
        figures |= planted() | induction() | equality()
    print("\n".join(f"{name}: {value:.4f}" for name, value in figures.items()))
    missed = [name for name, (least, most) in GATES.items() if not least <= figures[name] <= most]
    support.finish("causal_analysis", figures)
    if missed:
        sys.exit(f"gates missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
