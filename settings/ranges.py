# SPDX-License-Identifier: Apache-2.0
"""The values that each key may have; validation.py checks the rules between keys."""

import ast
import functools
import math
import pathlib

from configs.base import MESH_AXES
from configs.errors import ConfigError, shown
from settings import ramp
from settings.keys import one_of
from settings.loading import ROOT
from settings.resolving import LARGEST_AXIS

CHOICES = {
    "model.remat": ("none", "dots", "mlp", "up", "attention", "query", "attended", "full"),
    "model.dtype": ("auto", "bfloat16", "float32"),
    "model.quantization": ("none", "int8", "fp8"),
    "model.attention": ("auto", "reference"),
    "model.layer_loop": ("auto", "scan", "unroll"),
    "model.rope_scaling": ("none", "linear", "llama3", "yarn"),
    "model.activation": ("silu", "gelu_tanh"),
    "model.biases": ("none", "qkv", "all"),
    "model.mixer": ("attention", "mlp"),
    "model.positions": ("rope", "learned", "sinusoidal", "none"),
    "model.networks": (1, 2),
    "model.router": ("softmax", "sigmoid"),
    "supervision.loss": ("stablemax", "softmax"),
    "optimizer.decayed": ("matrices", "all"),
    "distillation.divergence": ("forward", "reverse"),
    "batch.fit": ("none", "auto"),
    "batch.ramp": ("none", "steps", "noise_scale"),
    "batch.learning_rate": tuple(ramp.RATES),
    "data.bad_documents": ("error", "skip"),
    "data.puzzle_set": ("arc1", "arc2"),
    "train.offload": ("none", "optimizer"),
    "train.sum_dtype": ("auto", "float32"),
    "checkpoint.restore": ("read", "broadcast"),
}
MODULES = {"model.name": "models", "train.objective": "objectives"}  # folders of the modules
FUNCTIONS = {"optimizer.name": "training/optimizers.py", "optimizer.schedule": "training/schedules.py"}
POSITIVE = (
    "model.num_layers", "model.embed_dim", "model.num_heads", "model.num_kv_heads", "model.mlp_dim",
    "model.vocab_size", "model.max_length", "train.global_batch", "train.sequence_length", "checkpoint.keep",
    "evaluation.batches", "train.log_every", "train.bad_steps",
    "data.puzzle_size", "data.puzzle_count", "data.puzzle_heldout",
    "optimizer.learning_rate", "optimizer.epsilon", "model.norm_epsilon", "model.high_cycles",
    "model.num_puzzles", "supervision.max_steps", "model.experts_per_token", "model.gate_scale",
    "batch.increase_step", "distillation.temperature", "lora.alpha", "preference.beta",
)  # fmt: skip
FRACTIONS = ("optimizer.final_fraction", "optimizer.cooldown_fraction", "supervision.exploration")
MESH = tuple(f"mesh.{axis}" for axis in MESH_AXES)
LESS_THAN_1 = ("optimizer.beta1", "optimizer.beta2", "optimizer.ema_decay", "model.dropout")
RANGES = (  # a predicate, the rule in words, and its keys; other keys with numbers are NOT_NEGATIVE
    (lambda value: 0 < value < math.inf, "be greater than 0", POSITIVE),
    (lambda value: 1 <= value < math.inf, "be 1 or greater", ("model.rope_factor",)),
    (lambda value: 1 < value < math.inf, "be greater than 1", ("model.rope_theta",)),
    # With a smaller factor, a ramp would have too many stages to iterate over.
    (lambda value: 1.001 < value <= 1000, "be greater than 1.001 and at most 1000", ("batch.increase_factor",)),
    (lambda value: value == 0 or 1 < value < math.inf, "be greater than 1, or 0", ("model.local_rope_theta",)),
    (lambda value: 0 < value < 1, "lie between 0 and 1", ("data.holdout_fraction",)),
    (lambda value: 1 <= value <= 1 << 20, "lie between 1 and 1048576", ("data.max_document_mib",)),
    (lambda value: 0 <= value <= 1, "lie between 0 and 1", FRACTIONS),
    (lambda value: 0 <= value < 1, "be 0 or greater and less than 1", LESS_THAN_1),
    (lambda value: value == -1 or value >= 1, "be 1 or greater, or -1 for all that is left", MESH),
)
RANGE_OF = {key: (is_right, rule) for is_right, rule, keys in RANGES for key in keys}
NOT_NEGATIVE = (lambda value: 0 <= value < math.inf, "be 0 or greater")
LARGEST = {  # far above realistic values; products of these still fit into 64 bits, and loops over them end soon
    "model.num_layers": 10_000, "model.embed_dim": 1_000_000, "model.num_heads": 100_000,
    "model.num_kv_heads": 100_000, "model.head_dim": 100_000, "model.mlp_dim": 10_000_000,
    "model.num_experts": 10_000, "model.experts_per_token": 1_000, "model.shared_experts": 1_000,
    "model.expert_capacity": 100_000.0, "model.vocab_size": 100_000_000, "model.max_length": 1_000_000_000,
    "model.mup_base_dim": 1_000_000, "model.high_cycles": 1_000, "model.low_cycles": 1_000,
    "model.low_latents": 1_000, "model.puzzle_dim": 1_000_000, "model.prefix_length": 1_000_000,
    "model.num_puzzles": 1_000_000_000, "lora.rank": 100_000, "supervision.max_steps": 10_000,
    "data.puzzle_size": 1_000, "data.puzzle_count": 100_000_000, "data.puzzle_augmentations": 1_000_000,
    "data.puzzle_heldout": 100_000_000, "data.readers": 1_000, "data.prefetch": 10_000,
    "train.tokens": 10**18, "train.epochs": 1e9, "train.global_batch": 1_000_000_000,
    "train.sequence_length": 1_000_000_000, "train.seed": 2**32 - 1, "evaluation.sample_tokens": 1_000_000,
    **dict.fromkeys(MESH, LARGEST_AXIS),
}  # fmt: skip
LARGEST_INT = 2**31 - 1  # the limit of all other integers
MOST_EXAMPLES = 2**32  # a run counts examples in 32 bits


def check(values: dict[str, object]) -> None:
    """Raise ConfigError for the first dotted key whose value is none of its choices or out of range."""
    for key, choices in (CHOICES | _names()).items():
        one_of(key, values[key], choices)
    for key, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            check_number(key, value)
    check_steps(values["train.steps"], values["train.global_batch"])


def check_steps(steps: int, rows: int) -> None:
    """Raise ConfigError if a run of `steps` steps of `rows` examples has too many examples to count."""
    check_number("train.steps", steps)
    if steps * rows >= MOST_EXAMPLES:
        raise ConfigError(
            f"train.steps={steps} of train.global_batch={rows} take {steps * rows:,} examples, and a run has to have "
            f"less than {MOST_EXAMPLES:,}; use fewer steps, or fewer and longer sequences"
        )


def check_number(key: str, value: float) -> None:
    """Raise ConfigError if a number is out of the range of its key."""
    is_right, rule = RANGE_OF.get(key, NOT_NEGATIVE)
    most = LARGEST.get(key, LARGEST_INT if isinstance(value, int) else math.inf)
    if value > most:
        raise ConfigError(f"{key}={shown(value)} must be at most {most:,}")
    if not is_right(value):
        raise ConfigError(f"{key}={shown(value)} must {rule}")


@functools.cache
def _names() -> dict[str, list[str]]:
    """Return the modules and functions that a key may name."""
    modules = {key: [path.stem for path in (ROOT / room).glob("*.py")] for key, room in MODULES.items()}
    functions = {key: functions_of_config(ROOT / file) for key, file in FUNCTIONS.items()}
    return {key: sorted(names) for key, names in (modules | functions).items()}


def functions_of_config(file: pathlib.Path) -> list[str]:
    """Return the public functions of a file that take `config` first, without importing it."""
    functions = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef))
    return [f.name for f in functions if f.name[0] != "_" and f.args.args and f.args.args[0].arg == "config"]
