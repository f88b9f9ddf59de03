# SPDX-License-Identifier: Apache-2.0
"""Where files are kept between runs."""

from pathlib import Path

import pytest

from input_pipeline.cache import cache_path, locked
from input_pipeline.errors import DataError


def test_caches_lie_where_the_configuration_or_the_environment_says(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_path("") == Path("/elsewhere/torus")
    assert cache_path("/mine") == Path("/mine")
    assert cache_path("~/mine") == Path("/home/someone/mine")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_path("") == Path("/home/someone/.cache/torus")


def test_output_that_nobody_reads_is_not_taken_for_a_cache_that_cannot_be_written(tmp_path):
    with pytest.raises(BrokenPipeError), locked(tmp_path / "lock", print):
        raise BrokenPipeError(32, "Broken pipe")
    with pytest.raises(DataError, match="the cache must be writable"), locked(tmp_path / "lock", print):
        raise OSError(28, "No space left on device")
