# SPDX-License-Identifier: Apache-2.0
"""Environment variables of other systems that Torus does not read."""

from collections.abc import Mapping

UNREAD_VARIABLES = {  # the reason for each
    "XLA_TENSOR_ALLOCATOR_MAXSIZE": "XLA plans the memory when it compiles",
    "TPU_NUM_DEVICES": "jax finds the devices of each host",
    "PJRT_DEVICE": "JAX_PLATFORMS chooses the platform",
    "XRT_TPU_CONFIG": "it is of PyTorch/XLA's xla_dist; `pod.py launch -- COMMAND` starts a command on every host",
    "LOCAL_RANK": "one process drives all chips of a TPU host",
}


def unread_lines(environment: Mapping[str, str], unread: Mapping[str, str]) -> list[str]:
    """Return a line for each variable of `unread`, {name: reason}, that is set in the environment."""
    return [f"{name}={environment[name]} is not read: {why}" for name, why in unread.items() if environment.get(name)]
