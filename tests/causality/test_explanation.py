# SPDX-License-Identifier: Apache-2.0
"""What explain.py and a run report of two prompts: figures, lines, the page, and mistakes."""

import json
import re
import types

import numpy as np
import pytest
from flax import nnx

import train
from causality import explanation, page
from configs import base
from configs.errors import ConfigError
from core.evaluations import causes
from input_pipeline.tokenization import ByteTokenizer
from layers.embeddings import Embedding
from tests.causality import circuits
from tests.scoring.test_during_training import SMALL
from tests.support import write_sums
from tests.test_train import lines_of

NAMES = ("--prompt", "--corrupt")


@pytest.fixture(scope="module")
def found():
    """The explanation of a planted circuit: head 2 of layer 1."""
    graph, params = circuits.planted(1, 2)
    clean, corrupt, _ = circuits.prompts()
    return explanation.explain(graph, params, clean, corrupt, lambda tokens: f"<{tokens[0]}>")


def test_figures_name_the_planted_head_and_the_position_that_asks(found):
    figures = explanation.figures(found)
    assert (figures["heads/layer"], figures["heads/head"]) == (1, 2)
    assert (figures["attention/layer"], figures["attention/position"]) == (1, circuits.LENGTH - 1)
    assert figures["clean"] > 0 > figures["corrupt"] and abs(figures["heads/effect"] - 1) < 0.3
    assert json.loads(json.dumps(figures)) == figures


def test_lines_have_the_planted_head_first_among_the_heads(found):
    lines = explanation.lines(found)
    heads = [line for line in lines if line.startswith("head, at all positions")]
    assert re.match(r"head, at all positions +1 +head 2 +\+", heads[0]) and len(heads) == explanation.SHOWN
    assert lines[0] == f"The prompt is continued by {found.answer!r} and the corrupted prompt by {found.other!r}."


def test_prompts_with_the_same_continuation_are_not_said_to_differ(found):
    same = found._replace(pair=found.pair._replace(corrupt=0.25))
    says = f"Both prompts are continued by {found.answer!r}; next after the corrupted one is {found.other!r}."
    assert explanation.headline(same)[0] == says


def test_the_page_of_a_model_on_which_noise_has_no_effect(found):
    traced = found.traced._replace(effects={name: 0 * table for name, table in found.traced.effects.items()})
    assert page.page(found._replace(traced=traced), "title")


def test_the_page_is_complete_in_itself_and_the_same_each_time(found):
    text = page.page(found, "<title> & more")
    assert text == page.page(found, "<title> & more") and "&lt;title&gt; &amp; more" in text
    assert text.count('<div class="heat"') == 13  # three methods of four taps, and the lens
    assert not re.search(r"https?://|<script|<link|src=", text) and "-0.00" not in text and "nan" not in text
    assert "prefers-color-scheme: dark" in text and "&#x27;&lt;" in text  # the texts of tokens are escaped


def test_the_strongest_sites_come_first_and_nan_is_never_one():
    assert explanation.strongest(np.array([[0.1, np.nan], [0.9, -2.0]]), 3) == [(1, 0), (0, 0), (1, 1)]


@pytest.mark.parametrize(
    "prompt, corrupt, match",
    [
        ("abc", "ab", r"--prompt has 3 tokens \(a\|b\|c\) and --corrupt has 2 \(a\|b\); choose words with as many"),
        ("abc", "abc", "are the same tokens; change a word"),
        ("abcdefgh", "abcdefgi", "has 9 tokens, more than model.max_length=8; shorten it"),
    ],
)
def test_prompts_that_cannot_be_compared_are_one_line(prompt, corrupt, match):
    with pytest.raises(ConfigError, match=match):
        explanation.prompt_tokens(ByteTokenizer(), prompt, corrupt, 8, NAMES, [0])


class Untapped(nnx.Module):
    """A language model of a user that names no activation."""

    def __init__(self):
        self.embed = Embedding(vocab_size=20, embed_dim=8, rngs=nnx.Rngs(0))

    def __call__(self, tokens_BT, positions_BT, segments_BT):
        return self.embed.embedding[...][tokens_BT], None

    def logits(self, x_BTD):
        """Return [B, T, V]."""
        return x_BTD @ self.embed.embedding[...].T


def test_a_model_that_names_no_activation_is_one_line():
    graph, params = nnx.split(Untapped())
    clean, corrupt, _ = circuits.prompts()
    line = (
        r"^the model names no activation \['attention', 'block', .*; an explanation needs embed, block, attention, mlp"
    )
    with pytest.raises(ConfigError, match=line):
        explanation.explain(graph, params, clean, corrupt, str)


@pytest.fixture
def config(single_device, tmp_path):
    write_sums(tmp_path / "texts", 12)
    config = base.get_config()
    changes = {"data.path": f"{tmp_path}/texts/*.txt", "data.cache_dir": f"{tmp_path}/cache"}
    changes |= {"evaluation.tasks_every": 0, "causality.every": 2}
    for key, value in (SMALL | changes).items():
        section, name = key.split(".")
        config[section][name] = value
    config.causality.prompt, config.causality.corrupt = "1 is 1", "2 is 1"
    return config


@pytest.mark.slow
def test_a_run_explains_at_its_steps_and_at_the_end(config, tmp_path, capsys):
    result = train.train(config, tmp_path / "run")
    lines = lines_of(tmp_path / "run", "causality")
    assert list(lines) == [2, 3] and {"clean", "corrupt", "heads/effect", "block/position"} <= lines[3].keys()
    assert "Causal analysis at step 3" in (tmp_path / "run" / "causes.html").read_text()
    assert f"restores {lines[3]['heads/effect']:.3f} of the difference" in capsys.readouterr().out
    assert result.evaluations["causality"] == {name: lines[3][name] for name in result.evaluations["causality"]}


def test_messages_of_a_run_name_its_keys(config):
    config.causality.corrupt = "22 is 1"
    with pytest.raises(ConfigError, match=r"causality\.prompt has 6 tokens"):
        causes.make(config, types.SimpleNamespace(tokenizer=ByteTokenizer()))
