# SPDX-License-Identifier: Apache-2.0
"""Predicts the memory of a decoder's step by arithmetic alone, so that layouts that cannot fit are not compiled.

The terms are the arrays that compiled programs hold. The factors in WORKING were fitted to compilations by the TPU
compiler (benchmarks/rehearsals.py prints the error of the sums). Only the compiler decides whether a step fits.
Letters: D embed, F mlp, V vocabulary, N heads, K key and value heads.
"""

import math

from configs.base import batch_shards
from settings.architecture import head_dim

BFLOAT16, FLOAT32 = 2, 4
LANES = 128  # a head narrower than this takes as much memory as one of this width
MOMENTS = {"lion": 1, "sgd": 1}  # numbers that an optimizer keeps for a weight
ADAM = 2  # numbers for a weight of every other optimizer
FACTORED = 128  # optax's Adafactor keeps second moments by row and column if two dimensions are at least this long
WORKING = {  # how many copies are held at peak memory, in addition to saved activations
    "stream": 7.6,  # [tokens, D] in bfloat16
    "wide": 8.4,  # [tokens, F]
    "heads": 1.0,  # queries, keys and values
    "layer": 0.3,  # the all-gathered weights of a layer
    "copies": 0.35,  # this device's weights in bfloat16
    "head": 3.0,  # the all-gathered head in float32
    "accumulated": 1.8,  # float32 gradients, if there are microbatches
}
MIXTURE_OUTPUTS = 5 * (1 + 2 * 8)  # of the mixture density: components, each with a weight, 8 means and 8 scales
WITHOUT_REMAT = {"stream": 8.7, "wide": 2.9}  # saved for each layer, in addition to "dots"


def num_parameters(config) -> int:
    """Return the number of parameters of models/decoder_lm.py without its small biases, and of what is added to it."""
    model = config.model
    D, F = model.embed_dim, model.mlp_dim
    mlps = 3 * D * F * max(1, model.num_experts + model.shared_experts) + (D + 1) * model.num_experts
    number = model.num_layers * (_attention(model) + mlps) + _vocabulary(model) + D
    added = {"error_correction": _corrector, "value_head": lambda config: D}  # by the objective
    return number + added.get(config.train.objective, lambda config: 0)(config)


def num_trained(config) -> int:
    """Return the number of trained parameters. The others are frozen, in the type that the model computes in."""
    objective = config.train.objective
    if config.lora.rank:
        return config.model.num_layers * _adapters(config.model, config.lora)
    if objective == "error_correction" and not config.error_correction.joint_weight:
        return _corrector(config)
    return config.model.embed_dim if objective == "value_head" else num_parameters(config)


def _reference(config) -> int:
    """Return the parameters of the frozen reference that a loss compares with; adapters share it with their model."""
    compares = config.train.objective == "dpo" or (config.train.objective == "grpo" and config.grpo.kl)
    return num_parameters(config) if compares else 0


def _adapters(model, lora) -> int:
    """Return the parameters of a layer's adapters, which `num_parameters` leaves out; see layers/adapters.py."""
    D, H = model.embed_dim, head_dim(model)
    heads = {"query": model.num_heads, "key": model.num_kv_heads, "value": model.num_kv_heads, "out": model.num_heads}
    sides = {name: D + number * H for name, number in heads.items()}
    sides |= {} if model.num_experts else dict.fromkeys(("gate", "up", "down"), D + model.mlp_dim)
    return lora.rank * sum(sides.get(name.strip(), 0) for name in lora.targets.split(","))


def expert_parameters(model) -> int:
    """Return the parameters of all experts that a router chooses from."""
    return model.num_layers * 3 * model.embed_dim * model.mlp_dim * model.num_experts


def _vocabulary(model) -> int:
    """Return the parameters of embedding and head."""
    return model.vocab_size * model.embed_dim * (1 if model.tie_embeddings else 2)


def _attention(model) -> int:
    """Return the parameters of a layer's attention and norms."""
    D, H = model.embed_dim, head_dim(model)
    return D * H * (2 * model.num_heads + 2 * model.num_kv_heads) + 2 * D


def _corrector(config) -> int:
    """Return the parameters of layers/error_corrector.py."""
    model, keys = config.model, config.error_correction
    D = model.embed_dim
    mixture = (D + 1) * MIXTURE_OUTPUTS + 1 if keys.use_mixture_density else 0
    return (
        keys.num_layers * (_attention(model) + 3 * D * model.mlp_dim) + 3 * D * model.mlp_dim
        + 5 * D * D + 11 * D + 1 + mixture
    )  # fmt: skip


def moments(config) -> float:
    """Return how many numbers the optimizer keeps for a weight, on average."""
    if config.optimizer.name == "adafactor":
        return _second_moments(config.model)
    if config.optimizer.name == "muon":  # one of a matrix; embedding and head have Adam
        return 1 + _vocabulary(config.model) / num_parameters(config)
    return MOMENTS.get(config.optimizer.name, ADAM)


def _second_moments(model) -> float:
    """Return how many numbers Adafactor keeps for a weight of the decoder, see training/optimizers.py."""
    D, F, H = model.embed_dim, model.mlp_dim, head_dim(model)
    mlps = [(model.num_experts, D, F)] if model.num_experts else [(D, F)]
    mlps += [(D, model.shared_experts * F)] if model.shared_experts else []
    layer = 2 * [(D, model.num_heads, H), (D, model.num_kv_heads, H)] + 3 * mlps
    shapes = model.num_layers * layer + (1 if model.tie_embeddings else 2) * [(model.vocab_size, D)]
    kept = 0.0
    for shape in shapes:
        rows, columns = sorted(shape)[-2:]
        kept += math.prod(shape) * (1 / rows + 1 / columns if rows >= FACTORED else 1)
    return kept / sum(map(math.prod, shapes))


def predict(config) -> float:
    """Return the predicted bytes of one device; the mesh has to be resolved."""
    model, mesh, train = config.model, config.mesh, config.train
    D, F, V = model.embed_dim, model.mlp_dim, model.vocab_size
    number, trained, microbatches = num_parameters(config), num_trained(config), train.gradient_accumulation or 1
    shards = mesh.fsdp * mesh.context * mesh.expert * mesh.model
    weights = trained * FLOAT32 / shards
    frozen = number if config.lora.rank else number - trained + _reference(config)
    frozen *= (FLOAT32 if model.dtype == "float32" else BFLOAT16) / shards
    rows = train.global_batch / (batch_shards(mesh) * microbatches)
    tokens = rows * train.sequence_length / mesh.context
    padded = math.ceil(head_dim(model) / LANES) * LANES
    a_head = tokens * padded * BFLOAT16 / mesh.model
    mlps = model.experts_per_token + model.shared_experts if model.num_experts else 1
    owners = mesh.model * (mesh.expert if model.num_experts else 1)  # devices that share an all-gathered layer
    layers = model.num_layers + (config.error_correction.num_layers if train.objective == "error_correction" else 0)
    held = {
        "stream": tokens * D * BFLOAT16,
        "wide": tokens * F * mlps * BFLOAT16 / mesh.model,
        "heads": (model.num_heads + 2 * model.num_kv_heads) * a_head,
        "layer": (number - _vocabulary(model)) / layers * BFLOAT16 / owners,
        "copies": weights * BFLOAT16 / FLOAT32,
        "head": V * D * FLOAT32 / mesh.model,
        "accumulated": weights if microbatches > 1 else 0,
    }
    attended = model.num_heads * (a_head + tokens * FLOAT32 / mesh.model)  # the output and its log-sum-exp
    kept = {"full": 0, "attended": attended, "query": attended + model.num_heads * a_head}
    kept["attention"] = attended + held["heads"]
    kept["up"] = kept["attention"] + held["wide"]
    kept["hidden"] = attended + model.num_kv_heads * a_head + 2 * held["wide"]
    kept["mlp"] = kept["hidden"] + model.num_heads * a_head
    kept["dots"] = kept["attention"] + 2 * held["wide"]
    kept["none"] = kept["dots"] + sum(often * held[name] for name, often in WITHOUT_REMAT.items())
    saved = layers * (held["stream"] + kept[model.remat])
    moment_bytes = weights * moments(config)
    if train.offload == "optimizer":  # moments arrive when the activations are freed
        moment_bytes = max(0.0, moment_bytes - saved)
    optimizer, gradients = moment_bytes + weights * bool(config.optimizer.ema_decay), weights
    temporaries = sum(often * held[name] for name, often in WORKING.items())
    return weights + frozen + optimizer + gradients + saved + temporaries
