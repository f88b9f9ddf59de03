# SPDX-License-Identifier: Apache-2.0
"""What a run saves when the user's own batches, rewards, callbacks or evaluators end it by a mistake."""

import contextlib

from cluster import processes
from input_pipeline.errors import DataError
from reporting.step_log import Diverged


def save_on_user_error(job, state, step: int) -> contextlib.ExitStack:
    """Return a context that saves the state of a step if its block raises an exception that the loop does not handle.

    With several processes nothing is saved: the mistake may be in one alone, and its save would wait for the others.
    """

    def save(kind: type | None, *_) -> None:
        is_mistake = kind and issubclass(kind, Exception) and not issubclass(kind, DataError | Diverged)
        if is_mistake and step > 0 and processes.count() == 1:
            try:
                job.save(state, step, ends=True)
            except (RuntimeError, Diverged) as failed:  # the mistake says more; it may have deleted the state
                job.log.event(f"step {step} not saved: {failed}", "save_failed", step, error=str(failed))

    context = contextlib.ExitStack()
    context.push(save)
    return context
