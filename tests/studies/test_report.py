# SPDX-License-Identifier: Apache-2.0
"""The report of a group that varies a size, and the guides of groups."""

import dataclasses
import math
import re

from studies import suites
from studies.report import guide
from tests.studies.conftest import ended, needs_optuna, sweep
from tests.support import drawn

GROUP = "exp02b-h-cycles"


DEPTHS = {"alone/1x1": 0.1, "alone/16x1": 0.5, "vote/16x2": 0.6, "vote/16x8": 0.7, "oracle/16x8": 0.9}


def answer_of(*, seeds: int, bends: bool = False, breadth: dict | None = None):
    """Return (study, answer) of the group of cycles; each doubling adds 0.1, up to 2 cycles if it `bends`."""
    from optuna.trial import TrialState, create_trial

    from studies.report import answers

    study, _ = suites.find("trm")
    members = suites.members(study, [GROUP], seeds=seeds)
    trials = {}
    for member in members:
        cycles = member.values["model.high_cycles"]
        value = 0.3 + 0.1 * math.log2(min(cycles, 2) if bends else cycles) + 0.002 * (-1) ** (cycles + member.seed)
        trials[member.digest] = create_trial(
            state=TrialState.COMPLETE, value=value,
            user_attrs={"topology": "", "chip_hours": float(cycles), "breadth": breadth or {}},
            intermediate_values={100: value / 2, 200: value},
        )  # fmt: skip
    return study, *answers.of_study(study, members, trials)


@needs_optuna
def test_the_report_of_a_size_has_its_slope_its_plots_and_its_guide():
    from studies.report import page

    study, answer = answer_of(seeds=2)
    assert "Each doubling of model.high_cycles changes the exact accuracy by +0.1000 (95 % interval " in answer.sentence
    assert answer.sizes == {"01": 1.0, "02": 2.0, "03": 3.0, "04": 4.0, "05": 5.0} and not answer.fit.bends
    shown = page.page(study, [answer])
    assert shown == page.page(study, [answer]) and shown.count("<svg") == 3, "curves, fit and costs"
    rows = [dataclasses.replace(answer.rows[0], left=1), *answer.rows[1:]]
    assert "5 of 5 configurations are done" in shown
    assert "4 of 5 configurations are done" in page.page(study, [dataclasses.replace(answer, rows=rows)])
    assert "No lack of fit shows" in shown and "chip-hours of a run" in shown
    assert "nothing beats in both: 01, 02, 03, 04, 05." in shown
    inside = shown.partition("<details>")[2].partition("</details>")[0]
    for section in guide.sections(study, GROUP):
        assert f"<dt>{section.heading}</dt>" in inside


@needs_optuna
def test_points_that_bend_and_sizes_without_repeats_are_said_to_be_so():
    from studies.report import page

    study, bent = answer_of(seeds=3, bends=True)
    assert bent.fit.bends and "the points do not follow a line (lack of fit, p = " in bent.sentence
    assert "so that the band is not valid" in page.page(study, [bent])
    study, once = answer_of(seeds=0)
    assert once.fit.bend is None and "no conclusion from one seed" in once.sentence
    assert "which one seed cannot show" in once.sentence
    assert "nothing says whether a line is the right curve" in page.page(study, [once])


@needs_optuna
def test_hours_and_dollars_are_those_of_all_trials_as_in_the_status():
    """Also those of a trial that was cancelled, and of one that `retry` queued again."""
    from optuna.trial import TrialState, create_trial

    from studies.report import answers, summary

    study, _ = suites.find("trm")
    members = suites.members(study, ["baseline"], seeds=3)
    done = dict(chip_hours=16.0, cost=32.0, ran_seconds=3600.0)
    cancelled = dict(reason="cancelled", cancelled=True, ran_seconds=7200.0)
    states = (
        (TrialState.COMPLETE, done), (TrialState.FAIL, cancelled), (TrialState.WAITING, dict(ran_before=18_000.0)),
    )  # fmt: skip
    trials = {
        member.digest: create_trial(
            state=state, value=1.0 if state == TrialState.COMPLETE else None,
            user_attrs=dict(topology="v4-32", group="baseline", configuration="baseline") | about,
        )
        for member, (state, about) in zip(members, states, strict=True)
    }  # fmt: skip
    [answer] = answers.of_study(study, members, trials)
    [row] = answer.rows
    assert (row.chip_hours, row.cost) == (16 * (1 + 2 + 5), 32.0 * (1 + 2 + 5))
    assert any(line.split()[-2:] == ["128.00", "$256.00"] for line in summary.lines(study, members, trials, set()))


@needs_optuna
def test_a_learning_curve_has_the_seed_of_its_trial_also_if_an_earlier_seed_failed():
    from optuna.trial import TrialState, create_trial

    from studies.report import answers, page

    study, _ = suites.find("trm")
    _, second = members = suites.members(study, ["baseline"], seeds=2)
    curve, about = {100: 0.25, 200: 0.5}, {"topology": ""}
    done = create_trial(state=TrialState.COMPLETE, value=0.5, intermediate_values=curve, user_attrs=about)
    shown = page.page(study, answers.of_study(study, members, {second.digest: done}))
    assert "baseline, seed 1: 0.5000" in shown and "seed 0" not in shown


def test_the_guide_of_every_group_says_how_to_run_analyse_and_mend_it_with_its_base():
    study, names = suites.find("trm-mini")
    for name in names:
        headings = re.findall(r"^## (.*)$", guide.markdown(study, name), re.MULTILINE)
        assert headings == [
            "Hypothesis", "How to run", "Expected", "How to analyse", "Troubleshooting", "Where results are",
        ]  # fmt: skip
    assert "    python sweep.py run exp08-ema --seeds=3 --base=mini" in guide.markdown(study, "exp08-ema")
    assert "runs/trm-mini" in guide.markdown(study, "exp08-ema")


def test_a_guide_needs_no_database_and_without_a_name_lists_the_questions(tmp_path):
    status, out, err = ended(sweep(tmp_path, "guide"))
    assert status == 0, err
    assert re.search(r"^exp08-ema +Does evaluating an average of the parameters help\?$", out, re.MULTILINE)
    assert not list(tmp_path.iterdir())


@needs_optuna
def test_a_report_of_recursive_models_plots_accuracy_by_depth_and_names_the_mixer():
    from studies.report import page, plots

    assert plots.depth_curves([DEPTHS, {**DEPTHS, "alone/16x1": 0.7}]) == {
        "alone": {1: 0.1, 16: 0.6}, "vote of 8": {16: 0.7}, "oracle of 8": {16: 0.9}
    }  # fmt: skip
    shown = page.page(*(lambda study, answer: (study, [answer]))(*answer_of(seeds=2, breadth=DEPTHS)))
    assert shown.count("<svg") == 4 and "Accuracy by depth, as the end of each run" in shown
    assert "01, vote of 8" in shown and "(mlp mixer)" in shown


@needs_optuna
def test_the_legends_of_many_configurations_with_long_names_stay_inside_the_figure():
    from studies.report import costs, plots

    _, answer = answer_of(seeds=2, breadth=DEPTHS)
    rows = [
        dataclasses.replace(answer.rows[number % 5], name=f"a-configuration-with-a-long-name-{number}")
        for number in range(12)
    ]
    for draw, shown in (
        (plots.draw_curves, (rows, "accuracy")), (plots.draw_breadth, rows),
        (plots.draw_costs, (costs.of_rows(rows, "maximize"), "accuracy")),
    ):  # fmt: skip
        figure = drawn(draw, shown, plots.HEIGHT)
        assert len(figure.axes[0].get_legend().get_texts()) == (12 * 3 if draw is plots.draw_breadth else 12)


@needs_optuna
def test_every_way_of_choosing_of_a_configuration_has_a_marker_of_its_own():
    from matplotlib.figure import Figure

    from studies.report import plots

    _, answer = answer_of(seeds=2, breadth=DEPTHS)
    figure = Figure()
    plots.draw_breadth(answer.rows[:2], figure, {})
    markers = {line.get_label(): line.get_marker() for line in figure.axes[0].lines}
    for row in answer.rows[:2]:
        assert len({markers[f"{row.name}, {way}"] for way in ("alone", "vote of 8", "oracle of 8")}) == 3
    assert markers["01, vote of 8"] == markers["02, vote of 8"]


@needs_optuna
def test_seeds_that_share_no_curve_by_depth_have_no_plot_of_it():
    from studies.report import page

    study, answer = answer_of(seeds=2, breadth=DEPTHS)
    rows = [dataclasses.replace(row, breadths=[DEPTHS, {}]) for row in answer.rows]
    assert "Accuracy by depth" not in page.page(study, [dataclasses.replace(answer, rows=rows)])
    rows[0] = answer.rows[0]
    assert "Accuracy by depth" in page.page(study, [dataclasses.replace(answer, rows=rows)])


@needs_optuna
def test_close_metrics_and_costs_have_ticks_that_differ():
    from studies.report import costs, plots

    _, answer = answer_of(seeds=2)
    rows = [
        dataclasses.replace(
            row, values=[0.94321 + 1e-5 * number] * 2, chip_hours=1234567.0 + 100 * number,
            curves=[{1_234_000 + step: 0.94321 + 1e-5 * number + 1e-7 * step for step in range(100)}] * 2,
        )
        for number, row in enumerate(answer.rows)
    ]  # fmt: skip
    cost = costs.of_rows(rows, "minimize")
    for draw, shown in ((plots.draw_curves, (rows, "loss")), (plots.draw_costs, (cost, "loss"))):
        [axes] = drawn(draw, shown, plots.HEIGHT).axes
        for axis in (axes.xaxis, axes.yaxis):
            labels = [tick.get_text() for tick in axis.get_ticklabels()]
            assert len(set(labels)) == len(labels) > 2 and not axis.get_offset_text().get_text(), labels
