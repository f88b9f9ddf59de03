# SPDX-License-Identifier: Apache-2.0
"""TensorBoard: the numbers of each line as scalars KIND/NAME in event files."""

import contextlib
import pathlib

from reporting.sink import Sink, numbers


def check(config) -> None:
    """Accept every configuration: the workspace always has TensorBoard."""


def make(config, workdir: pathlib.Path, process: int) -> Sink | None:
    """Return the sink of process 0 if `logging.tensorboard` asks for it."""
    return TensorBoard(workdir / "tensorboard") if config.logging.tensorboard and not process else None


class TensorBoard(Sink):
    """Event files in a folder, which begins to exist with the first line."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.events = folder, None

    def write(self, kind, figures, step):
        """Write one record for all numbers of a line, since each record takes 0.5 ms."""
        if kind == "event":
            return
        import tensorflow as tf  # only when there is something to write

        scalars = tf.compat.v1.Summary()
        for tag, value in numbers(kind, figures).items():
            scalars.value.add(tag=tag, simple_value=value)
        try:
            self.events = self.events or tf.summary.create_file_writer(str(self.folder))
            with self.events.as_default():
                tf.summary.experimental.write_raw_pb(scalars.SerializeToString(), step=step)
        except tf.errors.OpError:  # a full disk or a deleted folder; a later line starts another file
            self.events = None

    def close(self, error):
        """Close the last file."""
        if self.events:
            import tensorflow as tf

            with contextlib.suppress(tf.errors.OpError):
                self.events.close()
