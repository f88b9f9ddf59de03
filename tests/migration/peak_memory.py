# SPDX-License-Identifier: Apache-2.0
"""Prints [bytes of a model in float32, bytes by which converting it both ways raises this process's peak of memory].

Its argument is a folder, where the model is made. A small one is converted first, after which all that the conversion
itself needs is loaded.
"""

import json
import math
import pathlib
import resource
import sys

import numpy as np

from cluster import startup
from migration import safetensors_files

SIZES = {"hidden_size": 384, "intermediate_size": 1056, "num_attention_heads": 8, "vocab_size": 500}
REST = {
    "model_type": "llama", "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}  # fmt: skip


def make(folder: pathlib.Path, layers: int) -> int:
    """Write a model with this number of layers; return its bytes in float32."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES | REST | {"num_hidden_layers": layers}))
    D, F, V = (SIZES[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{name}_proj.weight": (D, D) for name in "qkvo"}
        shapes |= {f"{at}mlp.{name}_proj.weight": (F, D) for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (D, F)}
        shapes |= {f"{at}{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}
    some = np.random.default_rng(0).standard_normal(F * D, np.float32)
    tensors = {name: ("BF16", shape) for name, shape in shapes.items()}
    safetensors_files.write(folder, tensors, lambda name: iter([np.resize(some, shapes[name])]))
    return 4 * sum(map(math.prod, shapes.values()))


def main() -> None:
    """Make the models, convert them and print."""
    startup.choose_platform(None, "cpu", pathlib.Path(sys.argv[1]) / "cache")
    from tests.migration.hugging_face_cases import export, import_run

    place, peaks = pathlib.Path(sys.argv[1]), []
    for name, layers in (("small", 2), ("large", 27)):
        size = make(place / name, layers)
        config = import_run(place / name, place / f"{name}_run")
        export(config, place / f"{name}_run", place / f"{name}_out")
        peaks.append(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    print(json.dumps([size, peaks[1] - peaks[0]]))
