# SPDX-License-Identifier: Apache-2.0
"""Search with a real model, trained for seconds on countdown: what it asks, counts, remembers and shows."""

import json
import math
import types

import jax
import numpy as np
import pytest
from flax import nnx

from configs.errors import ConfigError
from core import assembly, solving
from core.evaluators import engine_of
from inference.batching import Batch, Continuation
from input_pipeline.tasks.countdown import CountdownWindows
from input_pipeline.tokenization import open_tokenizer
from parallelism.mesh import mesh_context
from reasoning.page import page
from reasoning.searches import SEARCHES, bfs
from reasoning.solving import Solved, Solver
from reasoning.tasks import Countdown
from reasoning.thoughts import Judge, Limits, Propose, Thought
from reasoning.values import VALUES, Function
from settings import loading
from settings.validation import validate
from tests.support import on_one_device
from tests.test_train import command, finish
from train import train
from trained_run import TrainedRun

PROBLEMS = CountdownWindows(0, "heldout").problems(6, num_numbers=4)
SMALL = {
    "model.dtype": "float32", "model.num_layers": 2, "model.embed_dim": 64, "model.mlp_dim": 128,
    "train.global_batch": 32, "train.steps": 120, "train.eval_every": 0, "optimizer.warmup_steps": 10,
    "logging.tensorboard": False, "logging.report": False, "evaluation.batches": 1,
    "tot.use_tot": True, "tot.problems": 4, "tot.max_thoughts": 2, "tot.thoughts_per_step": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder and the result of a run that can write lines, though they are seldom right."""
    folder, config = tmp_path_factory.mktemp("countdown") / "run", small_config()
    with on_one_device():
        return folder, train(config, folder), TrainedRun(folder, config)


def small_config():
    """Return the configuration of that run, for one device."""
    config = loading.load("configs/countdown.py", "", {key: str(value) for key, value in SMALL.items()}).config
    config.mesh.fsdp = 1
    validate(config, 1)
    return config


def solver(trained: TrainedRun, limits: Limits, value=None) -> Solver:
    """Return a solver whose cache has the rows of one search."""
    batch = Batch(engine_of(trained.run, trained.params), num_rows=limits.max_thoughts, vocab_size=228)
    tokenizer, task = open_tokenizer("numbers"), Countdown()
    return Solver(batch, tokenizer, task, value or VALUES["verdict"](task, tokenizer, None))


def facts(thought: Thought) -> list:
    """Return everything about a tree."""
    return [(one.lines, one.log_prob, one.value, one.num_draws) for one in thought.all()]


@pytest.mark.slow
@pytest.mark.parametrize("search", ["bfs", "mcts", "best_of_n"])
def test_a_tree_does_not_depend_on_what_else_is_solved_in_the_batch(run, search):
    limits = Limits(2, 2, 3)
    with mesh_context(run[2].run.mesh):
        alone = [solver(run[2], limits).solve([problem], search, limits)[0] for problem in PROBLEMS[:2]]
        together = solver(run[2], Limits(8)).solve(PROBLEMS, search, limits, concurrent=4)
    assert [one.problem for one in together] == PROBLEMS
    for one, again in zip(alone, together, strict=False):
        assert len(one.root.all()) > 2, "the model writes lines"
        assert [name[::3] for name in facts(one.root)] == [name[::3] for name in facts(again.root)]
        np.testing.assert_allclose(
            [name[1:3] for name in facts(one.root)[1:]],
            [name[1:3] for name in facts(again.root)[1:]],
            atol=1e-5,
            rtol=1e-5,
        )  # other rows round differently
        assert one.num_tokens == again.num_tokens > 0


def test_a_search_stops_after_the_problem_in_which_it_is_told_to():
    run, asked = assembly.assemble(small_config(), devices=jax.devices()[:1]), []
    with mesh_context(run.mesh):
        untrained = types.SimpleNamespace(run=run, params=run.init().params)
        found = solver(untrained, Limits(1, 1)).solve(
            PROBLEMS, "greedy", Limits(1, 1), stop=lambda: bool(asked.append(1)) or len(asked) == 2
        )
    assert found is None and len(asked) == 2


class Repeats:
    """In place of a model: it draws the same right answer each time."""

    length, lines = 128, ("12+8=20;3 4 20", "20+4=24;3 24", "24+3=27;27")

    def add(self, request):
        tokenizer = open_tokenizer("numbers")
        tokens = tokenizer.encode(self.lines[tokenizer.decode(request.prompt).count("\n")])
        return Continuation(request, tokens, [-0.1] * len(tokens), reason="end")

    def step(self):
        """All of it is drawn already."""

    def cancel(self, one):
        """Nothing goes on."""


@pytest.mark.parametrize("search", ["best_of_n", "self_consistency"])
def test_a_line_that_is_drawn_again_is_one_thought(search):
    task, tokenizer = Countdown(), open_tokenizer("numbers")
    value = VALUES["oracle"](task, tokenizer, None)
    (found,) = Solver(Repeats(), tokenizer, task, value).solve(["3 4 8 12=27:"], search, Limits(3, 2, 3))
    assert [one.text for one in found.root.all()] == ["", *Repeats.lines] and found.answer
    assert all(one.num_draws > 1 for one in found.root.all()[1:])


def test_what_cannot_be_searched_is_refused_and_no_problem_has_no_answer():
    task, tokenizer = Countdown(), open_tokenizer("numbers")
    one, limits = Solver(Repeats(), tokenizer, task, VALUES["oracle"](task, tokenizer, None)), Limits(3, 2, 3)
    assert one.solve([], "bfs", limits) == []
    for problems, search, concurrent, error, message in (
        (["3 4 8 12=27:"], "bfs", 0, ValueError, "concurrent=0 must be 1 or more"),
        (["3 4 8 12=27:"], "bfss", 1, ValueError, r"search=bfss is unknown; did you mean bfs\? \(all: greedy, "),
        ("3 4 8 12=27:", "bfs", 1, TypeError, "problems='3 4 8 12=27:' is one text; give a list of texts"),
    ):
        with pytest.raises(error, match=message):
            one.solve(problems, search, limits, concurrent)


def solved_with(monkeypatch, search, value: str = "oracle", batch=None):
    """Return what a search of a user, named `mine`, finds for a problem with lines that are drawn already."""
    monkeypatch.setitem(SEARCHES, "mine", search)
    task, tokenizer = Countdown(), open_tokenizer("numbers")
    engine = types.SimpleNamespace(params={"value_head": {"kernel": np.zeros((4, 1))}})  # no states are asked for
    made = VALUES[value](task, tokenizer, engine) if isinstance(value, str) else Function(value)
    return Solver(batch or Repeats(), tokenizer, task, made).solve(["3 4 8 12=27:"] * 2, "mine", Limits(3, 2, 3), 2)


def test_a_search_may_ask_for_nothing(monkeypatch):
    given = []

    def search(root, limits):
        for asked in (Propose([], 3), Propose([root], 0), Propose([root, root], 0, to_the_end=True), Judge([])):
            given.append((yield asked))
        return (root,)

    first, second = solved_with(monkeypatch, search, "value_head")
    assert given == [[], [[]], [[], []], None] * 2 and first.answers == [first.root] != second.answers


@pytest.mark.parametrize(
    ("search", "message"),
    [
        (lambda root, limits: [], r"^search mine returned \[\]; it must return a generator that yields what it asks$"),
        (lambda root, limits: (asked for asked in ()), "^search mine returned None; it must return a list of thoughts"),
    ],
)
def test_what_is_no_search_is_named(monkeypatch, search, message):
    with pytest.raises(TypeError, match=message):
        solved_with(monkeypatch, search)


def test_a_value_that_is_nan_is_refused_since_it_has_no_place_in_an_order(monkeypatch):
    """Python's sort leaves NaN where it is, so a wrong answer would come first."""
    with pytest.raises(ValueError, match=r"^the value of the answer '12\+8=20;3 4 20\\n' is NaN; a value must be a nu"):
        solved_with(monkeypatch, bfs, lambda problem, answer: math.nan)


def test_a_value_function_that_returns_no_number_is_named(monkeypatch):
    with pytest.raises(TypeError, match=r"^the value function returned None; it must return a number$"):
        solved_with(monkeypatch, bfs, lambda problem, answer: None)


def test_a_mistake_in_a_value_leaves_nothing_in_the_batch(monkeypatch):
    class Slow(Repeats):
        """It draws the lines of the first problem at once, and never those of the second."""

        def __init__(self):
            self.added, self.cancelled = [], []

        def add(self, request):
            self.added.append(super().add(request))
            if len(self.added) > 6:
                self.added[-1].reason = ""
            return self.added[-1]

        def cancel(self, one):
            self.cancelled.append(one)

    batch = Slow()
    with pytest.raises(ZeroDivisionError):
        solved_with(monkeypatch, bfs, lambda problem, answer: 1 / 0, batch)
    assert [one for one in batch.added if not one.reason] == batch.cancelled[6:] and len(batch.cancelled) == 12


def test_a_run_whose_recipe_adds_its_task_is_told_to_name_that_recipe():
    config = small_config()
    config.data.source = "ours"
    with pytest.raises(ConfigError, match=r"^data.source=ours has no lines .*; if a recipe adds the task, name"):
        solving.task_of(config)


def test_a_run_that_is_asked_nothing_answers_nothing(monkeypatch):
    """As by a caller whose list of problems is empty."""
    made = []
    monkeypatch.setattr(solving, "Batch", lambda engine, num_rows, vocab_size: made.append(num_rows))
    assert solving.solve(None, small_config(), [])[0] == [] and made[0] > 0


def test_a_line_has_no_more_tokens_than_the_model_has_room_for():
    """Problems have 10 tokens and lines up to 24; a longer line counts as none."""
    config = small_config()
    config.model.max_length = config.train.sequence_length = 32
    run = assembly.assemble(config, devices=jax.devices()[:1])
    with mesh_context(run.mesh):
        untrained = types.SimpleNamespace(run=run, params=run.init().params)
        found = solver(untrained, Limits(2, 2)).solve(PROBLEMS[:2], "bfs", Limits(2, 2))
    assert [one.num_tokens > 0 for one in found] == [True, True]


@pytest.mark.slow
def test_log_probabilities_and_values_are_those_of_the_model(run):
    limits = Limits(2, 2, 3)
    with mesh_context(run[2].run.mesh):
        (found,) = solver(run[2], limits).solve(PROBLEMS[:1], "bfs", limits)
    thought = next(one for one in found.root.all() if one.depth == 2)
    encode = open_tokenizer("numbers").encode
    before = encode(f"{found.problem}{thought.parent.text}\n?y")
    tokens = np.array([before + encode(thought.text)], np.int32)
    log_probs = jax.nn.log_softmax(run[2].logits(tokens)[0])
    drawn = log_probs[np.arange(len(before) - 1, tokens.shape[1] - 1), tokens[0, len(before) :]]
    assert float(drawn.sum()) == pytest.approx(thought.log_prob, abs=1e-4)
    question = encode(f"{found.problem}{thought.parent.text}\n?y{thought.text}\n?")
    last = jax.nn.softmax(run[2].logits(np.array([question], np.int32))[0, -1])
    yes, no = float(last[ord("y")]), float(last[ord("n")])
    assert thought.value == pytest.approx(yes / (yes + no), abs=1e-5)


@pytest.mark.slow
def test_siblings_compute_no_prefix_again_and_the_cache_is_bounded_by_max_thoughts(run):
    sizes = []
    for max_thoughts in (1, 2, 4):
        limits = Limits(max_thoughts, 3, 3)
        with mesh_context(run[2].run.mesh):
            one = solver(run[2], limits)
            (found,) = one.solve(PROBLEMS[:1], "bfs", limits)
        sizes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(one.batch._rows.cache)))
        assert one.batch.num_shared_tokens > one.batch.num_prompt_tokens > 0
        assert max(len(group) for group in _levels(found.root)) <= 3 * max_thoughts
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=0.01) and sizes[2] == pytest.approx(4 * sizes[0], rel=0.01)


def _levels(root: Thought) -> list[list[Thought]]:
    thoughts = root.all()
    return [[one for one in thoughts if one.depth == depth] for depth in range(1, 4)]


@pytest.mark.slow
def test_a_function_of_the_user_is_a_value_and_the_oracle_knows_what_is_right(run):
    limits = Limits(2, 2, 3)
    with mesh_context(run[2].run.mesh):
        longest = Function(lambda problem, answer: len(answer))
        (found,) = solver(run[2], limits, longest).solve(PROBLEMS[:1], "bfs", limits)
    assert all(one.value == len(one.answer) for one in found.root.all()[1:])
    oracle = VALUES["oracle"](Countdown(), None, None)
    lines = ["12+8=20;3 4 20", "20+4=24;3 24", "24+3=27;27"]
    for count, wrong in ((1, "12+8=21;3 4 21"), (2, "20-3=17;4 17"), (3, "24-3=21;21")):
        for line, value in ((lines[count - 1], 1.0), (wrong, 0.0)):
            thought = Thought()
            for text in [*lines[: count - 1], line]:
                thought = Thought(text, thought)
            assert oracle.value("3 4 8 12=27:", thought, []) == value


def test_the_page_shows_every_thought_and_escapes_what_the_model_wrote():
    root = Thought()
    root.children = [Thought("1<2;3", root, -1.0, 0.25, is_final=True), Thought("a&b;4", root, -2.0)]
    text = page([Solved("1 2=3:", root, root.children[:1], 17), Solved("1 2=4:", Thought(), [], 0)], "a <title>")
    assert "a &lt;title&gt;" in text and '<li class="chosen"><code>1&lt;2;3</code>' in text
    assert "value 0.25, p 0.37" in text and "<code>a&amp;b;4</code><small>p 0.14" in text
    assert "2 thoughts, 17 tokens drawn" in text and "0 thoughts, 0 tokens drawn. The search found no" in text


@pytest.mark.slow
def test_a_run_solves_held_out_problems_at_its_evaluations(run):
    folder, result, _ = run
    figures = result.evaluations["tot"]
    assert 0 <= figures["solved"] <= 1 and figures["drawn_tokens"] > 10 and figures["shared_tokens"] > 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "tot"] == [SMALL["train.steps"]]


@pytest.mark.slow
def test_generate_searches_and_says_what_it_cannot_do(run, tmp_path):
    folder, html = run[0], tmp_path / "tree.html"
    asked = ["generate.py", f"--workdir={folder}", "--search=bfs"]
    status, out, err = finish(command(*asked, f"--prompt={PROBLEMS[0]}", f"--html={html}", cache=tmp_path))
    *_, verdict = out.splitlines()
    assert verdict in ("a right answer", "NOT a right answer", "no complete answer"), out
    assert status == 0 and out.startswith(PROBLEMS[0]) and html.read_text().count("<li") > 5, err
    for words, said in (
        (["--prompt=3 4=5"], "error: --prompt=3 4=5: '3 4=5' is not a countdown problem; write one as '3 4 8 12=27:'"),
        (["--prompt=3 4=5:"], "'3 4=5:' needs 3 or 4 numbers; they and the target are from 1 to 30"),
        ([f"--prompt={PROBLEMS[0]}", "--temperature=1"], "--temperature: --search does not read it"),
    ):
        status, out, err = finish(command(*asked, *words, cache=tmp_path))
        assert (status, out) == (2, "") and said in err
    key_alone = command(*asked[:2], f"--prompt={PROBLEMS[0]}", "--config.tot.search=mcts", cache=tmp_path)
    assert "error: --config.tot.search is read by a search alone; add --search=bfs" in finish(key_alone)[2]


@pytest.mark.slow
def test_a_trained_head_values_what_a_search_draws(run, tmp_path):
    """The head is trained on rewarded answers of the frozen model, and its values are those of a full forward pass."""
    of_head = {name: value for name, value in SMALL.items() if name.startswith(("model.", "tot."))} | {
        "train.global_batch": 16, "grpo.group_size": 8, "train.steps": 3, "train.log_every": 1, "train.eval_every": 0,
        "logging.tensorboard": False, "logging.report": False, "evaluation.batches": 1, "train.init_from": str(run[0]),
    }  # fmt: skip
    typed = {name: str(value) for name, value in of_head.items()}
    loaded = loading.load("configs/countdown_value_head.py", "", typed)
    loaded.config.mesh.fsdp = 1
    validate(loaded.config, 1, loaded)
    with on_one_device():
        result = train(loaded.config, tmp_path)
    assert 0 <= result.evaluations["tot"]["solved"] <= 1
    trained = TrainedRun(tmp_path, loaded.config)
    trained_paths = {path for path, _ in jax.tree.leaves_with_path(nnx.to_pure_dict(trained.run.models.trained))}
    assert len(trained_paths) == 1, "the head alone"
    base = run[2].params
    jax.tree.map(np.testing.assert_array_equal, {name: trained.params[name] for name in base}, base)
    limits = Limits(2, 2, 3)
    with mesh_context(trained.run.mesh):
        head = VALUES["value_head"](Countdown(), open_tokenizer("numbers"), engine_of(trained.run, trained.params))
        (found,) = solver(trained, limits, head).solve(PROBLEMS[:1], "bfs", limits)
        for thought in found.root.all()[1:]:
            asked = Countdown().verdict_question(PROBLEMS[0], thought.lines)
            text = np.array([open_tokenizer("numbers").encode(asked)], np.int32)
            stream_BTD, _ = trained.run.model(trained.params)(text, np.arange(text.size)[None], np.ones_like(text))
            logit = np.asarray(stream_BTD, np.float64)[0, -1] @ np.asarray(trained.params["value_head"]["kernel"])[:, 0]
            np.testing.assert_allclose(thought.value, 1 / (1 + np.exp(-logit)), rtol=1e-4)
