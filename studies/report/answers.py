# SPDX-License-Identifier: Apache-2.0
"""What a study's trials say: mean and spread of each configuration over seeds, and the answer of each group."""

import dataclasses
import math
import statistics

from optuna.trial import FrozenTrial, TrialState

from reporting import display
from studies.cost import planning
from studies.cost.budget import cost_of, taken_by
from studies.report import scaling, sizes
from studies.suites import Member, Study
from studies.trials import standing

ONE_SEED = "no conclusion from one seed"
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Row:
    """A configuration of a group over its seeds."""

    name: str
    changes: str  # keys that differ from the base, in words
    values: list[float]  # the metric of each seed whose trial is done
    curves: list[dict[int, float]]  # the metric by step, of each of these
    chip_hours: float  # that all its trials have taken so far
    cost: float | None  # of these, in dollars; None if the price of some is not known
    failures: list[str]  # why trials failed, or why the configuration is refused
    left: int  # number of trials that have not ended, or are not queued
    hours: list[float] = dataclasses.field(default_factory=list)  # chip-hours of each trial in `values`
    # value of every key, of the first seed; {} if the configuration is refused
    config: dict[str, object] = dataclasses.field(default_factory=dict)
    seeds: list[int] = dataclasses.field(default_factory=list)  # of `values`
    # accuracies by depth and breadth, of each of `values`; {} for a run without
    breadths: list[dict[str, float]] = dataclasses.field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether it has metrics and no trial is left."""
        return bool(self.values) and not self.left

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """The standard deviation over seeds; None for fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def error(self) -> float | None:
        """The standard error of the mean; None for fewer than two seeds."""
        return None if self.deviation is None else self.deviation / math.sqrt(len(self.values))


@dataclasses.dataclass(frozen=True)
class Answer:
    """A group with its rows and the answer in one sentence."""

    group: str
    rows: list[Row]
    sentence: str
    fit: scaling.Fit | None = None  # a line through the metrics of all seeds along the axis
    sizes: dict[str, float] = dataclasses.field(default_factory=dict)  # along the axis, by row; {} without


def of_study(study: Study, members: list[Member], trials: dict[str, FrozenTrial]) -> list[Answer]:
    """Return the answer of each group that has members; `trials` has the last one of each configuration by digest."""
    found = []
    for group in dict.fromkeys(member.group for member in members):
        by_name: dict[str, list[Member]] = {}
        for member in members:
            if member.group == group:
                by_name.setdefault(member.plain_name, []).append(member)
        rows = [_row(study, name, seeds, trials) for name, seeds in by_name.items()]
        said = sentence(rows, study.suite.metric, study.suite.direction)
        found.append(_with_fit(Answer(group, rows, said), study.groups[group].axis, study.suite.metric))
    return found


def _with_fit(answer: Answer, axis: str, metric: str) -> Answer:
    """Return an answer with the fit along the axis of its group, which its sentence also states."""
    done = [row for row in answer.rows if row.values]
    if not axis or len(done) < 2:
        return answer
    found = {row.name: sizes.of_axis(row.config, axis) for row in done}
    points = [(found[row.name], value) for row in done for value in row.values]
    fit = scaling.fit(*map(list, zip(*points, strict=True)))
    said = scaling.sentence(fit, len({size for size in found.values() if size > 0}), axis, words(metric))
    return dataclasses.replace(answer, sentence=f"{answer.sentence} {said}", fit=fit, sizes=found)


def sentence(rows: list[Row], metric: str, direction: str) -> str:
    """Return the answer that the rows carry, with its figures; without at least two seeds it concludes nothing."""
    done = [row for row in rows if row.values]
    left, failed = sum(row.left for row in rows), sum(bool(row.failures) for row in rows)
    if len(done) == len(rows) == 1:
        return _of_one(done[0], metric, left)
    if len(done) < 2:
        yet, ended = "No answer yet" if left else "No answer", sum(row.is_done for row in rows)
        why = f", {failed} failed, cancelled or refused" if failed else ""
        return f"{yet}: {ended} of {len(rows)} configurations are done{why}, {display.left(left, 'trial')}."
    ranked = sorted(done, key=lambda row: row.mean, reverse=direction == "maximize")
    best, second, worst = ranked[0], ranked[1], ranked[-1]
    most = f"{best.name} has the best {words(metric)}, {figure(best)}, and {worst.name} the worst, {figure(worst)}"
    if best.mean == worst.mean:
        most = f"All {len(done)} configurations have the same {words(metric)}, {figure(best)}"
    rest = f"; {display.left(left, 'trial')}" if left else ""
    rest += f"; {display.counted(failed, 'configuration')} failed, cancelled or refused" if failed else ""
    if best.error is None or second.error is None or worst.error is None:
        return f"{most}: {ONE_SEED}{rest}."
    if best.mean == worst.mean:
        return f"{most}{rest}."
    gap, needed = abs(best.mean - worst.mean), least_difference(done, best, worst)
    size = max(abs(best.mean), abs(worst.mean))
    apart = f"{digits(gap, size)} apart; the spread over seeds alone explains up to {digits(needed, size)}"
    if gap <= needed:
        return f"No difference beyond the spread over seeds: {most}, {apart}{rest}."
    close = abs(best.mean - second.mean) <= least_difference(done, best, second)
    tie = f"; {second.name}, {figure(second)}, is within the error of the best" if close and len(done) > 2 else ""
    return f"{most}, {apart}{tie}{rest}."


def least_difference(rows: list[Row], one: Row, other: Row) -> float:
    """Return the least difference of two means that is significant at 5 %, if the best and the worst row are compared.

    The Tukey-Kramer test gives it, because the best and the worst are picked from all rows: the more rows, the larger
    the difference by chance. The spread over seeds is pooled over the rows.
    """
    from scipy.stats import studentized_range

    freedom = sum(len(row.values) - 1 for row in rows)
    variance = sum((len(row.values) - 1) * (row.deviation or 0.0) ** 2 for row in rows) / freedom
    error = math.sqrt(variance * (1 / len(one.values) + 1 / len(other.values)) / 2)
    return float(studentized_range.ppf(CONFIDENCE, len(rows), freedom)) * error


def _of_one(row: Row, metric: str, left: int) -> str:
    """Return the sentence of a group of one configuration, which compares nothing."""
    rest = f"; {display.left(left, 'trial')}" if left else ""
    said = f"{row.name} has the {words(metric)} {figure(row)}"
    return f"{said}: {ONE_SEED}{rest}." if row.error is None else f"{said}, mean of {len(row.values)} seeds{rest}."


def figure(row: Row) -> str:
    """Return the mean of a row with its standard error."""
    return digits(row.mean) + ("" if row.error is None else f" ± {digits(row.error, row.mean)}")


def digits(number: float, reference: float | None = None) -> str:
    """Return a number with as many decimals as it or the `reference` needs: 0.00001234, 2.3456 or 123,456."""
    return f"{number:,.{display.decimals(abs(number if reference is None else reference))}f}"


def words(metric: str) -> str:
    """Return the name of a metric as people say it."""
    return metric.removeprefix("eval_").replace("_", " ")


def _mixer(values: dict[str, object]) -> str:
    """Return the mixer of a recursive model, on which its results depend more than on most keys; else ""."""
    return f" ({values['model.mixer']} mixer)" if values.get("model.name") == "trm" else ""


def _row(study: Study, name: str, seeds: list[Member], trials: dict[str, FrozenTrial]) -> Row:
    changes = ", ".join(f"{key}={value}" for key, value in planning.changed(study, seeds[0]).items())
    failures = list(dict.fromkeys(member.refusal for member in seeds if member.refusal))
    found = [trials.get(member.digest) for member in seeds if not member.refusal]
    done = [trial for trial in found if trial and trial.state == TrialState.COMPLETE]
    ended = [trial for trial in found if trial and trial.state.is_finished()]
    failures += [
        f"status {trial.user_attrs.get('status', '-')}: {trial.user_attrs['reason']}" if standing(trial) == "failed"
        else trial.user_attrs["reason"]
        for trial in ended if trial.state == TrialState.FAIL
    ]  # fmt: skip
    return Row(
        name=name,
        changes=(changes or "nothing") + _mixer(seeds[0].values),
        values=[trial.value for trial in done],
        curves=[trial.intermediate_values for trial in done],
        chip_hours=sum(map(taken_by, filter(None, found))),
        cost=cost_of(filter(None, found)),
        failures=failures,
        left=len(found) - len(ended),
        hours=[trial.user_attrs.get("chip_hours", 0.0) for trial in done],
        config=seeds[0].values,
        seeds=[member.seed for member in seeds if trials.get(member.digest) in done],
        breadths=[trial.user_attrs.get("breadth", {}) for trial in done],
    )
