# SPDX-License-Identifier: Apache-2.0
"""Where files are kept between runs."""

from pathlib import Path

from input_pipeline.cache import cache_path


def test_caches_lie_where_the_configuration_or_the_environment_says(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_path("") == Path("/elsewhere/torus")
    assert cache_path("/mine") == Path("/mine")
    assert cache_path("~/mine") == Path("/home/someone/mine")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_path("") == Path("/home/someone/.cache/torus")
