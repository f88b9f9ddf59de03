# SPDX-License-Identifier: Apache-2.0
"""TensorFlow, which takes seconds to import and says much: only where it is needed, and silent."""

import os
from functools import cache


@cache
def tensorflow():
    """Return the module, without a GPU."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # announces itself past the log level; nothing is computed here
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # which is not installed: the other one takes a while to import
    import tensorflow as tf

    if tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices([], "GPU")
    return tf
