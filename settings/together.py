# SPDX-License-Identifier: Apache-2.0
"""Rules between keys, in two tables: values of one key that need values of another, and keys that are not read."""

from collections.abc import Iterator

from ml_collections import ConfigDict

from configs.base import KEYS
from configs.errors import ConfigError, shown
from configs.recursion_keys import KEYS as OF_RECURSION
from settings.keys import flat
from settings.resolving import Loaded

ANY, NONE = "any value but 0 and ''", (0, "")
GROWS = ("steps", "noise_scale")
OF_UNITS = ("continual_backprop", "redo", "redraw")  # methods of plasticity that need a model with hidden units
OF_PLASTICITY = (*OF_UNITS, "l2_init", "shrink_perturb")
OF_ONE_MODEL = ("language_modeling", "meta_language_modeling", "classification", "recursive")
PUZZLES = ("sudoku", "maze", "arc", "puzzles")
DRAWS = ("grpo", "value_head")  # objectives that train on answers of the model
OF_ROLLOUTS = ("countdown_rollouts", "reasoning_gym_rollouts")
OF_PROMPTS = (*OF_ROLLOUTS, "chat")
COUNTDOWN = ("countdown", "countdown_rollouts")  # data sources of one task
TASKS = ("sinusoids", "linear_maps", "glyphs")  # data sources of "meta_learning"
OF_FIELDS = ("auto", "jsonl", "parquet", "tfrecord", "csv", "huggingface")  # data sources of records
OF_DOCUMENTS = (*OF_FIELDS, "text", "python", "chat", "preferences")
WITHOUT_FILES = ("python", "synthetic", *COUNTDOWN, *TASKS)
OF_QUESTIONS = ("reasoning_gym", "reasoning_gym_rollouts")
SOURCES = (*OF_DOCUMENTS, "synthetic", "labeled", *PUZZLES, *COUNTDOWN, *OF_QUESTIONS, *TASKS)
WITHOUT_STREAM = (*WITHOUT_FILES, *PUZZLES, *OF_QUESTIONS)
WITHOUT_MIXTURE = (*WITHOUT_STREAM, "labeled")
META = ("meta_learning", "meta_language_modeling")
OF_VECTORS = ("mlp_regressor", "vector_decoder")
NO_DECODERS = ("trm", "mlp_classifier", "mlp_regressor")
MODELS = ("decoder_lm", "vector_decoder", *NO_DECODERS)
WITHOUT_TEXT = ("classification", "meta_learning", "recursive")  # objectives on numbers or puzzles
OBJECTIVES = (*OF_ONE_MODEL, "meta_learning", "distillation", "dpo", "error_correction", *DRAWS)
BY_GRADIENT = ("maml", "first_order_maml", "reptile")
OURS = {"model.name": MODELS, "train.objective": OBJECTIVES, "data.source": SOURCES}  # modules may be added to them
UNREAD = "this model does not read it"
SHARED = "a task's gradient is that of one device; use --config.mesh.data or --config.mesh.fsdp"
SPIKES = "the loss rises with each {}; --config.train.spike_deviations=0 also continues an older run"
NEEDS = (  # a key, its values (or ANY) that need another key, the values (or ANY) of that key, and the reason
    ("model.num_experts", ANY, "model.name", ("decoder_lm",), ""),
    ("model.num_experts", ANY, "model.activation", ("silu",), ""),
    ("model.num_experts", ANY, "model.quantization", ("none",), ""),
    ("model.num_experts", ANY, "model.biases", ("none",), ""),
    ("model.num_experts", ANY, "model.mup_base_dim", NONE, ""),
    ("model.num_experts", ANY, "mesh.context", (1,), "mesh.fsdp splits what mesh.context would"),
    ("model.name", NO_DECODERS, "model.global_every", NONE, UNREAD),
    ("model.name", NO_DECODERS, "model.local_rope_theta", NONE, UNREAD),
    ("model.global_every", ANY, "model.sliding_window", ANY, "the tokens that the other layers see"),
    ("model.local_rope_theta", ANY, "model.sliding_window", ANY, "only layers with a window read it"),
    ("model.rope_scaling", ("none",), "model.rope_factor", (1,), "which linear, llama3 and yarn read"),
    ("model.rope_scaling", ("none", "linear"), "model.rope_original_length", NONE, "which llama3 and yarn read"),
    ("model.rope_scaling", ("llama3", "yarn"), "model.rope_original_length", ANY, "that the weights were trained on"),
    ("model.name", ("trm",), "train.objective", ("recursive",), ""),
    ("model.name", ("mlp_classifier",), "train.objective", ("classification",), ""),
    ("model.name", ("mlp_classifier",), "data.source", ("labeled",), ""),
    ("train.objective", ("classification",), "model.name", ("mlp_classifier",), ""),
    ("train.objective", WITHOUT_TEXT, "evaluation.chunk_tokens", NONE, "that is of language models"),
    ("train.objective", WITHOUT_TEXT, "evaluation.tasks", NONE, "which are texts"),
    ("model.name", ("mlp_classifier", "trm"), "mesh.context", (1,), "use --config.mesh.data or --config.mesh.fsdp"),
    ("model.name", ("trm",), "mesh.expert", (1,), "use --config.mesh.data or --config.mesh.fsdp"),
    ("model.name", ("mlp_classifier", "trm"), "mesh.model", (1,), "use --config.mesh.data or --config.mesh.fsdp"),
    ("train.objective", ("recursive",), "model.name", ("trm",), ""),
    ("model.convolution", ANY, "model.name", ("trm",), ""),
    ("model.name", NO_DECODERS, "model.quantization", ("none",), UNREAD),
    ("model.name", NO_DECODERS, "model.sliding_window", NONE, UNREAD),
    ("model.name", NO_DECODERS, "model.mup_base_dim", NONE, "muP is for decoders"),
    ("model.name", (*NO_DECODERS, "vector_decoder"), "model.dropout", NONE, UNREAD),
    ("model.name", (*NO_DECODERS, "vector_decoder"), "model.tie_embeddings", (False,), UNREAD),
    ("model.name", ("trm",), "plasticity.method", ("none", "l2_init", "shrink_perturb"), "it names no hidden units"),
    ("model.name", ("trm",), "plasticity.measure", NONE, "it names no hidden units"),
    ("train.objective", ("recursive",), "batch.ramp", ("none",), "its rows hold puzzles"),
    ("train.objective", ("recursive",), "checkpoint.restore", ("read",), "each host holds the answers of its rows"),
    ("train.objective", ("distillation",), "distillation.teacher", ANY, "the folder of a run"),
    ("distillation.teacher", ANY, "train.objective", ("distillation",), "nothing else has a teacher"),
    ("train.objective", ("dpo",), "train.init_from", ANY, "the folder of a run: it begins there, held to it"),
    ("train.objective", ("dpo",), "data.source", ("preferences",), ""),
    ("train.objective", ("dpo",), "evaluation.chunk_tokens", NONE, "it compares whole answers"),
    ("train.objective", (*WITHOUT_TEXT, "dpo", *DRAWS), "train.z_loss", NONE, "a part of another loss"),
    ("data.source", ("synthetic",), "evaluation.tasks", NONE, "which need a tokenizer"),
    ("evaluation.tasks_every", ANY, "evaluation.tasks", ANY, "the files of questions"),
    ("train.objective", WITHOUT_TEXT, "causality.prompt", NONE, "which is a text"),
    ("data.source", ("synthetic",), "causality.prompt", NONE, "which needs a tokenizer"),
    ("train.objective", DRAWS, "data.source", OF_PROMPTS, "where the model answers prompts"),
    ("data.source", OF_ROLLOUTS, "train.objective", DRAWS, "which draws the answers"),
    ("data.source", OF_QUESTIONS, "data.path", ANY, "a generator of reasoning-gym, such as leg_counting"),
    ("train.objective", DRAWS, "batch.ramp", ("none",), "its rows are groups of answers"),
    ("train.objective", DRAWS, "mesh.context", (1,), "answers are drawn whole"),
    ("train.objective", DRAWS, "evaluation.chunk_tokens", NONE, "its rows also have rewards"),
    ("train.objective", DRAWS, "model.expert_capacity", NONE, "answers are drawn without it"),
    ("train.objective", ("dpo", *DRAWS), "train.balance_loss", NONE, "a part of another loss"),
    ("train.objective", ("dpo", *DRAWS), "train.router_z_loss", NONE, "a part of another loss"),
    ("train.objective", ("value_head",), "train.init_from", ANY, "the folder of the run that draws the answers"),
    ("train.objective", ("value_head",), "lora.rank", NONE, "it trains a head alone"),
    ("train.objective", ("value_head",), "grpo.kl", NONE, "the model does not change"),
    ("grpo.kl", ANY, "train.init_from", ANY, "the folder of a run: it begins there, held to it"),
    ("train.objective", ("error_correction",), "model.name", ("decoder_lm",), ""),
    ("train.objective", ("error_correction",), "mesh.model", (1,), "a token is judged by its neighbours"),
    ("train.objective", ("error_correction",), "lora.rank", NONE, "the module is trained instead of adapters"),
    ("train.objective", ("error_correction",), "evaluation.chunk_tokens", NONE, "it sees both sides of a token"),
    ("error_correction.use_error_correction", (True,), "train.objective", ("error_correction",), "which trains it"),
    ("tot.value", ("value_head",), "train.objective", ("value_head",), "which trains the head"),
    ("tot.use_tot", (True,), "data.source", COUNTDOWN, "whose answers are lines that can be checked"),
    ("causality.prompt", ANY, "causality.corrupt", ANY, "the text that it is compared with"),
    ("causality.corrupt", ANY, "causality.prompt", ANY, "the text that it is compared with"),
    ("causality.every", ANY, "causality.prompt", ANY, "the text that is explained"),
    ("causality.prompt", ANY, "model.expert_capacity", NONE, "whether a token is dropped depends on the others"),
    ("train.objective", META, "mesh.context", (1,), SHARED),
    ("train.objective", META, "mesh.expert", (1,), SHARED),
    ("train.objective", META, "mesh.model", (1,), SHARED),
    ("train.objective", META, "model.num_experts", NONE, "a task has no tokens to balance them"),
    ("train.objective", ("meta_learning",), "model.name", OF_VECTORS, "its examples are numbers"),
    ("train.objective", ("meta_learning",), "data.source", TASKS, "which are made of tasks"),
    ("train.objective", ("meta_language_modeling",), "model.name", ("decoder_lm",), ""),
    ("train.objective", ("meta_language_modeling",), "meta.method", BY_GRADIENT, "which adapt any model"),
    ("train.objective", ("meta_language_modeling",), "lora.rank", NONE, "all weights adapt"),
    ("model.name", OF_VECTORS, "train.objective", ("meta_learning",), ""),
    ("model.name", ("vector_decoder",), "meta.method", ("in_context",), "it reads the examples of a task"),
    ("model.name", ("vector_decoder",), "model.vocab_size", (1,), "the width of its output"),
    ("data.source", TASKS, "train.objective", ("meta_learning",), ""),
    ("meta.method", ("in_context",), "model.name", ("vector_decoder",), "which reads the examples of a task"),
    ("meta.method", ("in_context",), "meta.loss", ("squared_error",), "it predicts numbers"),
    ("meta.method", ("prototypical",), "meta.loss", ("cross_entropy",), "it compares classes"),
    ("meta.method", ("reptile",), "meta.inner_steps", ANY, "without a step it learns nothing"),
    ("meta.learn_rates", (True,), "meta.method", BY_GRADIENT[:2], "only their gradient reaches the step sizes"),
    ("train.init_from", ANY, "model.name", ("decoder_lm",), ""),
    ("train.init_from", ANY, "distillation.hidden_weight", NONE, "it has no projection to the teacher's width"),
    ("lora.rank", ANY, "train.init_from", ANY, "the folder of the run whose weights are adapted"),
    ("lora.rank", ANY, "distillation.teacher", NONE, ""),
    ("lora.rank", ANY, "model.quantization", ("none",), ""),
    ("data.source", WITHOUT_FILES, "data.path", NONE, "which auto and text read"),
    ("data.source", WITHOUT_MIXTURE, "data.mixture", NONE, "which auto and text read"),
    ("data.source", WITHOUT_MIXTURE, "data.validation_path", NONE, "which auto and text read"),
    ("data.source", WITHOUT_STREAM, "data.stream", NONE, "which auto, text and labeled read"),
    ("data.path", ANY, "data.stream", NONE, "empty one of them, as with --config.data.stream="),
    ("data.mixture", ANY, "data.stream", NONE, "empty one of them, as with --config.data.stream="),
    ("data.path", ANY, "data.mixture", NONE, "empty one of them, as with --config.data.mixture="),
    ("plasticity.method", OF_PLASTICITY, "lora.rank", NONE, "adapters have no hidden units"),
    ("plasticity.method", OF_PLASTICITY, "train.objective", OF_ONE_MODEL, "others run several models"),
    ("plasticity.method", ("shrink_perturb",), "train.spike_deviations", NONE, SPIKES.format("perturbation")),
    ("data.stream", ANY, "train.spike_deviations", NONE, SPIKES.format("new task")),
    ("plasticity.measure", ANY, "lora.rank", NONE, "adapters have no hidden units"),
    ("plasticity.measure", ANY, "evaluation.chunk_tokens", NONE, "it measures whole sequences"),
    ("plasticity.measure", ANY, "train.objective", OF_ONE_MODEL, "others run several models"),
    ("checkpoint.per_host", ANY, "checkpoint.staging", NONE, "each host writes to its own disk anyway"),
    ("checkpoint.per_host", ANY, "checkpoint.restore", ("read",), "each host reads its own part"),
    ("batch.fit", ("auto",), "train.gradient_accumulation", NONE, "both say how many microbatches"),
    ("batch.ramp", ("none",), "batch.first", NONE, "which steps and noise_scale read"),
    ("batch.ramp", GROWS, "evaluation.every_epochs", NONE, "an epoch has no fixed steps; use train.eval_every"),
    ("batch.ramp", ("noise_scale",), "train.steps", ANY, "the ramp decides during the run how many tokens a step has"),
    ("layout.changes", ANY, "batch.fit", ("none",), "which is of one mesh; set --config.train.gradient_accumulation"),
)

OF_INNER_LOOP = ("meta.inner_steps", "meta.eval_steps", "meta.inner_rate", "meta.learn_rates")
OF_RECURSIVE_MODEL = (
    "model.mixer", "model.positions", "model.high_cycles", "model.low_cycles", "model.low_latents",
    "model.gradient_cycles", "model.update_rate", "model.networks", "model.puzzle_dim", "model.prefix_length",
    "model.num_puzzles", "optimizer.table_learning_rate", "optimizer.table_weight_decay",
)  # fmt: skip
OF_PUZZLES = (
    "data.puzzle_size", "data.puzzle_count", "data.puzzle_heldout", "data.puzzle_min_difficulty", "data.puzzle_clues",
    "data.puzzle_augmentations", "data.puzzle_set", "evaluation.votes_every", "evaluation.pooled_votes",
)  # fmt: skip
OF_ATTENTION = ("model.embed_dim", "model.num_heads", "model.num_kv_heads", "model.head_dim", "model.rope_theta")
OF_DECAY = ("cosine", "cosine_from_one", "linear")  # schedules that fall during all steps after the warm-up
OF_DECODER = (
    "model.activation", "model.rope_scaling", "model.norm_epsilon", "model.norm_from_one",
    "model.post_norms", "model.embed_scale", "model.biases", "model.qk_norm", "model.query_scalar",
    "model.logit_soft_cap", "model.attention_soft_cap",
)  # fmt: skip


class AllBut(tuple):
    """All values except these."""

    def __contains__(self, value) -> bool:
        return not super().__contains__(value)


def _of_section(name: str) -> tuple[str, ...]:
    return tuple(key for key in KEYS if key.startswith(f"{name}."))


READ_WITH = (  # keys, another key that decides whether they are read, and its values (or ANY) with which they are
    ((
        "model.experts_per_token", "model.shared_experts", "model.router", "model.gate_scale", "model.expert_capacity",
        "optimizer.bias_step", "train.balance_loss", "train.router_z_loss",
    ), "model.num_experts", ANY),
    (("model.gate_scale",), "model.experts_per_token", AllBut((1,))),
    (OF_RECURSIVE_MODEL, "model.name", ("trm",)),
    ((*OF_DECODER, "inference.cache_dtype"), "model.name", AllBut(NO_DECODERS)),
    (OF_ATTENTION, "model.name", AllBut(("mlp_classifier", "mlp_regressor"))),
    (("model.levels",), "model.name", ("mlp_classifier",)),
    (("model.input_dim",), "model.name", OF_VECTORS),
    (("model.output_dim",), "model.name", ("mlp_regressor",)),
    ((
        "distillation.divergence", "distillation.temperature", "distillation.soft_weight", "distillation.hard_weight",
        "distillation.hidden_weight",
    ), "distillation.teacher", ANY),
    (("distillation.divergence", "distillation.temperature"), "distillation.soft_weight", ANY),
    (("preference.beta",), "train.objective", ("dpo",)),
    (_of_section("error_correction"), "train.objective", ("error_correction",)),
    (_of_section("grpo"), "train.objective", DRAWS),
    (_of_section("meta"), "train.objective", META),
    (OF_RECURSION, "train.objective", ("recursive",)),
    (("meta.share",), "train.objective", ("meta_language_modeling",)),
    (("meta.support", "meta.loss"), "train.objective", ("meta_learning",)),
    (OF_INNER_LOOP, "meta.method", BY_GRADIENT),
    (("lora.alpha", "lora.targets"), "lora.rank", ANY),
    (("plasticity.rate", "plasticity.maturity"), "plasticity.method", ("continual_backprop", "redraw")),
    (("plasticity.every",), "plasticity.method", ("redo", "shrink_perturb")),
    (("plasticity.strength",), "plasticity.method", ("l2_init",)),
    (("plasticity.shrink", "plasticity.perturb"), "plasticity.method", ("shrink_perturb",)),
    (("data.field",), "data.source", OF_FIELDS),
    (("data.subset",), "data.source", ("huggingface",)),
    (("data.bad_documents",), "data.source", OF_DOCUMENTS),
    (("data.holdout_fraction",), "data.source", (*OF_DOCUMENTS, "labeled")),
    (("data.holdout_fraction",), "data.validation_path", NONE),
    (OF_PUZZLES, "data.source", PUZZLES),
    (("data.puzzle_set",), "data.source", ("arc",)),
    (("data.puzzle_clues",), "data.source", ("sudoku",)),
    (("data.puzzle_count", "data.puzzle_min_difficulty"), "data.source", ("sudoku", "maze")),
    (("data.task_ways",), "data.source", ("glyphs",)),
    (("data.task_dim",), "data.source", ("linear_maps",)),
    (("optimizer.beta1",), "optimizer.name", AllBut(("adafactor",))),
    (("optimizer.beta2",), "optimizer.name", AllBut(("adafactor", "sgd"))),
    (("optimizer.final_fraction",), "optimizer.schedule", AllBut(("constant",))),
    (("optimizer.cooldown_fraction",), "optimizer.schedule", AllBut((*OF_DECAY, "constant"))),
    (("batch.memory_gib",), "batch.fit", ("auto",)),
    (("batch.increase_step", "batch.increase_factor", "batch.learning_rate"), "batch.ramp", GROWS),
)  # fmt: skip


def check(values: dict[str, object], *, of_mesh: bool) -> None:
    """Raise ConfigError for the first violated rule of NEEDS: with `of_mesh` those on mesh axes, else all others."""
    for key, _, other, wanted, why in _violated(values):
        if other.startswith("mesh.") == of_mesh:
            now, use = values[other], _wanted(values[other], wanted)
            *first, last = [use] if wanted in (ANY, NONE) else wanted
            uses = " or ".join([*([", ".join(map(_said, first))] if first else []), _said(last)])
            need = other if wanted is ANY else f"{other}={uses}, not {_said(now)}"
            raise ConfigError(f"{key}={values[key]} needs {need}{why and f' ({why})'}")


def without_unread(values: dict[str, object]) -> dict[str, object]:
    """Return the values of a run, those that its model does not read as NEEDS wants them: earlier versions took any."""
    unread = [(other, wanted) for _, _, other, wanted, why in _violated(values) if why == UNREAD]
    return values | {key: _wanted(values[key], wanted) for key, wanted in unread}


def _wanted(now, wanted: tuple):
    """Return the first value that a rule accepts, of the type of the present one."""
    return type(now)() if wanted is NONE else wanted[0]


def accepts(config: ConfigDict, key: str, value) -> bool:
    """Return whether the rules of NEEDS accept a value of a key together with the other values of a configuration."""
    return all(other != key for _, _, other, _, _ in _violated(flat(config) | {key: value}))


def _violated(values: dict[str, object]) -> Iterator[tuple]:
    for rule in NEEDS:
        key, with_values, other, wanted, _ = rule
        if _is(values[key], with_values) and not _accepts(other, values[other], wanted):
            yield rule


def check_typed(loaded: Loaded) -> None:
    """Raise ConfigError for the first typed key that is not read; values of recipes and defaults are allowed."""
    values = flat(loaded.config)
    for keys, owner, wanted in READ_WITH:
        for key in keys if not _accepts(owner, values[owner], wanted) else ():
            if key in loaded.typed and values[key] != KEYS[key].default:
                now = _said(shown(values[owner]))
                remedy = "empty" if wanted is NONE else "set"
                raise ConfigError(
                    f"{key}={values[key]} is not read with {owner}={now}; leave it out, or {remedy} {owner}"
                )


def _accepts(key: str, value, wanted) -> bool:
    """Return whether a value is wanted; no rule knows a model, objective or data source that was added to ours."""
    return value not in OURS.get(key, (value,)) or _is(value, wanted)


def _is(value, wanted) -> bool:
    return value not in NONE if wanted is ANY else value in wanted


def _said(value) -> str:
    return str(value) or "''"
