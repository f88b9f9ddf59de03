# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of a fine-tuned configs/llama_1b.py, whose answers must end as those of the data do.

Each step draws 16 answers to each of 8 prompts of your conversations, of at most 1,024 tokens with the prompt.
Expected: not yet run; rehearsed on v4-8: at most 9.1 s a step, of them 1.35 s for the update (26.6 of 32 GiB a chip)
and at most 7.7 s for the rollout (8.3 GiB: 128 rows of the cache, and 5.5 ms a token), without the host's time.
It prints these figures: make rehearse CONFIG=configs/llama_1b_grpo.py TOPOLOGY=v4-8
Command: make train CONFIG=configs/llama_1b_grpo.py TOPOLOGY=v4-8 ARGS="--config.train.init_from=FOLDER
--config.data.path=FILE.jsonl --config.data.tokenizer=FOLDER/tokenizer.model"
"""

from configs import llama_1b


def get_config():
    config = llama_1b.get_config()
    config.train.objective = "grpo"
    config.grpo.reward = "reference"
    config.data.source = "chat"
    config.train.sequence_length = 1024
    config.train.global_batch = 128
    config.train.steps = 500
    config.train.eval_every = 100
    config.optimizer.learning_rate = 1e-6
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_steps = 20
    config.optimizer.weight_decay = 0.0
    return config
