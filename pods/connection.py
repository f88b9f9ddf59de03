# SPDX-License-Identifier: Apache-2.0
"""Chooses the transport that the settings name."""

from pods.gcloud import Gcloud
from pods.local import Local
from pods.settings import Settings
from pods.transports import Transport


def connect(settings: Settings) -> Transport:
    """Return the transport of a pod; nothing is called yet."""
    return {"gcloud": Gcloud, "local": Local}[settings.transport](settings)
