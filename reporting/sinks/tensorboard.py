# SPDX-License-Identifier: Apache-2.0
"""TensorBoard: the numbers of each line as scalars KIND/NAME in event files."""

import contextlib
import pathlib
import queue
import threading

from reporting.sink import Sink, numbers


def check(config) -> None:
    """Accept every configuration: the workspace always has TensorBoard."""


def make(config, workdir: pathlib.Path, process: int) -> Sink | None:
    """Return the sink of process 0 if `logging.tensorboard` asks for it."""
    return TensorBoard(workdir / "tensorboard") if config.logging.tensorboard and not process else None


class TensorBoard(Sink):
    """Event files in a folder, which begins to exist with the first line; a thread writes them."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.events = folder, None
        self.lines: queue.SimpleQueue[tuple[dict, int] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._write_all, daemon=True, name="tensorboard")
        self.thread.start()

    def write(self, kind, figures, step):
        """Queue the numbers of a line."""
        if kind != "event":
            self.lines.put((numbers(kind, figures), step))

    def close(self, error):
        """Write what is queued, and close the last file."""
        self.lines.put(None)
        self.thread.join()

    def _write_all(self) -> None:
        for scalars, step in iter(self.lines.get, None):
            self._write(scalars, step)
        if self.events:
            import tensorflow as tf

            with contextlib.suppress(tf.errors.OpError):
                self.events.close()

    def _write(self, scalars: dict[str, float], step: int) -> None:
        """Write one record for all numbers of a line, since each record takes 0.2 ms."""
        import tensorflow as tf  # only when there is something to write

        summary = tf.compat.v1.Summary()
        for tag, value in scalars.items():
            summary.value.add(tag=tag, simple_value=value)
        try:
            self.events = self.events or tf.summary.create_file_writer(str(self.folder))
            with self.events.as_default():
                tf.summary.experimental.write_raw_pb(summary.SerializeToString(), step=step)
        except tf.errors.OpError:  # a full disk or a deleted folder; a later line starts another file
            self.events = None
