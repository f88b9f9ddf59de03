# SPDX-License-Identifier: Apache-2.0
"""Imports TensorFlow lazily and without its log messages, because the import takes seconds."""

import contextlib
import os
import tempfile
from functools import cache

with contextlib.suppress(OSError):
    tempfile.gettempdir()  # the import asks for it, often later than here, when the disk may be full


@cache
def tensorflow():
    """Return the module, without a GPU."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # oneDNN logs at any log level, and computes nothing here
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # not installed; importing Keras 3 takes a while
    import tensorflow as tf

    if tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices([], "GPU")
    return tf
