# SPDX-License-Identifier: Apache-2.0
"""A process uses all GPUs of its host, or one of them if it shares the host with others."""

import pytest

from cluster import gpus

TORCHRUN, SLURM = {"LOCAL_WORLD_SIZE": "8"}, {"SLURM_NTASKS": "16", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("environment", "place", "found"),
    [
        (TORCHRUN, 3, (3,)),
        (SLURM, 7, (7,)),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 1, (1,)),
        (SLURM | {"SLURM_NTASKS": "2"}, 0, None),
        (SLURM | {"SLURM_NTASKS": "2"} | TORCHRUN, 3, (3,)),
        ({"LOCAL_WORLD_SIZE": "1"}, 0, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 0, None),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "5"}, 7, None),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, 7, (7,)),
        (SLURM | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, 1, None),
        (TORCHRUN | {"JAX_CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 1, None),
        ({}, None, None),
    ],
)
def test_a_process_that_shares_its_host_has_the_gpu_of_its_place(environment, place, found):
    assert gpus.of_process(environment, place) == found
