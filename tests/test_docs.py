# SPDX-License-Identifier: Apache-2.0
"""Pages of docs/ say what the code does."""

from configs import base
from settings import stored_config
from settings.keys import flat
from tests.support import ROOT

MACHINE, TYPED = "belong to the machine", "may be typed"


def test_the_page_about_resuming_names_every_key_that_may_change():
    rows = [line for line in (ROOT / "docs" / "resume.md").read_text().splitlines() if line.startswith("| ")]
    for key in flat(base.get_config()):
        # The rows go from single keys to all others, so the first that names a key or its section decides.
        section = key.split(".")[0]
        row = next(row for row in rows if f"`{key}`" in row or f"`{section}.*`" in row)
        said = MACHINE if MACHINE in row else TYPED if TYPED in row else "fixed"
        is_machine, may_change = key.startswith(stored_config.OF_THE_HOST), key.startswith(stored_config.MAY_CHANGE)
        assert said == (MACHINE if is_machine else TYPED if may_change else "fixed"), key
