# SPDX-License-Identifier: Apache-2.0
"""Asks Compute Engine's metadata server about the machine that this process runs on."""

import contextlib
import http.client
import os
import pathlib
import urllib.parse
from collections.abc import Mapping

PRODUCT = pathlib.Path("/sys/class/dmi/id/product_name")
LONGEST_VALUE = 256 << 10  # bytes, the most that Compute Engine lets a value have
FAILURES = (OSError, http.client.HTTPException)  # no answer, or an answer that is not HTTP
SECONDS = 5.0  # to wait for an attribute of this machine


class Absent(OSError):
    """The server has no such value."""


def find_host() -> str | None:
    """Return the metadata server's host from GCE_METADATA_HOST or the firmware; None outside Compute Engine."""
    if host := os.environ.get("GCE_METADATA_HOST"):
        return host
    with contextlib.suppress(OSError):
        if PRODUCT.read_text().startswith("Google"):
            return "metadata.google.internal"
    return None


def ask(host: str, key: str, seconds: float, **query: str | int) -> tuple[str, str]:
    """Return the value of a key below `instance/` and its ETag; wait at most `seconds` for each part of the answer.

    Proxies are not used, since a proxy would answer for its own machine. Redirects are not followed. Raises Absent or
    one of FAILURES.
    """
    connection = http.client.HTTPConnection(host, timeout=seconds)
    try:
        path = f"/computeMetadata/v1/instance/{key}?{urllib.parse.urlencode(query)}"
        connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
        response = connection.getresponse()
        if response.status == http.client.NOT_FOUND:
            raise Absent(f"the metadata server has no instance/{key}")
        if response.status != http.client.OK:
            raise OSError(f"the metadata server answers {response.status} to instance/{key}")
        return response.read(LONGEST_VALUE).decode(errors="replace").strip(), response.headers.get("ETag", "0")
    finally:
        connection.close()


def attribute(name: str) -> str | None:
    """Return an attribute of this machine, such as accelerator-type of a TPU VM; None if the metadata has none."""
    if (host := find_host()) is None:
        return None
    try:
        return ask(host, f"attributes/{name}", SECONDS)[0]
    except FAILURES:
        return None


def count_hosts(environment: Mapping[str, str]) -> int | None:
    """Return the number of hosts of this machine's TPU slice; None if neither GKE's variable nor the metadata says it.

    The metadata of a TPU VM lists the endpoint of each worker, separated by commas.
    """
    if names := environment.get("TPU_WORKER_HOSTNAMES"):
        return len(names.split(","))
    endpoints = attribute("worker-network-endpoints")
    return None if endpoints is None else len(endpoints.split(","))
