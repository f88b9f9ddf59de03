# SPDX-License-Identifier: Apache-2.0
"""A run that hangs is ended, and leaves where it hung."""

import threading
import time

import pytest

from training import watchdog
from training.watchdog import Hang


@pytest.fixture
def raised(monkeypatch) -> list:
    """What threads raise."""
    errors = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: errors.append(arguments.exc_value))
    monkeypatch.setattr(watchdog, "START_SECONDS", 0.4)
    return errors


def test_silence_raises_and_leaves_the_stacks(raised, tmp_path):
    with watchdog.watchdog(0.1, tmp_path / "logs" / "log") as alive:
        alive()
        time.sleep(0.3)
    (error,) = raised
    assert isinstance(error, Hang) and "no step ended for 0.1 s" in str(error)
    assert "test_silence_raises_and_leaves_the_stacks" in (tmp_path / "logs" / "log").read_text()


def test_signs_of_life_and_a_long_start_are_no_hang(raised, tmp_path):
    with watchdog.watchdog(0.2, tmp_path / "log") as alive:
        time.sleep(0.3)
        for _ in range(4):
            alive()
            time.sleep(0.1)
    assert not raised and not (tmp_path / "log").exists()


def test_none_watches_where_it_is_off(raised, tmp_path):
    before = threading.active_count()
    with watchdog.watchdog(0, tmp_path / "log"):
        assert threading.active_count() == before
