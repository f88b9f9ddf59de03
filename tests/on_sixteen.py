# SPDX-License-Identifier: Apache-2.0
"""A step on sixteen simulated devices against that of one: `main`, in a process of its own.

Prints the largest relative error of loss and gradients of each mesh as JSON.
"""

import json
import sys

from cluster import startup

startup.simulate(16)

import jax  # noqa: E402

from tests import one_step  # noqa: E402
from tests.support import relative_error  # noqa: E402

jax.config.update("jax_default_matmul_precision", "highest")

SPREAD = 48**-0.5  # of weights, as layers draw them: twice as much doubles rounding with every layer, to 1e-5 here


def largest_error(remat: str, mesh: dict) -> float:
    """Return that of a model whose width, 48, sixteen devices divide, with layers of two kinds; one keeps all."""
    model = (("embed_dim", 48), ("num_layers", 4), ("sliding_window", 5), ("global_every", 2))
    actual = one_step.gradients_and_scalars(of_model=(*model, ("remat", remat)), spread=SPREAD, **mesh)
    expected = one_step.gradients_and_scalars(of_model=model, spread=SPREAD)
    return max(relative_error(a, e) for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))


def main() -> None:
    """Compute what the command line asks for."""
    print(json.dumps([largest_error(**case) for case in json.loads(sys.argv[1])]))
