# SPDX-License-Identifier: Apache-2.0
"""Run as one process of several: prints, as JSON, the rows of a batch that each process reads on some meshes."""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from parallelism import processes, startup

startup.choose_platform(None, "cpu", pathlib.Path(os.environ["XDG_CACHE_HOME"]))
processes.start(processes.find(os.environ, "cpu", 60), 60, lambda line, status: sys.exit(line))

import json  # noqa: E402

from configs.base import MESH_AXES  # noqa: E402
from parallelism.axis_rules import batch_sharding  # noqa: E402
from parallelism.mesh import make_mesh  # noqa: E402
from parallelism.placement import local_rows  # noqa: E402

MESHES = {"fsdp": (1, 1, 8, 1, 1, 1), "data, fsdp": (1, 2, 4, 1, 1, 1), "slices": (2, 2, 2, 1, 1, 1)}
rows = {
    name: local_rows(batch_sharding(make_mesh(dict(zip(MESH_AXES, sizes, strict=True)))), 16).tolist()
    for name, sizes in MESHES.items()
}
of_processes = processes.gather("rows", rows)
print(json.dumps({name: [part[name] for part in of_processes] for name in MESHES}))
processes.leave()
