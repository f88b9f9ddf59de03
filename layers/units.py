# SPDX-License-Identifier: Apache-2.0
"""Hidden units: which weights lead into them and out of them, so that a unit can be judged and replaced.

Letters: L layers, E experts, D embed, F mlp.
"""

from typing import NamedTuple

Path = tuple[str, ...]  # of a parameter


class Units(NamedTuple):
    """The hidden units of a layer, or of all layers of a stack. Their arrays are [..., F], such as [L, F] or [L, E, F].

    A weight of the units has these dimensions and one more, its side that is not the units.

    Attributes:
      tap: name of their activation in layers/taps.py.
      axes: names of the dimensions of what is measured at the tap.
      outgoing: path of the weight that reads the units, and the dimension of its other side.
      incoming: {path: dimension of its other side} of the weights that lead into the units.
      biases: paths of biases of the units.
      next_bias: path of the bias that is added to the product with the outgoing weight; None: there is none.
      layer: index of these units in the first dimension of what is measured at the tap; None: they are all of it.
    """

    tap: str
    axes: tuple[str | None, ...]
    outgoing: tuple[Path, int]
    incoming: dict[Path, int]
    biases: tuple[Path, ...] = ()
    next_bias: Path | None = None
    layer: int | None = None


def of_mlps(path: Path, *, biased: bool) -> Units:
    """Return the units of the stacked SwiGLUs (layers/mlp.py) at a path."""
    return Units(
        tap="mlp_hidden", axes=("layers", "mlp"), outgoing=((*path, "down"), 2),
        incoming={(*path, "gate"): 1, (*path, "up"): 1},
        biases=((*path, "gate_bias"), (*path, "up_bias")) if biased else (),
        next_bias=(*path, "down_bias") if biased else None,
    )  # fmt: skip


def of_experts(path: Path, *, shared: bool) -> tuple[Units, ...]:
    """Return the units of the stacked experts (layers/experts/experts.py) at a path, and those of the shared ones."""
    routed = Units(
        tap="expert_hidden", axes=("layers", "experts", "expert_mlp"), outgoing=((*path, "down"), 3),
        incoming={(*path, "gate"): 2, (*path, "up"): 2},
    )  # fmt: skip
    return (routed, of_mlps((*path, "shared"), biased=False)) if shared else (routed,)
