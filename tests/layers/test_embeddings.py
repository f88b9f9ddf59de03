# SPDX-License-Identifier: Apache-2.0
"""The embedding looks rows up and gives them unit variance."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layers.embeddings import Embedding
from tests.support import assert_close

V, D = 501, 64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedding_is_the_row_times_the_root_of_the_width(dtype):
    layer = Embedding(vocab_size=V, embed_dim=D, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, V, (3, 11))
    actual = layer(tokens, jnp.dtype(dtype))
    assert actual.dtype == dtype
    assert_close(actual, np.asarray(layer.embedding[...])[tokens] * D**0.5, dtype)


def test_tokens_enter_with_unit_variance():
    x = Embedding(vocab_size=V, embed_dim=D, rngs=nnx.Rngs(0))(np.arange(V)[None], jnp.float32)
    assert abs(float(jnp.mean(x**2)) - 1) < 0.03  # 32,064 samples: 0.03 is four standard deviations
