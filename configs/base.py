# SPDX-License-Identifier: Apache-2.0
"""Every configuration key, once: its default, its meaning and its unit.

A recipe (configs/tiny.py, ...) is a function `get_config()` that takes this configuration or another
recipe's and changes what differs. On the command line: `--config=configs/small.py --config.train.steps=500`.
"""

import math

from ml_collections import ConfigDict

MESH_AXES = ("dcn_data", "data", "fsdp", "context", "expert", "model")  # of config.mesh, in their default order
OF_TWO_MODELS = ("distillation", "dpo")  # objectives whose loss takes the parameters of another model too
BATCH_AXES = ("dcn_data", "data", "fsdp", "expert")  # of these, the ones that split the batch


def get_config() -> ConfigDict:
    """Return the locked base configuration; a 6-layer, 512-wide decoder language model."""
    config = ConfigDict()

    config.model = model = ConfigDict()
    model.name = "decoder_lm"  # a module of models/
    model.num_layers = 6  # blocks
    model.embed_dim = 512  # width of the residual stream
    model.num_heads = 8  # query heads
    model.num_kv_heads = 8  # key and value heads; divides num_heads
    model.head_dim = 0  # width of a head; 0: embed_dim / num_heads
    model.mlp_dim = 1408  # hidden width of the SwiGLU, of each expert where there are some
    model.activation = "silu"  # of its gate: silu, gelu_tanh
    model.num_experts = 0  # SwiGLUs in each block of which a token goes through a few; 0: one that all go through
    model.experts_per_token = 2  # chosen by a router
    model.shared_experts = 0  # as wide as so many, a SwiGLU that all tokens go through beside
    model.router = "softmax"  # scores of experts: softmax (Mixtral), sigmoid (DeepSeek-V3)
    model.gate_scale = 1.0  # sum of a token's gates
    model.expert_capacity = 0.0  # places in an expert over its mean load, the rest dropped; 0: nothing is dropped
    model.vocab_size = 8192  # rows of the embedding; at least the tokenizer's ids
    model.max_length = 1024  # longest sequence in tokens
    model.rope_theta = 10_000.0  # base of the rotary frequencies
    model.rope_scaling = "none"  # of positions beyond rope_original_length: none, linear, llama3, yarn
    model.rope_factor = 1.0  # how many times longer sequences get by rope_scaling
    model.rope_original_length = 0  # tokens that the weights were first trained on; for llama3, yarn
    model.local_rope_theta = 0.0  # base in layers with a window, there without rope_scaling; 0: as elsewhere
    model.norm_epsilon = 1e-5  # added to the mean square in RMSNorm
    model.norm_from_one = False  # the parameter of an RMSNorm is what its scale has more than 1
    model.post_norms = False  # RMSNorm also over what attention and MLP add to the residual stream
    model.embed_scale = 0.0  # factor on the embedding of a token; 0: sqrt(embed_dim)
    model.tie_embeddings = False  # the head is the transposed embedding
    model.biases = "none"  # added to products: none, qkv (queries, keys, values), all (but the head)
    model.qk_norm = False  # RMSNorm over the head dim of queries and keys
    model.query_scalar = 0.0  # scores are divided by its square root; 0: head_dim
    model.logit_soft_cap = 0.0  # cap * tanh(logits / cap) on the output; 0: off
    model.attention_soft_cap = 0.0  # the same on attention scores; 0: off
    model.sliding_window = 0  # tokens a query sees back, itself included; 0: all
    model.global_every = 0  # every n-th layer sees all tokens despite sliding_window; 0: none does
    model.dropout = 0.0  # part of embeddings and of what each sublayer adds that is zeroed in training
    model.mup_base_dim = 0  # embed_dim for which learning_rate was tuned, carried over by muP; 0: off
    model.dtype = "auto"  # compute type: bfloat16, float32; auto: bfloat16, on CPUs without it float32
    model.quantization = "none"  # of products with the blocks' weights: none, int8 (v5e, v5p, v6e), fp8 (Hopper)
    model.attention = "auto"  # auto: a kernel on TPUs and GPUs; reference: all scores in memory
    model.layer_loop = "auto"  # scan, unroll; auto: unroll shallow stacks on CPU unless remat is on, else scan
    model.remat = "none"  # kept to go back, from all to nothing: none, dots, mlp, up, attention, query, attended, full
    # Of models/trm.py alone:
    model.mixer = "attention"  # of positions: attention, mlp (a SwiGLU over them)
    model.positions = "rope"  # how positions are told: rope, learned, sinusoidal, none
    model.high_cycles = 3  # passes over both latents in a step, of which the last has a gradient
    model.low_cycles = 6  # updates of low latents in a pass, before that of the high one; 0 only without any
    model.low_latents = 1  # that take turns in that; divides low_cycles; 0: there is a single latent
    model.networks = 1  # 2: the high latent is updated by one of its own
    model.puzzle_dim = 512  # width of a puzzle's embedding; 0: puzzles have none
    model.prefix_length = 16  # positions before the cells, for it; 0: as many as it fills
    model.num_puzzles = 1  # rows of the table of embeddings

    config.lora = lora = ConfigDict()  # low-rank adapters (arXiv:2106.09685) of the weights of train.init_from
    lora.rank = 0  # of adapters, which alone are trained; 0: there are none
    lora.alpha = 16.0  # what adapters add is multiplied by alpha / rank
    lora.targets = "query,value"  # weights with one: query, key, value, out and, without experts, gate, up, down

    config.supervision = supervision = ConfigDict()  # of the objective "recursive"
    supervision.max_steps = 16  # that a puzzle is worked on, at most; in evaluation always
    supervision.exploration = 0.1  # probability, each step, of working on for a random number of steps at least
    supervision.loss = "stablemax"  # of cells: stablemax, softmax

    config.distillation = distillation = ConfigDict()  # of the objective "distillation"
    distillation.teacher = ""  # folder of the run that teaches; a recipe, configs/NAME.py, where it is only rehearsed
    distillation.divergence = "forward"  # from the teacher's logits: forward, KL(teacher || student), or reverse
    distillation.temperature = 2.0  # of both softmaxes in it
    distillation.soft_weight = 0.5  # of the divergence, times temperature^2
    distillation.hard_weight = 0.5  # of the cross-entropy with the targets
    distillation.hidden_weight = 0.0  # of the squared distance of the last streams, the student's projected; 0: off

    config.preference = preference = ConfigDict()  # of the objective "dpo"
    preference.beta = 0.1  # how far answers may go from what train.init_from would say: the less, the further

    config.mesh = mesh = ConfigDict()  # devices per axis; at most one -1: all that the others leave
    mesh.dcn_data = 1  # slices joined by the data-centre network: copies of the model, the batch split between them
    mesh.data = 1  # copies of the model, the batch split between them
    mesh.fsdp = -1  # the batch and the parameters split
    mesh.context = 1  # the sequence split, and the parameters
    mesh.expert = 1  # experts and the batch split; model splits experts too
    mesh.model = 1  # heads, MLP and vocabulary split (tensor parallelism)

    config.layout = layout = ConfigDict()
    layout.axis_order = ",".join(MESH_AXES)  # of the mesh, the slowest to change first; dcn_data stays the first
    layout.changes = ""  # of the mesh during the run: after which step to which, "100: data=4,fsdp=2; 200: fsdp=8"

    config.data = data = ConfigDict()
    data.source = "auto"  # a function of input_pipeline/sources.py; auto: by the suffix of path, python without one
    data.path = ""  # file, directory or glob; of huggingface a directory or a name on the hub, and :SPLIT (train)
    data.mixture = ""  # instead of path: weights and paths, "0.7 code/**/*.py; 0.3 books.jsonl"
    data.field = "text"  # column or key that holds a document, in jsonl, parquet, tfrecord, csv, huggingface
    data.subset = ""  # of a Hugging Face dataset: its configuration
    data.bad_documents = "error"  # one that cannot be read: error, or skip (counted and reported)
    data.max_document_mib = 256  # of a line, row or record of many documents' file; a text file is read in pieces
    data.tokenizer = "sentencepiece"  # sentencepiece (trained on the corpus), byte, a path (.model, .json); "": none
    data.cache_dir = ""  # tokenizers, shards, compiled programs; '': $XDG_CACHE_HOME/torus or ~/.cache/torus
    data.holdout_fraction = 0.05  # of the documents, by hash of their content
    data.validation_path = ""  # held-out documents of their own; '': split off by holdout_fraction
    data.puzzle_size = 9  # side of boards made at random: Sudokus 4, 6, 9; mazes 3 to 30
    data.puzzle_count = 1000  # puzzles trained on, drawn from the file or made at random
    data.puzzle_augmentations = 1000  # versions of each, beside itself; of mazes 8 in all, if any
    data.puzzle_min_difficulty = 0  # only puzzles with at least this rating, held-out ones too
    data.puzzle_clues = 0  # of Sudokus made at random; 0: as few as leave one solution
    data.puzzle_heldout = 1000  # puzzles held out, where they are made at random
    data.puzzle_set = "arc1"  # of ARC: arc1, arc2
    data.readers = 0  # threads that make batches; 0: automatic
    data.prefetch = 0  # batches made ahead; 0: automatic

    config.optimizer = optimizer = ConfigDict()
    optimizer.name = "adamw"  # adamw, adam_atan2, adafactor, lion, muon, sgd; functions of training/optimizers.py
    optimizer.learning_rate = 1e-3  # at the peak
    optimizer.schedule = "cosine"  # cosine, cosine_from_one, linear, warmup_stable_decay, constant; functions of
    # training/schedules.py
    optimizer.warmup_steps = 100  # linear from 0 to the peak
    optimizer.final_fraction = 0.1  # learning rate at the end, as a fraction of the peak
    optimizer.cooldown_fraction = 0.2  # of the steps, at the end: where warmup_stable_decay falls
    optimizer.weight_decay = 0.1  # decoupled, times the learning rate
    optimizer.decayed = "matrices"  # what decays: matrices (no norms, biases, embeddings), all
    optimizer.table_learning_rate = 1e-2  # of the table of puzzle embeddings, at the peak
    optimizer.table_weight_decay = 0.1  # of the rows that a batch uses
    optimizer.bias_step = 1e-3  # by which a router's bias goes against the load of each expert; 0: stays
    optimizer.beta1 = 0.9  # decay of the first moment, or of the momentum
    optimizer.beta2 = 0.95  # decay of the second moment
    optimizer.epsilon = 1e-8  # added to the root of the second moment
    optimizer.clip_norm = 1.0  # largest global norm of the gradient; 0: off
    optimizer.ema_decay = 0.0  # of an average of the parameters from the first on, which is evaluated; 0: off

    config.train = train = ConfigDict()
    train.objective = "language_modeling"  # a module of objectives/
    train.init_from = ""  # folder of a run of the same model, whose parameters a new run begins with; "": random ones
    train.steps = 1000  # optimizer updates; 0: from train.tokens or train.epochs
    train.tokens = 0  # instead of steps: tokens read (global_batch * sequence_length a step)
    train.epochs = 0.0  # instead of steps: passes over the training documents
    train.global_batch = 32  # sequences per update, over all devices
    train.sequence_length = 512  # tokens per sequence
    train.gradient_accumulation = 0  # microbatches per update; 0: 1, on CPU as many as keep each near 10 s
    train.z_loss = 0.0  # weight of mean log(Z)^2
    train.balance_loss = 0.0  # weight of the loss that spreads tokens over experts (Switch: 1e-2), in each microbatch
    train.router_z_loss = 0.0  # weight of mean log(Z)^2 of routers, as of ST-MoE (1e-3)
    train.loss_chunk_tokens = 0  # tokens per device whose logits exist at once; 0: as many as fit 1 GiB, on CPU 64 MiB
    train.offload = "none"  # to the hosts' memory, between updates: none, optimizer (its moments)
    train.sum_dtype = "auto"  # of gradients where weights are split: auto (compute type), float32 (no context)
    train.seed = 0  # of initialisation, order and everything random
    train.log_every = 10  # steps
    train.eval_every = 250  # steps; 0: only at the end
    train.save_every = 500  # steps; the last step and an interruption are always saved
    train.spike_deviations = 0.0  # loss or gradient norm so many above its running mean: update not taken; 0: never
    train.bad_steps = 10  # updates not taken in a row: back to the last good checkpoint, without these batches
    train.roll_backs = 3  # going back so in a run; then it ends
    train.recheck_every = 0  # steps: one is computed twice and compared bit by bit, as are copies; 0: never
    train.hang_seconds = 1800.0  # without a step ending: every process keeps its stacks in its log and ends; 0: never

    config.batch = batch = ConfigDict()  # how train.global_batch is reached, in memory and in time
    batch.fit = "none"  # auto: as few microbatches as memory allows, instead of train.gradient_accumulation
    batch.memory_gib = 0.0  # of a device, that fit=auto may use; 0: all that it has
    batch.ramp = "none"  # growth up to train.global_batch: none, steps (always), noise_scale (where that is larger)
    batch.first = 0  # sequences per update that a ramp begins with
    batch.increase_step = 2000  # steps of a ramp from one size to the next
    batch.increase_factor = 1.2  # by which a size grows, before it is rounded to what mesh and microbatches divide
    batch.learning_rate = "none"  # of smaller batches: none (the same), sqrt, linear (by their part of the whole)
    batch.noise_scale = False  # measure the gradient noise scale (arXiv:1812.06162), in sequences

    config.checkpoint = checkpoint = ConfigDict()
    checkpoint.resume = True  # false: refuse a workdir that has a checkpoint
    checkpoint.keep = 2  # newest checkpoints kept
    checkpoint.keep_every = 0  # steps of whose multiples all are kept too; 0: none for that
    checkpoint.keep_best = 1  # of those with an evaluation, the best by held-out loss kept too
    checkpoint.staging = ""  # local folder to save to, then copied from; '': none, for a bucket data.cache_dir
    checkpoint.restore = "read"  # by each copy of the model for itself; broadcast: by one, which sends it to the others

    config.evaluation = evaluation = ConfigDict()
    evaluation.batches = 8  # of the fixed held-out subset read during the run
    evaluation.every_epochs = 0.0  # instead of train.eval_every: passes over the training examples
    evaluation.pooled_votes = False  # votes of earlier checkpoints count too (ARC), reported beside those of one alone
    evaluation.chunk_tokens = 0  # of a sequence that are computed at once, with keys and values kept; 0: all
    evaluation.sample_tokens = 120  # length of the sample at the end of the run; 0: none

    config.logging = logging = ConfigDict()
    logging.tensorboard = True  # event files in workdir/tensorboard

    return config.lock()


def batch_shards(mesh: ConfigDict) -> int:
    """Return the number of parts into which a resolved mesh splits the batch."""
    return math.prod(mesh[axis] for axis in BATCH_AXES)


def supports_shard_map(config: ConfigDict) -> bool:
    """Return whether each of several devices can compute its own part of rows, heads and length in a shard_map."""
    mesh = config.mesh
    return mesh.context == 1 and math.prod(mesh.values()) > 1 and config.train.sequence_length % mesh.model == 0
