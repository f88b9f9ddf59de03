# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness scores a model here as our own tasks do, on tasks and data that are made here."""

import importlib.util
import json
import types

import pytest

from configs.errors import ConfigError
from score import of_harness
from scoring import tasks
from scoring.questions import Item
from settings import loading
from settings.keys import flat
from tests.scoring.test_likelihood import language_model
from tests.test_train import command, finish

INSTALLED = importlib.util.find_spec("lm_eval") is not None
REASON = "lm-evaluation-harness is not installed: make setup EXTRAS=lm-eval"
CHOICES = [
    {"question": "six is", "choices": ["two times three", "ten", "7"], "answer": 0},
    {"question": "eight is", "choices": ["four", "2 times 4"], "answer": 1},
]
TEXTS = [{"text": " ".join(["twelve is three times four"] * 9)}, {"text": "ten"}]
EXACT = [{"prompt": "a", "exact": "b"}, {"prompt": "ab", "exact": "c"}]
KINDS = {"choices": CHOICES, "text": TEXTS, "exact": EXACT}
TASK = """
task: made_{kind}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: {output_type}
doc_to_text: "{before}"
doc_to_target: "{target}"
{more}
metric_list:
{metrics}
"""
GROUP = """
group: made
task: [made_choices, made_exact]
aggregate_metric_list: [{metric: acc}, {metric: exact_match}]
"""
DEFINITIONS = {
    "choices": ("multiple_choice", "{{question}}", "{{answer}}", 'doc_to_choice: "{{choices}}"', ["acc", "acc_norm"]),
    "text": ("loglikelihood_rolling", "", "{{text}}", "", ["word_perplexity", "byte_perplexity", "bits_per_byte"]),
    "exact": (
        "generate_until", "{{prompt}}", "{{exact}}", 'generation_kwargs: {until: [";"], max_gen_toks: 5}',
        ["exact_match"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the definitions and data of three tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    for kind, items in KINDS.items():
        file = folder / f"{kind}.jsonl"
        file.write_text("".join(json.dumps(item) + "\n" for item in items))
        output_type, before, target, more, metrics = DEFINITIONS[kind]
        metrics = "\n".join(f"  - metric: {name}" for name in metrics)
        (folder / f"{kind}.yaml").write_text(
            TASK.format(
                kind=kind, file=file, output_type=output_type, before=before, target=target, more=more, metrics=metrics
            )
        )
    return folder


@pytest.mark.skipif(not INSTALLED, reason=REASON)
@pytest.mark.filterwarnings("ignore")  # its libraries' own
def test_the_harness_gives_the_figures_of_our_own_tasks(folder, monkeypatch, tmp_path):
    from scoring import harness

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    model, names = language_model(), [f"made_{kind}" for kind in KINDS]
    manager = harness.task_manager(names, str(folder))
    results, found = harness.score(model, harness.read(names, manager), manager)
    items = [Item(f"made_{kind}", line, kind, item) for kind, of in KINDS.items() for line, item in enumerate(of)]
    own = tasks.score(model, [item._replace(content=item.content | extra(item)) for item in items])
    expected = tasks.figures_of(own)
    assert found.keys() == expected.keys()
    for task, metrics in found.items():
        for name, figure in metrics.items():
            assert (figure.value, figure.count) == (pytest.approx(expected[task][name].value, rel=1e-6), 2), name
    lines = [one["log_likelihoods"] for one in own if "log_likelihoods" in one]
    answers = [[value for value, _ in one["answers"]] for one in results if one["task"] == "made_choices"]
    assert answers == [pytest.approx(line, rel=1e-6) for line in lines]


@pytest.mark.skipif(not INSTALLED, reason=REASON)
@pytest.mark.filterwarnings("ignore")
def test_a_group_has_the_items_of_its_members(folder, monkeypatch, tmp_path):
    from scoring import harness

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    (tmp_path / "group.yaml").write_text(GROUP)
    for kind in ("choices", "exact"):
        (tmp_path / f"{kind}.yaml").write_text((folder / f"{kind}.yaml").read_text())
    manager = harness.task_manager(["made"], str(tmp_path))
    read = harness.read(["made"], manager)
    assert list(read) == ["made"]
    _, found = harness.score(language_model(), read, manager)
    counts = {task: {name: figure.count for name, figure in of.items()} for task, of in found.items()}
    assert counts["made"] == {"acc": 2, "exact_match": 2}
    assert counts["made_choices"]["acc"] == counts["made_exact"]["exact_match"] == 2
    names = ["made_exact", "made"]
    with pytest.raises(ConfigError, match=r"Duplicate task 'made_exact': .* and 'made'; name one of them$"):
        harness.read(names, manager)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a", "exact"\n')
    definition = (folder / "exact.yaml").read_text().replace(str(folder / "exact.jsonl"), str(broken))
    (tmp_path / "exact.yaml").write_text(definition)
    with pytest.raises(ConfigError, match=r"^--tasks=made_exact: the data of a task cannot be read: .*JSON"):
        harness.read(["made_exact"], harness.task_manager(["made_exact"], str(tmp_path)))


@pytest.mark.skipif(not INSTALLED, reason=REASON)
@pytest.mark.filterwarnings("ignore")
def test_data_that_cannot_be_read_end_the_command_before_the_weights_are_read(folder, monkeypatch, tmp_path):
    from scoring import harness

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    definition = (folder / "exact.yaml").read_text().replace(str(folder / "exact.jsonl"), str(tmp_path / "none.jsonl"))
    (tmp_path / "exact.yaml").write_text(definition)
    manager = harness.TaskManager(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr(harness, "task_manager", lambda names, include_path: manager)  # as if of the package
    with pytest.raises(ConfigError, match=r"^--tasks=made_exact: the data of a task cannot be read: .*none\.jsonl"):
        of_harness(["made_exact"], "", limit=0)
    (tmp_path / "exact.py").write_text("import package_of_one_task\n")
    (tmp_path / "exact.yaml").write_text(f"{definition}process_results: !function exact.results\n")
    with pytest.raises(ConfigError, match=r"^--tasks=made_exact: No module named 'package_of_one_task'; install what"):
        of_harness(["made_exact"], "", limit=0)


def extra(item: Item) -> dict:
    return {"stop": [";"], "max_tokens": 5} if item.kind == "exact" else {}


@pytest.mark.skipif(not INSTALLED, reason=REASON)
@pytest.mark.filterwarnings("ignore")
def test_a_mistake_in_a_definition_is_one_line_with_its_file_before_a_model_is_read(folder, monkeypatch, tmp_path):
    from scoring import harness

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    file, good = tmp_path / "mine.yaml", (folder / "choices.yaml").read_text().replace("made_choices", "mine")
    for old, new, said in (
        ("{{question}}", "{{qestion}}", "UndefinedError: 'qestion' is undefined"),
        ("{{question}}", "{{question", "TemplateSyntaxError: unexpected end of template"),
        ("test_split: test", "test_split: tset", "KeyError: 'tset'"),
        ("doc_to_text", "doc_to_txt", "TypeError: .* 'doc_to_txt'$"),
        ("multiple_choice", "multiple_choices", "ValueError: .* 'multiple_choices'"),
        ('"{{question}}"', "!function mine.question", "ImportError: .* 'mine'"),
    ):
        assert old in good
        file.write_text(good.replace(old, new))
        with pytest.raises(ConfigError, match=f"^--tasks=mine: its definition, {file}, cannot be used: {said}"):
            harness.check(["mine"], harness.task_manager(["mine"], str(tmp_path)))
    reads = "def first_word(item, answers):\n    return {'acc': answers[0].split()[0] == 'a'}\n"
    (tmp_path / "mine.py").write_text(reads)
    asks = (folder / "exact.yaml").read_text().replace("made_exact", "mine")
    for can_be_used in (good, f"{asks}process_results: !function mine.first_word\n"):  # not of an empty answer
        file.write_text(can_be_used)
        harness.check(["mine"], harness.task_manager(["mine"], str(tmp_path)))


@pytest.mark.skipif(not INSTALLED, reason=REASON)
@pytest.mark.filterwarnings("ignore")
def test_a_task_that_samples_is_one_line_also_without_a_temperature():
    from scoring import harness

    request = types.SimpleNamespace(args=("a", {"until": [";"], "do_sample": True}))
    with pytest.raises(ConfigError, match=r"^--tasks: a task asks for random draws"):
        harness.Torus(language_model()).generate_until([request])


@pytest.mark.skipif(not INSTALLED, reason=REASON)
@pytest.mark.filterwarnings("ignore")
def test_an_unknown_task_is_one_line(folder, monkeypatch):
    from scoring import harness

    class Few(harness.TaskManager):
        def __init__(self, include_path, include_defaults=True):  # the thousands of the package take seconds to list
            super().__init__(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(harness, "TaskManager", Few)
    with pytest.raises(ConfigError, match=r"^--tasks=made_choice is not a task of .* did you mean made_choices\?$"):
        harness.task_manager(["made_text", "made_choice"], str(folder))


@pytest.mark.skipif(INSTALLED, reason="lm-evaluation-harness is installed")
def test_without_the_harness_the_command_that_installs_it_is_said(tmp_path):
    (tmp_path / "run").mkdir()
    config = loading.load("configs/char.py", "", {}).config
    (tmp_path / "run" / "config.json").write_text(json.dumps(flat(config)))
    given = (f"--workdir={tmp_path}/run", "--tasks=hellaswag")
    status, _, err = finish(command("score.py", *given, cache=tmp_path))
    assert status == 2 and err == (
        "error: --tasks needs lm-evaluation-harness, which is not installed here; run make setup EXTRAS=lm-eval\n"
    )
