# SPDX-License-Identifier: Apache-2.0
"""Every configuration key, once: its default, its meaning, the values that it may have, and its scope.

A recipe (configs/tiny.py, ...) is a function `get_config()` that takes this configuration or another recipe's and
changes what differs. On the command line: `--config=configs/small.py --config.train.steps=500`.

`section.name = Key(default, meaning, ...)` declares a key; configs/key.py explains what else is declared. A number
without a range is 0 or greater. The scope of a section is that of all its keys, and a key adds to it. A key whose value
is a text with a grammar, such as `data.mixture`, is checked where that text is read. settings/together.py has the rules
between keys.
"""

import functools
import math

from ml_collections import ConfigDict

from configs.adaptation_keys import KEYS as OF_ADAPTATION
from configs.key import (
    EXECUTION,
    MACHINE,
    PER_HOST,
    READ,
    RESUME,
    SECRET,
    TRANSFER,
    UNCOMPILED,
    WEIGHTS,
    Key,
    Scope,
    Section,
)
from configs.reasoning_keys import KEYS as OF_REASONING
from configs.recursion_keys import KEYS as OF_RECURSION

MESH_AXES = ("dcn_data", "data", "fsdp", "context", "expert", "model")  # of config.mesh, in their default order
OF_TWO_MODELS = ("distillation", "dpo")  # objectives whose loss takes the parameters of another model too
OF_A_MODULE = ("error_correction", "value_head")  # objectives that train a module on top of a language model
BATCH_AXES = ("dcn_data", "data", "fsdp", "expert")  # of these, the ones that split the batch

KEYS: dict[str, Key] = {}  # by dotted name

model = Section(KEYS, "model", WEIGHTS)
model.name = Key("decoder_lm", "a module of models/", defined_in="models")
model.num_layers = Key(6, "number of blocks", above=0, most=10_000)
model.embed_dim = Key(512, "width of the residual stream", above=0, most=1_000_000)
model.num_heads = Key(8, "number of query heads", above=0, most=100_000)
model.num_kv_heads = Key(8, "number of key and value heads; divides num_heads", above=0, most=100_000)
model.head_dim = Key(0, "width of a head; 0: embed_dim / num_heads", most=100_000)
model.mlp_dim = Key(1408, "hidden width of the SwiGLU; with experts, of each expert", above=0, most=10_000_000)
model.activation = Key("silu", "activation of the SwiGLU's gate", choices=("silu", "gelu_tanh"))
model.num_experts = Key(0, "number of experts (SwiGLUs) in a block; 0: one SwiGLU without a router", most=10_000)
model.experts_per_token = Key(2, "number of experts that the router chooses for a token", above=0, most=1_000)
model.shared_experts = Key(
    0, "number of shared experts: one SwiGLU of this many experts' width, for every token (DeepSeekMoE)", most=1_000
)
model.router = Key(
    "softmax", "function that scores experts: softmax (Mixtral), sigmoid (DeepSeek-V3)", choices=("softmax", "sigmoid")
)
model.gate_scale = Key(1.0, "sum of the gates of a token's experts", above=0)
model.expert_capacity = Key(
    0.0, "slots of an expert, as a multiple of its mean load; tokens beyond them are dropped; 0: no token is dropped",
    most=100_000.0, scope=EXECUTION,
)  # fmt: skip
model.vocab_size = Key(8192, "rows of the embedding; at least the tokenizer's number of ids", above=0, most=100_000_000)
model.max_length = Key(1024, "length of the longest sequence, in tokens", above=0, most=10**9, scope=EXECUTION)
model.rope_theta = Key(10_000.0, "base of the rotary frequencies", above=1, scope=TRANSFER)
model.rope_scaling = Key(
    "none", "how rotary positions are extended to longer sequences",
    choices=("none", "linear", "llama3", "yarn"), scope=TRANSFER,
)  # fmt: skip
model.rope_factor = Key(1.0, "how many times longer sequences may be with rope_scaling", least=1, scope=TRANSFER)
model.rope_original_length = Key(
    0, "sequence length that the weights were first trained on, in tokens; for llama3 and yarn", scope=TRANSFER
)
model.local_rope_theta = Key(
    0.0, "base of the rotary frequencies in layers with a sliding window, without rope_scaling; 0: as in other layers",
    above=1, also=0, scope=TRANSFER,
)  # fmt: skip
model.norm_epsilon = Key(1e-5, "added to the mean square in RMSNorm", above=0)
model.norm_from_one = Key(False, "whether the scale of an RMSNorm is 1 + its parameter (Gemma)")
model.post_norms = Key(False, "whether the outputs of attention and MLP are normalised too, by RMSNorms")
model.embed_scale = Key(0.0, "factor on the embedding of a token; 0: sqrt(embed_dim)")
model.tie_embeddings = Key(False, "whether the head is the transposed embedding")
model.biases = Key(
    "none", "products with a bias: none, qkv (queries, keys, values), all (except the head)",
    choices=("none", "qkv", "all"),
)  # fmt: skip
model.qk_norm = Key(False, "whether queries and keys are normalised over the head dim, by RMSNorms")
model.query_scalar = Key(0.0, "attention scores are divided by the square root of this; 0: of head_dim")
model.logit_soft_cap = Key(0.0, "cap in cap * tanh(logits / cap) on the logits; 0: off")
model.attention_soft_cap = Key(0.0, "cap in cap * tanh(scores / cap) on the attention scores; 0: off")
model.sliding_window = Key(0, "number of latest tokens that a query sees, including its own; 0: all tokens")
model.global_every = Key(0, "every n-th layer sees all tokens despite sliding_window; 0: no layer does")
model.dropout = Key(
    0.0, "probability in training that an entry of the embeddings or of a sublayer's output is set to zero",
    below=1, scope=EXECUTION,
)  # fmt: skip
model.mup_base_dim = Key(
    0, "width at which learning_rate was tuned; muP adapts it to embed_dim; 0: off", most=1_000_000
)
model.dtype = Key(
    "auto", "compute type; auto: bfloat16, but float32 on CPUs that do not multiply bfloat16. Float32 "
    "is slow on a TPU; JAX_DEFAULT_MATMUL_PRECISION=default in the environment lets it round factors to bfloat16",
    choices=("auto", "bfloat16", "float32"), scope=EXECUTION,
)  # fmt: skip
model.quantization = Key(
    "none", "type of the products with the blocks' weights: none (dtype), int8 (v5e, v5p, v6e, Hopper), fp8 (Hopper)",
    choices=("none", "int8", "fp8"), scope=EXECUTION,
)  # fmt: skip
model.attention = Key(
    "auto", "auto: a fused kernel on TPUs, GPUs and one CPU; reference: all scores in memory",
    choices=("auto", "reference"), scope=EXECUTION,
)  # fmt: skip
model.layer_loop = Key(
    "auto", "scan: one compiled block; unroll: one per layer; auto: unroll few layers on one GPU or a CPU, else scan",
    choices=("auto", "scan", "unroll"), scope=EXECUTION | RESUME | READ,
)  # fmt: skip
model.remat = Key(
    "none", "what the backward pass does not recompute: all (none) to nothing (full)", scope=EXECUTION | RESUME | READ,
    choices=("none", "dots", "mlp", "hidden", "up", "attention", "query", "attended", "full"),
)  # fmt: skip
model.levels = Key(256, "of mlp_classifier: inputs are integers below it; the largest counts as 1", least=2)
# Of models/trm.py only:
model.mixer = Key("attention", "what mixes positions; mlp: a SwiGLU over them", choices=("attention", "mlp"))
model.positions = Key("rope", "how a position is encoded", choices=("rope", "learned", "sinusoidal", "none"))
model.high_cycles = Key(3, "cycles of a step over both latents; see gradient_cycles", above=0, most=1_000)
model.low_cycles = Key(
    6, "updates of low latents in a cycle, before that of the high latent; 0 only if low_latents=0", most=1_000
)
model.low_latents = Key(
    1, "low latents, which are updated in turns; divides low_cycles; 0: a single latent", most=1_000
)
model.gradient_cycles = Key(1, "last cycles with a gradient; at most high_cycles", above=0, most=1_000, scope=EXECUTION)
model.update_rate = Key(1.0, "part of the way from a latent to its update that it moves (EqR: 0.95)", above=0, most=1)
model.convolution = Key(
    0, "width of a convolution over positions of the hidden units of the SwiGLU (URM: 2); 0: none", most=1_000
)
model.networks = Key(1, "number of networks; 2: the high latent is updated by its own", choices=(1, 2))
model.puzzle_dim = Key(512, "width of a puzzle's embedding; 0: puzzles have no embeddings", most=1_000_000)
model.prefix_length = Key(16, "positions before the cells, for puzzle_dim; 0: as many as it fills", most=1_000_000)
model.num_puzzles = Key(1, "rows of the table of puzzle embeddings", above=0, most=10**9)
# Of models/mlp_regressor.py and models/vector_decoder.py only:
model.input_dim = Key(1, "numbers of an input", above=0, most=1_000_000)
model.output_dim = Key(1, "numbers of an output of mlp_regressor, such as classes", above=0, most=1_000_000)

lora = Section(KEYS, "lora")  # low-rank adapters (arXiv:2106.09685) of the weights of train.init_from
lora.rank = Key(0, "rank of the adapters, which are then the only trained weights; 0: no adapters", most=100_000)
lora.alpha = Key(16.0, "the output of adapters is multiplied by alpha / rank", above=0)
lora.targets = Key(
    "query,value", "weights with adapters: some of query, key, value, out and, without experts, gate, up, down"
)

KEYS |= OF_RECURSION  # supervision, and inference of puzzles
distillation = Section(KEYS, "distillation")  # of the objective "distillation"
distillation.teacher = Key("", "folder of the teacher's run; to rehearse only, a recipe, configs/NAME.py")
distillation.divergence = Key(
    "forward", "divergence of the logits: forward, KL(teacher || student), or reverse", choices=("forward", "reverse")
)
distillation.temperature = Key(2.0, "temperature of both softmaxes in the divergence", above=0)
distillation.soft_weight = Key(0.5, "weight of the divergence, which is also multiplied by temperature^2")
distillation.hard_weight = Key(0.5, "weight of the cross-entropy with the targets")
distillation.hidden_weight = Key(
    0.0, "weight of the squared distance between both last streams, the student's being projected; 0: off"
)

preference = Section(KEYS, "preference")  # of the objective "dpo"
preference.beta = Key(0.1, "strength of the penalty on leaving the reference, the model of train.init_from", above=0)

KEYS |= OF_ADAPTATION  # meta and plasticity
AXIS_SIZE = dict(least=1, also=-1, most=1_000_000)
mesh = Section(KEYS, "mesh", MACHINE | RESUME | READ)  # devices per axis; at most one -1: all remaining devices
mesh.dcn_data = Key(
    1, "slices that the data-centre network joins, each with a replica and a part of the batch", **AXIS_SIZE
)
mesh.data = Key(1, "data parallelism: replicas of the model, each with a part of the batch", **AXIS_SIZE)
mesh.fsdp = Key(-1, "fully sharded data parallelism: batch and parameters are sharded", **AXIS_SIZE)
mesh.context = Key(1, "context parallelism: sequence and parameters are sharded", **AXIS_SIZE)
mesh.expert = Key(1, "expert parallelism: experts and batch are sharded; mesh.model shards experts too", **AXIS_SIZE)
mesh.model = Key(1, "tensor parallelism: heads, MLP and vocabulary are sharded", **AXIS_SIZE)

layout = Section(KEYS, "layout", MACHINE | RESUME | READ)
layout.axis_order = Key(",".join(MESH_AXES), "order of the mesh axes, slowest to change first; dcn_data stays first")
layout.changes = Key("", 'meshes by step: after which step which mesh is used, "100: data=4,fsdp=2; 200: fsdp=8"')

data = Section(KEYS, "data", RESUME | READ | UNCOMPILED)  # docs/resume.md says what must stay the same on resume
data.source = Key("auto", "a function of input_pipeline/sources.py; auto: by the suffix of path, python without one")
data.path = Key(
    "", "file, directory or glob; for huggingface a directory or a name on the hub, and :SPLIT (train); for "
    "reasoning_gym the name of a generator",
)  # fmt: skip
data.mixture = Key("", 'instead of data.path: weights and paths, "0.7 code/**/*.py; 0.3 books.jsonl"')
data.stream = Key("", 'instead of data.path: tasks one after the other, paths with examples, "a.txt:1000,b.txt:1000"')
data.field = Key("text", "column or key with the document, in jsonl, parquet, tfrecord, csv, huggingface")
data.subset = Key("", "subset (configuration) of a Hugging Face dataset")
data.bad_documents = Key(
    "error", "what to do at an unreadable document; skip: count and report it", choices=("error", "skip")
)
data.max_document_mib = Key(
    256, "largest line, row or record of a file with many documents, in MiB; a text file is read in pieces",
    least=1, most=1 << 20,
)  # fmt: skip
BUILT_IN_TOKENIZERS = ("byte", "numbers")  # those without a file
data.tokenizer = Key(
    "sentencepiece",
    'sentencepiece (trained on the corpus), byte, numbers, or a path (.model, .json); "": none',
    scope=WEIGHTS,
)
data.cache_dir = Key(
    "", 'folder of tokenizers, shards and compiled programs; "": $XDG_CACHE_HOME/torus or ~/.cache/torus',
    scope=MACHINE | PER_HOST,
)  # fmt: skip
data.holdout_fraction = Key(0.05, "fraction of documents held out, by a hash of their content", above=0, below=1)
data.validation_path = Key("", 'path of separate held-out documents; "": holdout_fraction of the training documents')
data.puzzle_size = Key(9, "side of randomly made boards: Sudokus 4, 6, 9; mazes 3 and more", above=0, most=1_000)
data.puzzle_count = Key(1000, "number of training puzzles, from the file or made at random", above=0, most=100_000_000)
data.puzzle_augmentations = Key(
    1000, "augmented versions of each puzzle, besides the original; above 0, a maze has 8 in all", most=1_000_000
)
data.puzzle_min_difficulty = Key(0, "lowest difficulty rating of puzzles, held-out ones too")
data.puzzle_clues = Key(0, "number of clues of Sudokus made at random; 0: as few as leave one solution")
data.puzzle_heldout = Key(1000, "number of held-out puzzles, if puzzles are made at random", above=0, most=100_000_000)
data.puzzle_set = Key("arc1", "version of ARC", choices=("arc1", "arc2"))
data.task_ways = Key(5, "classes of a task, for glyphs", least=2, most=50)
data.task_dim = Key(5, "numbers of an input, for linear_maps", above=0, most=1_000)
data.readers = Key(0, "threads that make batches; 0: automatic", most=1_000, scope=MACHINE | PER_HOST)
data.prefetch = Key(0, "batches made ahead; 0: automatic", most=10_000, scope=MACHINE | PER_HOST)

optimizer = Section(KEYS, "optimizer")
optimizer.name = Key("adamw", "a function of training/optimizers.py", defined_in="training/optimizers.py")
optimizer.learning_rate = Key(1e-3, "learning rate at the peak", above=0)
optimizer.schedule = Key("cosine", "a function of training/schedules.py", defined_in="training/schedules.py")
optimizer.warmup_steps = Key(100, "steps of a linear warm-up from 0 to the peak")
optimizer.final_fraction = Key(0.1, "learning rate at the end, as a fraction of the peak", most=1)
optimizer.cooldown_fraction = Key(0.2, "last fraction of the steps, over which warmup_stable_decay falls", most=1)
optimizer.weight_decay = Key(0.1, "decoupled weight decay; multiplied by the learning rate")
optimizer.decayed = Key("matrices", "what decays; matrices: no norms, biases, embeddings", choices=("matrices", "all"))
optimizer.table_learning_rate = Key(1e-2, "learning rate of the table of puzzle embeddings, at the peak")
optimizer.table_weight_decay = Key(0.1, "weight decay of those rows of the table that the batch uses")
optimizer.bias_step = Key(1e-3, "step of a router's bias against the load of each expert; 0: no steps", scope=WEIGHTS)
optimizer.beta1 = Key(0.9, "decay of the first moment, or of the momentum", below=1)
optimizer.beta2 = Key(0.95, "decay of the second moment", below=1)
optimizer.epsilon = Key(1e-8, "added to the root of the second moment", above=0)
optimizer.clip_norm = Key(1.0, "largest global norm of the gradient; 0: no clipping")
optimizer.ema_decay = Key(0.0, "decay of a moving average of the parameters, which is evaluated; 0: off", below=1)

train = Section(KEYS, "train")
train.objective = Key("language_modeling", "a module of objectives/", defined_in="objectives")
train.init_from = Key("", 'folder of a run of the same model, whose weights the run begins with; "": random weights')
train.steps = Key(1000, "number of optimizer updates; 0: from train.tokens or train.epochs", scope=RESUME)
train.tokens = Key(
    0, "instead of steps: training tokens; a step has global_batch * sequence_length", most=10**18, scope=RESUME
)
train.epochs = Key(0.0, "instead of steps: passes over the training documents", most=1e9, scope=RESUME)
train.global_batch = Key(32, "sequences in an update, over all devices", above=0, most=10**9, scope=RESUME | READ)
train.sequence_length = Key(512, "tokens in a sequence", above=0, most=10**9, scope=WEIGHTS)
train.gradient_accumulation = Key(
    0, "microbatches per update; 0: 1, on CPU as many as keep each near 10 s", scope=RESUME | READ
)
train.z_loss = Key(0.0, "weight of the mean of log(Z)^2, Z being the softmax's denominator; 0: off")
train.balance_loss = Key(0.0, "weight of the loss that balances experts, in each microbatch (Switch: 1e-2); 0: off")
train.router_z_loss = Key(0.0, "weight of the mean of log(Z)^2 of the routers (ST-MoE: 1e-3); 0: off")
train.loss_chunk_tokens = Key(
    0, "tokens of a device whose logits exist at once; 0: as many as fit 1 GiB, on CPU 64 MiB", scope=RESUME
)
train.offload = Key(
    "none", "optimizer: its moments are kept in the hosts' memory between updates", choices=("none", "optimizer")
)
train.sum_dtype = Key(
    "auto", "type in which devices sum a layer's gradients; auto: compute type; float32 needs mesh.context=1",
    choices=("auto", "float32"), scope=RESUME,
)  # fmt: skip
train.seed = Key(
    0, "seed of the initial weights, the order of examples and other random numbers of training; generated data sets "
    "do not depend on it", most=2**32 - 1,
)  # fmt: skip
train.log_every = Key(10, "steps between lines of metrics", above=0, scope=RESUME | UNCOMPILED)
train.eval_every = Key(250, "steps between evaluations; 0: only at the end", scope=RESUME | UNCOMPILED)
train.save_every = Key(
    500, "steps between checkpoints; always saved are the last step, an interruption, and steps that a CPU cuts into "
    "parts", scope=RESUME | UNCOMPILED,
)  # fmt: skip
train.spike_deviations = Key(
    0.0, "after 100 steps, skip an update whose loss, or log of the gradient norm, is this many deviations above its "
    "running mean; 0: off", scope=RESUME,
)  # fmt: skip
train.bad_steps = Key(
    10, "skipped updates in a row after which the run goes back to the last good checkpoint, and skips these batches",
    above=0, scope=RESUME,
)  # fmt: skip
train.roll_backs = Key(3, "how often a run may go back to a checkpoint; then it ends", scope=RESUME)
train.recheck_every = Key(
    0, "steps between checks: one step is computed twice, and all replicas are compared, bit by bit; 0: off",
    scope=RESUME,
)  # fmt: skip
train.hang_seconds = Key(
    1800.0, "seconds without a finished step after which each process logs its stacks and ends; 0: never. Runs whose "
    "steps a CPU takes in parts have no such limit", scope=RESUME,
)  # fmt: skip

batch = Section(KEYS, "batch", READ)  # how train.global_batch is reached, in memory and in time
batch.fit = Key(
    "none", "auto: as few microbatches as memory allows, instead of train.gradient_accumulation",
    choices=("none", "auto"), scope=RESUME,
)  # fmt: skip
batch.memory_gib = Key(0.0, "memory of a device that fit=auto may use, in GiB; 0: all of it", scope=RESUME)
batch.ramp = Key(
    "none", "growth up to train.global_batch: none, steps (always), noise_scale (only while that is larger)",
    choices=("none", "steps", "noise_scale"),
)  # fmt: skip
batch.first = Key(0, "sequences in the first updates of a ramp")
batch.increase_step = Key(2000, "steps of a ramp from one size to the next", above=0)
# With a smaller factor, a ramp would have too many stages to iterate over.
batch.increase_factor = Key(
    1.2, "factor from one size to the next, before rounding to what mesh and microbatches divide",
    above=1.001, most=1000,
)  # fmt: skip
batch.learning_rate = Key(
    "none", "learning rate of smaller batches: none (the same), sqrt or linear (of their share of global_batch)",
    choices=("none", "sqrt", "linear"),
)  # fmt: skip
batch.noise_scale = Key(False, "whether to measure the gradient noise scale (arXiv:1812.06162), in sequences")

checkpoint = Section(KEYS, "checkpoint", RESUME | UNCOMPILED)
checkpoint.resume = Key(True, "whether a workdir with a checkpoint is resumed; false: it is refused")
checkpoint.keep = Key(2, "number of newest checkpoints that are kept", above=0, scope=READ)
checkpoint.keep_every = Key(0, "checkpoints at multiples of this many steps are also kept; 0: off", scope=READ)
checkpoint.keep_best = Key(
    1, "number of checkpoints that are also kept, by lowest held-out loss at their own step", scope=READ
)
checkpoint.staging = Key(
    "", 'local folder to save to, before files are copied; "": none; for a bucket in the cache', scope=MACHINE
)
checkpoint.restore = Key(
    "read", "read: every replica reads the checkpoint; broadcast: one replica reads it and sends it to the others",
    choices=("read", "broadcast"), scope=MACHINE,
)  # fmt: skip
checkpoint.per_host = Key(
    False,
    "whether each host keeps its part of a checkpoint on its own disk, as the hosts share no folder",
    scope=MACHINE,
)

evaluation = Section(KEYS, "evaluation", RESUME | READ | UNCOMPILED)
evaluation.batches = Key(8, "batches of the fixed held-out subset that is evaluated during the run", above=0)
evaluation.every_epochs = Key(0.0, "instead of train.eval_every: passes over the training examples between evaluations")
evaluation.votes_every = Key(0, "steps between votes on ARC and published puzzles; 0: only at the end")
evaluation.pooled_votes = Key(False, "whether votes of earlier checkpoints count in a second score, reported apart")
evaluation.chunk_tokens = Key(0, "tokens of a sequence that are computed at once; keys and values are cached; 0: all")
evaluation.sample_tokens = Key(120, "tokens in the sample at the end of the run; 0: no sample", most=1_000_000)
evaluation.tasks = Key("", 'files of questions that are scored, separated by commas, see docs/scoring.md; "": none')
evaluation.tasks_every = Key(0, "steps between scorings of evaluation.tasks; 0: only at the end")

causality = Section(KEYS, "causality", RESUME | READ | UNCOMPILED)
causality.prompt = Key("", 'a text whose continuation is explained during the run, see docs/causality.md; "": none')
causality.corrupt = Key("", "a text of as many tokens that is continued in another way")
causality.every = Key(0, "steps between causal analyses; 0: those between evaluations, train.eval_every")

inference = Section(KEYS, "inference", RESUME | READ | UNCOMPILED)
inference.cache_dtype = Key(
    "model", "type of cached keys and values when a model decodes; int8 has a scale for each token and head",
    choices=("model", "int8"),
)  # fmt: skip
KEYS |= OF_REASONING
logging = Section(KEYS, "logging", MACHINE | RESUME | UNCOMPILED)
logging.tensorboard = Key(True, "whether to write event files to workdir/tensorboard")
logging.report = Key(True, "whether to write report.html at the end of the run")
logging.alerts = Key(
    "", 'web address that gets a JSON POST when a run fails, stalls, diverges, loses a process or a checkpoint, or '
    'finishes; "": the address in TORUS_ALERTS_URL, or none', scope=SECRET,
)  # fmt: skip
logging.wandb = Key(False, "whether process 0 sends metrics to Weights & Biases; WANDB_MODE=offline: to a folder only")
logging.trackio = Key(False, "whether process 0 keeps metrics in the local dashboard trackio")


@functools.cache
def keys_of(scope: Scope) -> frozenset[str]:
    """Return the dotted names of the keys that have all of a scope."""
    return frozenset(name for name, key in KEYS.items() if scope in key.scope)


def get_config() -> ConfigDict:
    """Return the locked base configuration; a 6-layer, 512-wide decoder language model."""
    sections = {}
    for full_name, key in KEYS.items():
        section, name = full_name.split(".")
        sections.setdefault(section, {})[name] = key.default
    return ConfigDict(sections).lock()


def batch_shards(mesh: ConfigDict) -> int:
    """Return the number of parts into which a resolved mesh splits the batch."""
    return math.prod(mesh[axis] for axis in BATCH_AXES)


def supports_shard_map(config: ConfigDict) -> bool:
    """Return whether each of several devices can compute its own part of rows, heads and length in a shard_map."""
    mesh = config.mesh
    return mesh.context == 1 and math.prod(mesh.values()) > 1 and config.train.sequence_length % mesh.model == 0
