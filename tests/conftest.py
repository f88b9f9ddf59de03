# SPDX-License-Identifier: Apache-2.0
"""Eight simulated CPU devices, a shared compilation cache, and the shape check of every test."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
