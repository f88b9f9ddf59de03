# SPDX-License-Identifier: Apache-2.0
"""The decoder of models/decoder_lm.py on vectors instead of tokens, which learns a function from examples it reads.

Garg et al. 2022, arXiv:2208.01066, section 2: a linear map reads (x_1, y_1, x_2, y_2, ...) in. The prediction of y_i is
read out at the position of x_i. A vector has one more coordinate than x, which holds y, so that both kinds differ.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from layers.projection import Projection
from layers.units import Units
from models import decoder_lm
from models.decoder_lm import DecoderLM


def flops_per_token(config, length: int) -> float:
    """Return floating-point operations to train on one example, which has two positions."""
    return 2 * decoder_lm.flops_per_token(config, 2 * length)


def hidden_units(config) -> tuple[Units, ...]:
    """Return none: the units of networks that are adapted to each task are not measured."""
    return ()


class VectorDecoder(DecoderLM):
    """Predict y of each example from its own x and the examples before it.

    `model.vocab_size` is 1, the width of the output.
    """

    def __init__(self, config, *, dtype, scan: bool, kernel: str = "", rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, scan=scan, kernel=kernel, rngs=rngs)
        dims = {"in_dim": config.input_dim + 1, "out_dim": config.embed_dim}
        self.embed = Projection(**dims, axes=(None, "embed"), rngs=rngs)

    def __call__(self, inputs: jax.Array, targets_BT: jax.Array) -> jax.Array:
        """Return predictions of the targets, float32 [B, T]; each depends on earlier examples and its own input.

        Args:
          inputs: float32 [B, T, input_dim].
        """
        rows, length = targets_BT.shape
        of_inputs = jnp.pad(inputs, ((0, 0), (0, 0), (0, 1)))
        of_targets = jnp.pad(targets_BT[..., None], ((0, 0), (0, 0), (inputs.shape[-1], 0)))
        sequence = jnp.stack([of_inputs, of_targets], axis=2).reshape(rows, 2 * length, -1)
        positions = jnp.broadcast_to(jnp.arange(2 * length), (rows, 2 * length))
        one_document = jnp.ones_like(positions)
        contexts, _ = self._contexts(one_document, positions, None)
        contexts = [(*context, one_document > 0) for context in contexts]
        stream, *_ = self.stack(self.embed(sequence.astype(self.dtype)), contexts, caches=None, key=None)
        return self.logits(self.norm(stream)[:, ::2])[..., 0]


make = VectorDecoder  # call it with a mesh in context
