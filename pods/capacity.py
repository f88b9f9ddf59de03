# SPDX-License-Identifier: Apache-2.0
"""`pod.py create --zones=a,b,c --wait`: looks for a pod in several zones, on demand, spot and queued.

A request that fails, waits too long or is interrupted is deleted before the next one, so that nothing half-made stays.
"""

import dataclasses
import re
import time

from pods import records
from pods.calls import note
from pods.errors import PodError, usage_error
from pods.gcloud import Gcloud
from pods.settings import Settings
from reporting.display import counted

QUEUED_POLLS = 20  # states of a queued request that are read before the next zone is tried
CLEAN_UPS = 3  # an interrupted request may appear a moment after it was sent
LASTING = re.compile(  # messages of failures that another try in the same zone does not change
    r"permission|denied|forbidden|unauthenticated|invalid[_ ]argument|not[_ ](?:be )?found|quota|not installed",
    re.IGNORECASE,
)


def search(settings: Settings) -> None:
    """Try each zone in each way until there is a pod; without --wait only once.

    Raises PodError if no zone has a pod, or none within --wait_seconds.
    """
    if settings.transport == "local":
        raise usage_error("--zones and --wait are for pods of gcloud; a local pod is made at once: leave them out")
    zones = list(dict.fromkeys(filter(None, (settings.zones or settings.zone).split(","))))
    tries = [dataclasses.replace(settings, zone=zone, **way) for zone in zones for way in ways(settings)]
    for one in [one for one in tries if one.queued and not settings.dry_run]:
        if Gcloud(one).exists():
            note(settings, f"{settings.name} exists already in {one.zone}: export ZONE={one.zone}, and `wait` for it")
            return
    end, failures = time.monotonic() + settings.wait_seconds, {}
    while tries:
        if one := _tried(settings, tries, failures, end):
            records.keep_creation(one)
            note(one, f"{one.name} is ready, {_way(one)}, in {one.zone}: export ZONE={one.zone}")
            return
        if settings.dry_run:
            return
        if not (settings.wait and tries) or time.monotonic() > end:
            break
        again = f"trying {counted(len(tries), 'way')} again in {settings.poll_seconds:.0f} s"
        note(settings, f"no zone gave a pod; {again}")
        time.sleep(settings.poll_seconds)
    hint = "; --wait goes on trying" if tries and not settings.wait else ""
    raise PodError(f"no pod was created{hint}. {'; '.join(failures.values())}")


def _tried(settings: Settings, tries: list[Settings], failures: dict, end: float) -> Settings | None:
    """Try each of `tries` once until there is a pod, and return its settings; None without one.

    `failures` gets the last failure of each. A try whose failure lasts leaves `tries`.
    """
    for one in list(tries):
        left = end - time.monotonic()
        if settings.wait and failures and left < 0:
            return None
        is_last = settings.wait and len(tries) == 1  # then it waits in the queue
        patience = max(0.0, left) if settings.wait else settings.wait_seconds
        if one.queued and not is_last:
            patience = min(patience, QUEUED_POLLS * one.poll_seconds)
        if not (failure := _attempt(one, patience)):
            return one
        failures[one.zone, _way(one)] = f"{one.zone}, {_way(one)}: {failure}"
        if LASTING.search(failure):
            tries.remove(one)
    return None


def ways(settings: Settings) -> list[dict[str, bool]]:
    """Return the settings of each way to ask a zone for a pod; typed ones such as --spot narrow them."""
    if settings.queued or settings.slices > 1:
        return [{"queued": True}]
    at_once = [{}] if settings.spot or settings.reserved else [{}, {"spot": True}]
    return [*at_once, {"queued": True}]


def _attempt(settings: Settings, patience: float) -> str:
    """Ask one zone for a pod in one way; return "" if there is one within `patience` seconds, else why not."""
    note(settings, f"{settings.zone}: trying {_way(settings)}")
    gcloud, made = Gcloud(dataclasses.replace(settings, wait_seconds=patience)), False
    try:
        gcloud.create()
        if settings.dry_run:
            return "dry run"
        made = True
        gcloud.wait()
        return ""
    except PodError as error:
        note(settings, f"{settings.zone}: {error}")
        if made or not (error.exit_status == 2 or LASTING.search(str(error))):  # `create` may have begun to make one
            _clean_up(gcloud, tries=1)
        return str(error)
    except KeyboardInterrupt:
        _clean_up(gcloud, tries=CLEAN_UPS)
        raise


def _clean_up(gcloud: Gcloud, tries: int) -> None:
    """Delete what an attempt made, also what it may still be making."""
    settings = gcloud.settings
    try:
        for number in range(tries):
            time.sleep(settings.poll_seconds if number else 0)
            done = gcloud.delete()
            if done.existed:
                note(settings, f"{settings.zone}: {done.line}")
                break
    except PodError as error:
        again = f"delete it with `pod.py delete --zone={settings.zone}{' --queued' * settings.queued}`"
        note(settings, f"{settings.zone}: {error}; {again}")


def _way(settings: Settings) -> str:
    """Return the way in words."""
    kind = "spot" if settings.spot else "reserved" if settings.reserved else "on demand"
    return f"{kind}, queued" if settings.queued else kind
