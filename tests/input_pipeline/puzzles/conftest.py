# SPDX-License-Identifier: Apache-2.0
"""What the published implementation gave, and a `data` section that keeps what is built in a folder of its own."""

import numpy as np
import pytest

from configs.base import get_config
from tests.support import FIXTURES


@pytest.fixture(scope="session")
def published():
    """What the published implementation gave, by name; folders of names end in a slash."""
    with np.load(FIXTURES / "trm_public_aux.npz") as arrays:
        return {name: arrays[name] for name in arrays.files}


@pytest.fixture
def section(tmp_path):
    """Make a `data` section, by default with a few small puzzles."""

    def make(**changes):
        data = get_config().data
        small = {"puzzle_size": 4, "puzzle_count": 12, "puzzle_augmentations": 3, "puzzle_heldout": 5}
        for key, value in ({"cache_dir": str(tmp_path / "cache"), "source": "sudoku"} | small | changes).items():
            data[key] = value
        return data

    return make
