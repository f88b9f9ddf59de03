# SPDX-License-Identifier: Apache-2.0
"""benchmarks/story.py names a stage that fails and passes over those that are done; docs/story.md lists its stages."""

import json
import re

import pytest

from tests import support
from tests.support import ROOT


@pytest.fixture(scope="module")
def story():
    """The benchmark, as a module."""
    with support.benchmark("story") as module:
        yield module


def test_a_failed_stage_is_named_and_done_ones_are_passed_over(story, tmp_path, capsys):
    told, works = [], []

    def one(story):
        """First."""
        told.append("one")
        return {"figure": 1}

    def two(tale):
        """Second."""
        told.append("two")
        story.check(bool(works), "there is work")
        return {"sum": tale.figure("one", "figure") + 1}

    tale = story.Story(tmp_path, short=True)
    with pytest.raises(SystemExit, match="error: stage two: broken: there is work"):
        story.tell(tale, (one, two))
    works.append(True)
    done = story.tell(tale, (one, two))
    assert told == ["one", "two", "two"] and "1. one: done before" in capsys.readouterr().out
    assert done["two"]["sum"] == 2 and done["one"]["seconds"] == 0
    assert json.loads((tmp_path / "done.json").read_text()) == done


def test_a_command_that_ends_otherwise_fails_its_stage(story, tmp_path):
    with pytest.raises(story.StageFailed, match=r"report.py ended with status 2, not 0: .*no run is named"):
        story.Story(tmp_path, short=True).call("report.py")


def test_the_page_lists_the_stages_in_their_order(story):
    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "story.md").read_text(), re.MULTILINE)
    assert listed == [stage.__name__ for stage in (*story.STAGES, story.on_a_pod)]
