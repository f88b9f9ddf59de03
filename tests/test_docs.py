# SPDX-License-Identifier: Apache-2.0
"""Pages of docs/ say what the code does."""

from configs.base import KEYS, keys_of
from configs.key import MACHINE, RESUME
from tests.support import ROOT

OF_MACHINE, TYPED = "belong to the machine", "may be typed"


def test_the_page_about_resuming_names_every_key_that_may_change():
    rows = [line for line in (ROOT / "docs" / "resume.md").read_text().splitlines() if line.startswith("| ")]
    for key in KEYS:
        # The rows go from single keys to all others, so the first that names a key or its section decides.
        section = key.split(".")[0]
        row = next(row for row in rows if f"`{key}`" in row or f"`{section}.*`" in row)
        said = OF_MACHINE if OF_MACHINE in row else TYPED if TYPED in row else "fixed"
        expected = OF_MACHINE if key in keys_of(MACHINE) else TYPED if key in keys_of(RESUME) else "fixed"
        assert said == expected, key
