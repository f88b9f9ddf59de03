# SPDX-License-Identifier: Apache-2.0
"""The configurations of frozen models: a teacher's and a reference's."""

import json

from checkpointing.frozen_models import configuration_of
from objectives.objective import FrozenModel
from settings.keys import flat
from tests.one_step import small_config


def test_a_frozen_model_has_no_dropout_and_a_teacher_drops_no_token(tmp_path):
    """What they say of a token depends on nothing else of the batch; the trained model keeps its own keys."""
    config = small_config()
    config.model.update(dropout=0.1, num_experts=4, expert_capacity=1.5)
    (tmp_path / "config.json").write_text(json.dumps(flat(config)))
    config.distillation.teacher = str(tmp_path)
    teacher = configuration_of(FrozenModel("teacher", "distillation.teacher"), config)
    assert (teacher.model.dropout, teacher.model.expert_capacity) == (0, 0)
    reference = configuration_of(FrozenModel("reference", "train.init_from"), config)
    assert (reference.model.dropout, config.model.dropout) == (0, 0.1)
