# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of each family with the logits that transformers computes; written again into tests/fixtures by

make setup EXTRAS=interop; .venv/bin/python -m tests.migration.record_hugging_face
"""

import pathlib
import sys

import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "fixtures" / "hugging_face"
V, T = 61, 20
SIZES = {
    "vocab_size": V, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES = {  # name: (model_type, what differs from SIZES)
    "llama2": ("llama", {"rms_norm_eps": 1e-5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama3": ("llama", {
        "rope_theta": 5e5, "tie_word_embeddings": True,
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32},
    }),
    "mistral": ("mistral", {"sliding_window": 5, "head_dim": 8}),
    "qwen2": ("qwen2", {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    }),
    "qwen3": ("qwen3", {"head_dim": 10, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {
        "head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 5, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    }),
    "gemma3": ("gemma3_text", {
        "head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 5, "num_hidden_layers": 7,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }),
    "mixtral": ("mixtral", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 20, "num_hidden_layers": 2,
        "sliding_window": 5, "router_aux_loss_coef": 0.02,
    }),
}  # fmt: skip
SHARDED = "llama2"  # written in several files


def make(case: str, folder: pathlib.Path, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Write a random model, bfloat16, as transformers does; return (int32 tokens [2, T], float32 logits [2, T, V])."""
    import torch
    import transformers

    torch.manual_seed(seed)
    kind, changes = CASES[case]
    config = transformers.AutoConfig.for_model(kind, **SIZES | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            around_one = name.endswith("norm.weight") and not kind.startswith("gemma")
            weight.copy_((around_one + 0.3 * torch.randn(weight.shape)).bfloat16())
        tokens = np.random.default_rng(seed).integers(0, V, (2, T))
        logits = model.float()(torch.from_numpy(tokens)).logits.numpy()
        model.bfloat16().save_pretrained(folder, max_shard_size="20KB" if case == SHARDED else "1GB")
    return tokens.astype(np.int32), logits


def main() -> None:
    """Record all cases."""
    for case in sys.argv[1:] or CASES:
        tokens, logits = make(case, FOLDER / case)
        np.savez_compressed(FOLDER / case / "expected.npz", tokens=tokens, logits=logits)


if __name__ == "__main__":
    main()
