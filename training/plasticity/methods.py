# SPDX-License-Identifier: Apache-2.0
"""Methods that keep a network able to learn, as step transforms: plasticity.method names one of METHODS.

A network that is trained on one task after another learns ever worse (Dohare et al., "Loss of plasticity in deep
continual learning", Nature 632, 2024). U is short for [..., F], an array of hidden units, see replacement.py.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from layers.taps import Measure
from layers.units import Units
from training.optimizers import CONSTANT, Weights, is_usual, kind
from training.plasticity import replacement
from training.plasticity.replacement import Surgeon, filled, from_memory, key_of_step, of_units, to_memory
from training.step_transform import StepTransform

LARGEST = 3e38  # the utility of a unit that may not be replaced


def measures(all_units: tuple[Units, ...], functions: dict[str, Callable]) -> dict[str, Measure]:
    """Return a measure of each tap and function, with the key "TAP.NAME OF THE FUNCTION"."""
    return {
        f"{units.tap}.{name}": Measure(units.tap, function, units.axes)
        for units in all_units
        for name, function in functions.items()
    }


def activities(all_units: tuple[Units, ...], memory: dict, measured: dict, decay: float) -> list[jax.Array]:
    """Return the running means of |activation| of all units after a step, each U; the first mean is 0."""
    return [
        running(from_memory(memory, units), of_units(measured[f"{units.tap}.size"], units), decay)
        for units in all_units
    ]


def running(old: jax.Array, new: jax.Array, decay: float) -> jax.Array:
    """Return the exponential moving average after a new value."""
    return old + (1 - decay) * (new - old)


@dataclasses.dataclass(frozen=True)
class Method(StepTransform):
    """The base of all methods; `keys` is the section `plasticity` of the configuration."""

    weights: Weights
    keys: object
    seed: int
    name = "plasticity"


class ContinualBackprop(Method):
    """Replace mature units with the lowest utility, at a rate (Dohare et al., Nature 632, 2024, algorithm 1).

    For unit i, with eta = `decay`, h its activation, and E the mean over the batch's tokens:

        age <- age + 1;  f <- eta f + (1 - eta) E[h];  f_hat = f / (1 - eta^age)
        y = sqrt(E[(h - f_hat)^2]) * mean|w_out| / mean|w_in|
        u <- eta u + (1 - eta) y;  u_hat = u / (1 - eta^age)
        due <- due + rate * (number of units of its group with age > maturity)
        while due >= 1: replace the mature unit with the lowest u_hat;  due <- due - 1

    The paper's "adaptable contribution" has E|h - f_hat| in place of the root mean square, which follows from the two
    moments that the step measures. A group is a layer, or an expert of a layer. A replaced unit gets incoming weights
    from their initial distribution, biases of 0, and age, f and u of 0; its moments in the optimizer are zero. Its
    outgoing weights become zero, and the mean contribution f_hat * w_out is added to the next bias, if the layer has
    one.

    Memory: `age` (int32), `mean` f, `utility` u (float32) U; `due`, float32 [..., 1]; `replaced`, int32, their number.
    """

    redraws_outgoing = False

    @property
    def measures(self):
        """The first two moments of each unit."""
        return measures(self.weights.units, {"mean": lambda h: h, "square": jnp.square})

    def init(self, params):
        shapes = [replacement.shape_of(units, params)[:-1] for units in self.weights.units]
        return {
            "age": filled(self.weights.units, params, 0),
            "mean": filled(self.weights.units, params, 0.0),
            "utility": filled(self.weights.units, params, 0.0),
            "due": to_memory([jnp.zeros((*shape, 1)) for shape in shapes], self.weights.units),
            "replaced": jnp.int32(0),
        }  # fmt: skip

    def update(self, context, change, memory):
        """Return the change with replaced units, and the scalar `units_replaced` since the start of the run."""
        surgeon = Surgeon(change, self.weights.stddevs, key_of_step(self.seed, context.state.step))
        new, count = {"age": [], "mean": [], "utility": [], "due": []}, memory["replaced"]
        last_first = self.weights.units[::-1]  # so that a new unit of the next layer reads nothing from replaced units
        for units in last_first:
            known = {name: from_memory(memory[name], units) for name in new}
            known, scores_U = self._judged(known, units, change.params, context.measured)
            is_mature = known["age"] > self.keys.maturity
            due = known["due"] + self.keys.rate * is_mature.sum(axis=-1, keepdims=True)
            number = jnp.minimum(jnp.floor(due), is_mature.sum(axis=-1, keepdims=True)).astype(jnp.int32)
            most = max(1, math.ceil(self.keys.rate * scores_U.shape[-1]))  # of a group that are replaced in a step
            is_kth = replacement.lowest(jnp.where(is_mature, scores_U, LARGEST), number, most)
            mask_U = is_kth.any(axis=-2)
            surgeon.replace(
                units, mask_U, is_kth=is_kth, mean_U=None if self.redraws_outgoing else self._unbiased("mean", known),
                redraws_outgoing=self.redraws_outgoing,
            )  # fmt: skip
            count = count + mask_U.sum()
            new["due"].append(due - number)
            for name in ("age", "mean", "utility"):
                new[name].append(jnp.where(mask_U, jnp.zeros_like(known[name]), known[name]))
        kept = {name: to_memory(arrays, last_first) for name, arrays in new.items()}
        return surgeon.result(), kept | {"replaced": count}, _scalars(change, memory["replaced"], count)

    def _judged(self, kept: dict, units: Units, params: dict, measured: dict) -> tuple[dict, jax.Array]:
        """Return (what is kept of these units after the step, their utilities u_hat)."""
        mean_U, square_U = (of_units(measured[f"{units.tap}.{name}"], units) for name in ("mean", "square"))
        kept = kept | {"age": kept["age"] + 1, "mean": running(kept["mean"], mean_U, self.keys.decay)}
        expected_U = self._unbiased("mean", kept)
        deviation_U = jnp.sqrt(jnp.maximum(square_U - 2 * expected_U * mean_U + expected_U**2, 0))
        incoming_U, outgoing_U = replacement.mean_sizes(params, units)
        new_U = deviation_U * outgoing_U / jnp.maximum(incoming_U, 1e-30)
        kept |= {"utility": running(kept["utility"], new_U, self.keys.decay)}
        return kept, self._unbiased("utility", kept)

    def _unbiased(self, name: str, kept: dict) -> jax.Array:
        """Return a running mean without the bias of its start at 0."""
        return kept[name] / (1 - self.keys.decay ** kept["age"].astype(jnp.float32))


class Redraw(ContinualBackprop):
    """Continual backprop that draws the outgoing weights of replaced units from their initial distribution too.

    A replaced unit thus contributes at once, at the cost of a change of the function. The next bias stays as it is.
    """

    redraws_outgoing = True


class ReDo(Method):
    """Every `every` steps, replace the dormant units (Sokar et al., arXiv:2302.12902, algorithm 1).

    Incoming weights are drawn from their initial distribution, and outgoing weights become zero, as do the moments of
    both. The activity of a unit is a running mean of E|h| with `decay`, where the paper takes one batch.

    Memory: `activity`, float32 U; `replaced`, int32, the number of replaced units.
    """

    @property
    def measures(self):
        """The mean absolute activation of each unit."""
        return measures(self.weights.units, {"size": jnp.abs})

    def init(self, params):
        return {"activity": filled(self.weights.units, params, 0.0), "replaced": jnp.int32(0)}

    def update(self, context, change, memory):
        """Return the change with replaced units, and the scalar `units_replaced` since the start of the run."""
        active = activities(self.weights.units, memory["activity"], context.measured, self.keys.decay)
        key = key_of_step(self.seed, context.state.step)

        def replaced():
            surgeon, kept, count = Surgeon(change, self.weights.stddevs, key), [], memory["replaced"]
            for units, activity_U in zip(self.weights.units[::-1], active[::-1], strict=True):
                mask_U = replacement.dormant(activity_U, self.keys.dormant_below)
                surgeon.replace(units, mask_U)
                kept.append(jnp.where(mask_U, activity_U.mean(axis=-1, keepdims=True), activity_U))
                count = count + mask_U.sum()
            return surgeon.result(), kept[::-1], count

        is_due = (context.state.step + 1) % self.keys.every == 0
        change, active, count = jax.lax.cond(is_due, replaced, lambda: (change, active, memory["replaced"]))
        kept = {"activity": to_memory(active, self.weights.units), "replaced": count}
        return change, kept, _scalars(change, memory["replaced"], count)


def _scalars(change, before: jax.Array, after: jax.Array) -> dict[str, jax.Array]:
    """Return the number of replaced units; a rejected update replaces none."""
    return {"units_replaced": jnp.where(change.accepted, after, before).astype(jnp.float32)}


class L2Init(Method):
    """Add strength * |theta - theta_0|^2 to the loss, with the initial parameters theta_0 (arXiv:2308.11958, eq. 1).

    The term changes the gradient and not the reported loss. Tables, router biases and constants are left alone.

    Memory: `initial`, a copy of the initial parameters.
    """

    def init(self, params):
        return {"initial": jax.tree.map(jnp.copy, params)}

    def change_gradients(self, gradients, state):
        """Return the gradients with that of the term, 2 * strength * (theta - theta_0)."""
        strengths = self.weights.map(lambda axes: self.keys.strength if is_usual(axes) else 0.0, gradients)
        return jax.tree.map(
            lambda g, theta, first, strength: g + 2 * strength * (theta - first) if strength else g,
            gradients, state.params, state.extra[self.name]["initial"], strengths,
        )  # fmt: skip


class ShrinkPerturb(Method):
    """Every `every` steps, theta <- (1 - shrink) theta + perturb * theta_new (arXiv:1910.08475, section 4).

    theta_new is drawn from a normal distribution with the initial deviation. Parameters that begin with one value, such
    as norms and biases, and constants of the model, are left alone. It has no memory.
    """

    def update(self, context, change, memory):
        key = key_of_step(self.seed, context.state.step)

        def perturbed(params):
            def of_one(number, path, theta):
                if not (stddev := self.weights.stddevs[path]) or kind(self.weights.axes[path]) == CONSTANT:
                    return theta
                draws = stddev * jax.random.normal(jax.random.fold_in(key, number), theta.shape)
                return (1 - self.keys.shrink) * theta + self.keys.perturb * draws

            flat = flatten_dict(params)
            return unflatten_dict({path: of_one(n, path, theta) for n, (path, theta) in enumerate(flat.items())})

        is_due = (context.state.step + 1) % self.keys.every == 0
        return change._replace(params=jax.lax.cond(is_due, perturbed, lambda p: p, change.params)), memory, {}


METHODS: dict[str, type[Method]] = {
    "continual_backprop": ContinualBackprop, "redo": ReDo, "l2_init": L2Init, "shrink_perturb": ShrinkPerturb,
    "redraw": Redraw,
}  # fmt: skip
