# SPDX-License-Identifier: Apache-2.0
"""Structural models, adjustment and the PC algorithm, against closed forms, exhaustive search and other libraries.

What needs networkx, causal-learn or dowhy is skipped without them; they are in the extra `causality`.
"""

import functools
import itertools
import math

import numpy as np
import pytest

from causality import adjustment, discovery
from causality.structural import Mechanism, StructuralModel, binary, linear

CHAIN = StructuralModel(
    {"z": linear({}), "x": linear({"z": 0.8}), "m": linear({"x": 0.5}), "y": linear({"m": 2, "z": -1})}
)


def simpson():
    """The treatment x helps by 0.12 in each stratum of z, and those who are treated are worse off."""
    return StructuralModel({
        "z": binary(lambda: 0.5),
        "x": binary(lambda z: 0.2 + 0.6 * z, "z"),
        "y": binary(lambda z, x: 0.7 - 0.45 * z + 0.12 * x, "z", "x"),
    })  # fmt: skip


def random_dag(rng, size=5, chance=0.4):
    """Return weights [D, D] of a linear model, entry (i, j) that of i -> j, in a random order of the variables."""
    weights = np.triu(rng.random((size, size)) < chance, 1) * rng.uniform(0.5, 1.5, (size, size))
    weights *= rng.choice([-1, 1], (size, size))
    order = rng.permutation(size)
    return weights[np.ix_(order, order)]


def sampled(rng, weights, n):
    """Return data [n, D] of the linear model x = x W + noise, solved at once."""
    return rng.standard_normal((n, len(weights))) @ np.linalg.inv(np.eye(len(weights)) - weights)


def test_do_gives_the_total_effect_of_the_linear_model():
    """By hand: x -> m -> y is 0.5 * 2; setting x leaves z alone."""
    rng = np.random.default_rng(0)
    low, high = (CHAIN.sample(20_000, np.random.default_rng(1), do={"x": value}) for value in (0.0, 1.0))
    assert abs((high["y"] - low["y"]).mean() - 1.0) < 1e-9  # the same noise, so the difference is exact
    assert abs(np.corrcoef(low["z"], CHAIN.sample(20_000, rng, do={"x": 1.0})["y"])[0, 1]) < 0.02
    assert (high["x"] == 1).all() and abs(high["z"].mean()) < 0.03


def test_a_counterfactual_is_that_of_the_closed_form():
    """The noise of y stays, so setting x to 3 changes y by 0.5 * 2 * (3 - x)."""
    observed = CHAIN.sample(1000, np.random.default_rng(0))
    other = CHAIN.counterfactual(observed, {"x": 3.0})
    np.testing.assert_allclose(other["y"], observed["y"] + 1.0 * (3 - observed["x"]), atol=1e-9)
    np.testing.assert_array_equal(other["z"], observed["z"])
    np.testing.assert_allclose(CHAIN.counterfactual(observed, {})["y"], observed["y"], atol=1e-12)


def test_what_does_not_depend_on_a_set_variable_needs_no_inverse():
    """z is binary, so its noise cannot be recovered, but x does not cause it."""
    model = StructuralModel({
        "z": Mechanism((), lambda noise: (noise > 0) + 0.0, lambda rng, n: rng.normal(size=n)),
        "x": linear({"z": 1}), "y": linear({"x": 2, "z": 1}),
    })  # fmt: skip
    observed = model.sample(100, np.random.default_rng(0))
    other = model.counterfactual(observed, {"x": 1.0})
    np.testing.assert_array_equal(other["z"], observed["z"])
    np.testing.assert_allclose(other["y"], observed["y"] + 2 * (1 - observed["x"]), atol=1e-9)


def test_mistakes_of_a_model_name_the_variable():
    with pytest.raises(ValueError, match="x needs z, which is not a variable before it"):
        StructuralModel({"x": linear({"z": 1}), "z": linear({})})
    with pytest.raises(ValueError, match="do: q is not a variable; the variables are z, x, m, y"):
        CHAIN.sample(2, np.random.default_rng(0), do={"q": 1})
    with pytest.raises(ValueError, match="y has no `invert`"):
        simpson().counterfactual(simpson().sample(3, np.random.default_rng(0)), {"x": 1})


def test_adjustment_has_the_right_sign_where_the_plain_difference_has_not():
    values = simpson().sample(20_000, np.random.default_rng(0))
    assert adjustment.naive_effect(values, "x", "y") < -0.05
    for effect in (adjustment.naive_effect, functools.partial(adjustment.adjusted_effect, adjust=["z"])):
        with pytest.raises(ValueError, match="x is a treatment, so each value must be 0 or 1"):
            effect(values | {"x": np.where(values["x"] == 1, np.nan, 0.0)}, "x", "y")
    assert abs(adjustment.adjusted_effect(values, "x", "y", ["z"]) - 0.12) < 0.02
    assert adjustment.adjusted_effect(values, "x", "y", []) == pytest.approx(adjustment.naive_effect(values, "x", "y"))
    with pytest.raises(ValueError, match=r"where z=1\.0, x has one value only"):
        adjustment.adjusted_effect(values | {"x": np.minimum(values["x"], 1 - values["z"])}, "x", "y", ["z"])
    words = {"x": np.array([0, 1, 1, 1]), "y": np.arange(4.0), "z": np.array(["a", "a", "b", "b"])}
    with pytest.raises(ValueError, match="naive_effect: x has one value only"):
        adjustment.naive_effect(values | {"x": np.ones_like(values["x"])}, "x", "y")
    with pytest.raises(ValueError, match="linear_effect: x follows from what is adjusted for, z; leave some"):
        adjustment.linear_effect(values | {"x": 1 - values["z"]}, "x", "y", ["z"])
    with pytest.raises(ValueError, match="nothing; it has one value only"):
        adjustment.linear_effect(values | {"x": np.ones_like(values["x"])}, "x", "y", [])
    with pytest.raises(ValueError, match="where z=b, x has one value only"):
        adjustment.adjusted_effect(words, "x", "y", ["z"])


def test_an_adjusted_effect_weighs_each_stratum_by_its_units():
    """Three of four units are in the stratum in which the treatment adds 1; it adds 5 in the other."""
    z, x = np.repeat([0, 0, 0, 1], 2), np.tile([0, 1], 4)
    values = {"z": z, "x": x, "y": x * np.where(z == 0, 1.0, 5.0)}
    assert adjustment.adjusted_effect(values, "x", "y", ["z"]) == 2.0


def test_a_linear_mechanism_has_its_offset_also_in_a_counterfactual():
    model = StructuralModel({"x": linear({}, deviation=0.0, offset=5.0), "y": linear({"x": 2}, offset=-1.0)})
    observed = model.sample(1000, np.random.default_rng(0))
    assert (observed["x"] == 5).all() and abs(observed["y"].mean() - 9) < 0.2
    other = model.counterfactual(observed, {"x": 0.0})
    np.testing.assert_allclose(other["y"], observed["y"] - 10, atol=1e-9)


def test_a_linear_effect_adjusts_for_confounders_and_not_for_mediators():
    values = CHAIN.sample(20_000, np.random.default_rng(0))
    assert abs(adjustment.linear_effect(values, "x", "y", ["z"]) - 1.0) < 0.05
    assert abs(adjustment.linear_effect(values, "x", "y", ["z", "m"])) < 0.05
    assert abs(adjustment.linear_effect(values, "x", "y", []) - 1.0) > 0.3


def test_back_door_sets_leave_out_descendants_and_colliders():
    networkx = pytest.importorskip("networkx")
    m_graph = networkx.DiGraph([("a", "x"), ("a", "c"), ("b", "c"), ("b", "y"), ("x", "y"), ("y", "d")])
    assert adjustment.d_separated(m_graph, "x", "b") and not adjustment.d_separated(m_graph, "x", "b", ["c"])
    assert adjustment.is_backdoor_set(m_graph, "x", "y", [])
    assert not adjustment.is_backdoor_set(m_graph, "x", "y", ["c"])  # a collider opens the path
    assert adjustment.is_backdoor_set(m_graph, "x", "y", ["c", "a"])
    assert not adjustment.is_backdoor_set(m_graph, "x", "y", ["d"])  # a descendant of the treatment
    assert adjustment.backdoor_set(m_graph, "x", "y") == set()
    assert adjustment.backdoor_set(CHAIN.graph(), "x", "y") == {"z"}
    hidden = networkx.DiGraph([("x", "y"), ("y", "x2")])
    assert adjustment.backdoor_set(hidden, "x", "y") == set()
    assert adjustment.backdoor_set(networkx.DiGraph([("y", "x")]), "x", "y") is None


def test_back_door_sets_of_random_graphs_give_the_effect_of_do():
    """In a linear model the total effects are (I - W)^-1."""
    pytest.importorskip("networkx")
    rng, names, checked = np.random.default_rng(0), list("abcd"), 0
    for _ in range(8):
        weights = random_dag(rng, 4, 0.6)
        total = np.linalg.inv(np.eye(4) - weights)
        covariance = total.T @ total
        graph = graph_of(weights, names)
        for x, y in itertools.permutations(range(4), 2):
            others = [i for i in range(4) if i not in (x, y)]
            for adjust in itertools.chain(*(itertools.combinations(others, size) for size in range(3))):
                chosen = [x, *adjust]
                effect = np.linalg.solve(covariance[np.ix_(chosen, chosen)], covariance[chosen, y])[0]
                if adjustment.is_backdoor_set(graph, names[x], names[y], [names[i] for i in adjust]):
                    assert effect == pytest.approx(total[x, y], abs=1e-9)
                    checked += 1
    assert checked > 50


def graph_of(weights, names):
    import networkx

    graph = networkx.DiGraph([(names[i], names[j]) for i, j in np.argwhere(weights).tolist()])
    graph.add_nodes_from(names)
    return graph


def test_pc_finds_the_graph_that_observations_can_tell():
    """By hand: in a collider both edges have a direction; in a chain none has; Meek's first rule directs c -> d."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 4000))
    c = a + b + rng.standard_normal(4000)
    d = c + rng.standard_normal(4000)
    expected = np.zeros((4, 4), bool)
    expected[[0, 1, 2], [2, 2, 3]] = True
    np.testing.assert_array_equal(discovery.pc(np.stack([a, b, c, d], 1)), expected)
    chain = discovery.pc(np.stack([a, (e := a + rng.standard_normal(4000)), e + rng.standard_normal(4000)], 1))
    np.testing.assert_array_equal(chain, chain.T)
    assert chain[0, 1] and chain[1, 2] and not chain[0, 2]


def test_pc_does_not_depend_on_scale_or_order():
    rng = np.random.default_rng(3)
    data, order = sampled(rng, random_dag(rng), 2000), rng.permutation(5)
    found = discovery.pc(data)
    np.testing.assert_array_equal(discovery.pc(data * [1, 9, 0.1, 5, 2] + 7), found)
    reordered = discovery.pc(data[:, order])
    np.testing.assert_array_equal(reordered | reordered.T, (found | found.T)[np.ix_(order, order)])


def test_variables_that_are_sums_of_others_have_the_partial_correlations_of_their_residuals():
    """Given their sum, two variables exclude each other; given both, their sum is known and nothing depends on it."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 40))
    correlation = np.corrcoef([x, y, x + y, x + rng.standard_normal(40)])
    assert discovery.fisher_z(correlation, 40, 0, 1, ()) > 0.05
    assert discovery.fisher_z(correlation, 40, 0, 1, (2,)) < 1e-100
    assert discovery.fisher_z(correlation, 40, 2, 3, (0, 1)) == 1
    with pytest.raises(ValueError, match="column 1 is constant"):
        discovery.pc(np.stack([x, np.full(40, 0.1), y], 1))


def test_a_test_that_is_given_variables_has_as_many_fewer_degrees_of_freedom():
    """atanh(r) sqrt(n - |given| - 3) is standard normal; here the given ones are independent of the pair."""
    correlation = np.eye(4)
    correlation[0, 1] = correlation[1, 0] = 0.6
    for given, freedom in (((), 9), ((2,), 8), ((2, 3), 7)):
        expected = math.erfc(math.atanh(0.6) * math.sqrt(freedom / 2))
        assert discovery.fisher_z(correlation, 12, 0, 1, given) == pytest.approx(expected)


def test_pc_finds_the_skeletons_of_random_graphs():
    """benchmarks/causal_analysis.py has 200 of them."""
    hits = found = there = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        weights = random_dag(rng)
        graph, true = discovery.pc(sampled(rng, weights, 2000)), (weights != 0) | (weights != 0).T
        skeleton = graph | graph.T
        hits, found, there = hits + (skeleton & true).sum(), found + skeleton.sum(), there + true.sum()
    assert 2 * hits / (found + there) > 0.93


def test_pc_of_one_variable_has_no_edge_and_what_is_not_finite_is_refused():
    """A correlation that is NaN would never be found independent."""
    data = np.random.default_rng(0).standard_normal((50, 3))
    assert not discovery.pc(data[:, :1]).any()
    data[3, 1] = np.nan
    with pytest.raises(ValueError, match="values that are not finite"):
        discovery.pc(data)


@pytest.mark.filterwarnings("ignore")
def test_pc_agrees_with_causal_learn():
    search = pytest.importorskip("causallearn.search.ConstraintBased.PC")
    for seed in range(10):
        rng = np.random.default_rng(seed)
        data = sampled(rng, random_dag(rng), 2000)
        theirs = search.pc(data, 0.01, "fisherz", show_progress=False).G.graph  # entry (i, j): -1 tail, 1 arrow at i
        ours = discovery.pc(data)
        np.testing.assert_array_equal(ours | ours.T, theirs != 0)
        arrows = (theirs == -1) & (theirs.T == 1)  # i -> j
        np.testing.assert_array_equal((ours & ~ours.T)[arrows | arrows.T], arrows[arrows | arrows.T])


@pytest.mark.filterwarnings("ignore")
def test_the_adjusted_effect_agrees_with_dowhy():
    dowhy, pandas = pytest.importorskip("dowhy"), pytest.importorskip("pandas")
    model, values = simpson(), simpson().sample(20_000, np.random.default_rng(0))
    theirs = dowhy.CausalModel(pandas.DataFrame(values), "x", "y", graph=model.graph())
    estimand = theirs.identify_effect(proceed_when_unidentifiable=True)
    assert set(estimand.get_backdoor_variables()) == adjustment.backdoor_set(model.graph(), "x", "y")
    effect = theirs.estimate_effect(estimand, method_name="backdoor.propensity_score_stratification").value
    assert abs(effect - adjustment.adjusted_effect(values, "x", "y", ["z"])) < 0.02
