# SPDX-License-Identifier: Apache-2.0
"""What `pod.py validate` can check while a run holds the devices of a pod: functions for items of its table.

Each returns what is wrong, and the evidence.
"""

from pods import watch
from pods.checks.evidence import UNREACHED, Found


def pod_state(found: Found) -> tuple[list[str], str]:
    """Check that a busy pod exists and is healthy, and that its hosts can be reached."""
    state = ", ".join(filter(None, (found.pod.get(key) for key in ("state", "health", "acceleratorType"))))
    lost = [worker.trouble() for worker in found.workers if not worker.reachable]
    return watch.problems(found.settings, found.pod, []) + lost, f"{state}; devices are not counted"


def answers(found: Found) -> tuple[list[str], str]:
    """Check that the script ran on every host of a busy pod."""
    lost = [number for number, check in enumerate(found.checks) if check is None]
    return [f"worker {n}: {found.outputs[n].message}" for n in lost], f"{len(found.checks)} hosts answer, each alone"


def compilation(found: Found) -> tuple[list[str], str]:
    """Check that the step compiles ahead of time and fits into a chip's memory."""
    figures = found.rehearsed
    if found.settings.coordinator_worker not in found.answers:
        return [UNREACHED], ""
    if not figures:
        return [], f"{found.settings.accel} is not a slice of configs/topologies.py: there is no compiler for it"
    if "error" in figures:
        return [figures["error"]], ""
    memory = f"{figures['memory_gib_per_device']:.3g} GiB a chip"
    if not figures["fits"] or figures["step_seconds"] is None:
        return [f"the step does not fit, it needs {memory}"], ""
    on = ", ".join(found.switches.on) or "no switch"
    return [], f"by the TPU compiler: {figures['step_seconds']:.3g} s a step, rehearsed, {memory}; on: {on}"


def rehearsed_mesh(found: Found) -> tuple[list[str], str]:
    """Return the mesh of the compiled step."""
    sizes = found.rehearsed.get("mesh", {}).items()
    return [], " * ".join(f"{axis}={size}" for axis, size in sizes if size != 1) or "not compiled"


def later(found: Found) -> tuple[list[str], str]:
    """Return no evidence, because all of it needs the devices."""
    return [], ""
