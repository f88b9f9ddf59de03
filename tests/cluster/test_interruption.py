# SPDX-License-Identifier: Apache-2.0
"""A first signal asks for a stop, a second one does not ask."""

import concurrent.futures
import itertools
import os
import signal
import threading

import pytest

import train
from cluster import interruption as module
from cluster.interruption import InterruptedHere, Interruption, interruption

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def no_echo(monkeypatch):
    monkeypatch.setattr(module, "ECHO_SECONDS", 0.0)


@pytest.mark.parametrize(("first", "second"), [*itertools.product(SIGNALS, SIGNALS)])
def test_the_second_signal_ends_at_once_whichever_it_is(first, second, no_echo, capfd):
    with interruption() as signals:
        assert not signals.agreed()
        signal.raise_signal(first)
        assert signals.agreed()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(second)
    assert capfd.readouterr().err.splitlines() == [
        "", "stopping; a second signal (Ctrl-C) stops at once, without saving"
    ]  # fmt: skip


def test_a_sigterm_that_make_has_passed_on_is_no_second_one():
    with interruption() as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert signals.agreed()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_another_thread_asks_and_the_signal_that_follows_lets_the_run_save(no_echo, capfd):
    with interruption() as signals:
        thread = threading.Thread(target=signals.ask, args=["the machine is about to end"])
        thread.start()
        thread.join()
        assert signals.agreed()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr().err.splitlines()[1] == "stopping: the machine is about to end"


def test_a_signal_that_has_ended_the_reader_of_what_is_said_lets_the_run_save():
    """Ctrl-C of `train.py 2>&1 | tee log` ends both."""
    reader, writer = os.pipe()
    os.close(reader)
    stderr = os.dup(2)
    os.dup2(writer, 2)
    try:
        with interruption() as signals:
            signal.raise_signal(signal.SIGINT)
            assert signals.agreed()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(writer)


def test_where_nothing_is_left_to_save_the_first_signal_ends_at_once():
    with interruption() as signals:
        signals.at_once = True
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_another_thread_is_told_so_before_anything_is_read():
    """`train` with no configuration would fail at its second line."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread, pytest.raises(RuntimeError, match="in the main thread"):
        thread.submit(train.train, None, None).result()


def test_after_the_block_signals_do_what_they_did_before():
    before = [signal.getsignal(number) for number in SIGNALS]
    with interruption():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_signal_after_the_last_save_ends_the_run_at_once_and_says_where_it_is_saved():
    signals, said = Interruption(), r"^saved at step 7; run the same command to continue$"
    with pytest.raises(InterruptedHere, match=said) as caught, signals.saved_at(7):
        signals.request(signal.SIGTERM, None)
    assert caught.value.exit_status == 75
