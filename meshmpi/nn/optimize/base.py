"""Common parts of all optimizers: steps, learning rates, clipping, slots and where updates are computed.

An update is computed on the *stored* blocks: gradients are converted to the storage layout of the slots
(`mm.as_stored`), so with ZeRO-style storage they are reduce-scattered and each rank updates only what it keeps.
Layouts and collectives are not known here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, NamedTuple

from meshmpi.dims import Layout, LayoutLike, Shape
from meshmpi.errors import ConfigError, ShapeError, VariableError
from meshmpi.graph import Graph, Tensor, Update, Variable
from meshmpi.graph.autodiff import gradients
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.placement import as_stored
from meshmpi.graph.ops.sources import assign, read_stored
from meshmpi.graph.ops.structure import transpose
from meshmpi.ir.scalar import FLOATS
from meshmpi.nn.functions import clip_by_global_norm, global_norm, widened
from meshmpi.nn.initializers import zeros_initializer
from meshmpi.nn.schedules import Schedule

Rate = float | Schedule | Tensor
"""A number, a schedule (int32 step -> float32), or a tensor without dims."""
LearningRate = Rate | Mapping[str, Rate]
"""One for all variables, or regular expression -> one for the variables whose name contains it."""
VariableLike = Variable | Tensor
Slots = dict[str, Variable]
Choice = Callable[[Variable], bool] | Sequence[str]
"""Variables that something applies to: a test, or regular expressions of names to *exclude*."""


class Item(NamedTuple):
    """One variable to update.

    Attributes:
        variable: The variable.
        w: Its value, in float32 or wider, where its slots are stored.
        g: Its gradient, of the same type and place.
        slots: What `Optimizer.make_slots` returned.
        rate: Its learning rate, a float64 tensor without dims or a number.
    """

    variable: Variable
    w: Tensor
    g: Tensor
    slots: Slots
    rate: Tensor | float


Result = tuple[Tensor, list[Update]]
"""The new value of a variable, and the updates of its slots."""


class StepValues(NamedTuple):
    """Numbers that all updates of one step share, as tensors without dims.

    They are float64, because 1 - 0.999**t loses four digits in float32; `number` brings them into
    the type of an update.

    Attributes:
        done: Updates done before, int32.
        t: ``done`` + 1.
        decay: The weight decay.
    """

    done: Tensor
    t: Tensor
    decay: Tensor | float


def number(x: Tensor | float, like: Tensor) -> Tensor | float:
    """A scalar in the type of ``like``."""
    return ew.cast(x, like.dtype) if isinstance(x, Tensor) else x


def chosen(choice: Choice, variable: Variable) -> bool:
    """Whether ``choice`` takes the variable: by its test, or because no expression excludes it."""
    if callable(choice):
        return choice(variable)
    return not any(re.search(pattern, variable.name) for pattern in choice)


@dataclass(eq=False, repr=False)
class Optimizer:
    """Base of the optimizers.

    Args:
        learning_rate: A number, a schedule (int32 step -> float32, see `meshmpi.nn.schedules`), or
            a tensor without dims.  A mapping gives each variable its own: of the regular
            expressions that are its keys, the first that is found in the variable's name counts,
            as in ``{"embedding": 1e-3, "": cosine(...)}`` ("" is found in every name).
        clip_norm: Scales all gradients so that their common norm is at most this; None: not.
        storage: Layout rules for how the slots are kept, over how their variable is kept:
            ``"d_model:rows"`` is ZeRO-1/2.  Rules for dims that a variable lacks are left out.
        name: Prefix of the optimizer's variables; ``name/step`` counts the updates done.

    Attributes:
        finite: After `apply_gradients` with ``watch``: whether the step's numbers are finite, a
            bool without dims; else None.
    """

    learning_rate: LearningRate
    _: KW_ONLY
    clip_norm: float | None = None
    storage: LayoutLike = None
    name: str
    finite: Tensor | None = field(default=None, init=False)
    slot_names: ClassVar[tuple[str, ...]] = ()
    """Names of the slots that have the shape of their variable, in float32 or wider."""
    weight_decay = 0.0
    """Share of a weight taken off per unit of learning rate, where an optimizer has that."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} '{self.name}'>"

    def minimize(
        self, loss: Tensor, variables: Sequence[VariableLike] | None = None, watch: Sequence[Tensor] | None = None
    ) -> list[Update]:
        """Updates of ``variables`` (default: all trainable ones) that lower ``loss``.

        Variables that the loss does not depend on are left alone.

        Args:
            loss: A number.
            variables: To update.
            watch: As for `apply_gradients`.

        Raises:
            ShapeError: The loss has dims, or depends on none of the variables.
        """
        if loss.shape:
            raise ShapeError(
                f"minimize: the loss is {loss.dtype}{loss.shape}.",
                "Reduce it to a number with mm.reduce_mean().",
                str(loss.source),
            )
        graph = loss.graph
        wanted = graph.trainable_variables if variables is None else variables
        targets = [as_variable(v) for v in wanted]
        with graph:
            pairs = list(zip(gradients([loss], targets), targets, strict=True))
        if all(g is None for g, _ in pairs):
            raise ShapeError(
                f"minimize: the loss depends on none of {[v.name for v in targets]}.",
                "Give the variables it depends on, or make them trainable.",
                str(loss.source),
            )
        return self.apply_gradients(pairs, watch)

    def apply_gradients(
        self, pairs: Sequence[tuple[Tensor | None, VariableLike]], watch: Sequence[Tensor] | None = None
    ) -> list[Update]:
        """Updates by given gradients.

        Args:
            pairs: (gradient, variable or its tensor); None in place of a gradient is skipped.
            watch: Where given, a step whose gradients, learning rates or one of these tensors (mostly the loss) are
                not all finite leaves variables, slots and step count as they were, to the last bit; the attribute
                ``finite`` tells.  A gradient whose sum of squares overflows counts as not finite.

        Returns:
            Updates of variables, slots and the step count, for ``mm.compile(updates=...)``; also
            registered with the graph.

        Raises:
            ShapeError: A gradient does not have the dims of its variable.
            VariableError: Another optimizer of this graph has the same name.
        """
        found = [(g, as_variable(v)) for g, v in pairs if g is not None]
        if not found:
            raise ShapeError("apply_gradients: there is no gradient.", "Give at least one.")
        graph = found[0][0].graph
        registered = len(graph.updates)
        with graph:
            counter = self._counter(graph)
            done = read_stored(counter)
            t = ew.add(ew.cast(done, "float64"), 1.0)
            step = StepValues(done, t, self._at_step(self.weight_decay, done, "weight decay"))
            slots = [self.make_slots(graph, v) for _, v in found]
            homes = [self._home(v, s) for (_, v), s in zip(found, slots, strict=True)]
            grads = self._placed_gradients(found, homes)
            values = [as_stored(widened(read_stored(v)), h) for (_, v), h in zip(found, homes, strict=True)]
            variables = [v for _, v in found]
            rates = self._rates(variables, step.done)
            items = list(map(Item, variables, values, grads, slots, rates))
            updates: list[Update] = []
            for v, (new, changed) in zip(variables, self.update_all(items, step), strict=True):
                updates += [assign(v, ew.cast(new, v.dtype)), *changed]
            updates.append(assign(counter, ew.add(step.done, 1)))
            if watch is not None:
                del graph.updates[registered:]
                self.finite = _all_finite(grads, [*watch, *dict.fromkeys(r for r in rates if isinstance(r, Tensor))])
                updates = _only_if(self.finite, updates, dict(zip(variables, values, strict=True)))
        return updates

    def update_all(self, items: Sequence[Item], step: StepValues) -> list[Result]:
        """The results for all variables; by default one after the other by `update`."""
        return [self.update(item, step) for item in items]

    def update(self, item: Item, step: StepValues) -> Result:
        """The new value of one variable, and the updates of its slots."""
        raise NotImplementedError

    def make_slots(self, graph: Graph, variable: Variable) -> Slots:
        """The variables that the optimizer keeps for ``variable``."""
        return {n: self.slot(graph, variable, n, variable.shape) for n in self.slot_names}

    def slot(self, graph: Graph, variable: Variable, name: str, shape: Shape) -> Variable:
        """A slot ``<optimizer>/<variable>/<name>``, kept as ``variable`` is but for own rules.

        Its ``shape`` is the variable's, or some of its dims.
        """
        dtype = "float32" if variable.dtype == "bfloat16" else variable.dtype
        full = f"{self.name}/{variable.name}/{name}"
        own, like = self._own_rules(variable), variable
        if shape != variable.shape:
            own, like = None, self._kept(variable)
        return graph.variable(Variable(graph.scoped(full), shape, dtype, zeros_initializer(), False, own, like))

    def _own_rules(self, variable: Variable) -> Layout | None:
        shape = variable.shape
        rules = {r.dim + "?" * r.optional: r.axes for r in Layout(self.storage) if shape.find(r.dim) >= 0}
        return Layout(rules) if rules else None

    def _kept(self, variable: Variable) -> Variable:
        """What is kept as slots of the variable's whole shape would be; perhaps no real variable."""
        own = self._own_rules(variable)
        if own is None:
            return variable
        name, shape, dtype = f"{self.name}/{variable.name}", variable.shape, variable.dtype
        return Variable(name, shape, dtype, None, False, own, variable, variable.source)

    def _home(self, variable: Variable, slots: Slots) -> Variable:
        """The variable whose storage layout the update is computed in."""
        whole = [s for s in slots.values() if s.shape == variable.shape]
        return whole[0] if whole else self._kept(variable)

    def _placed_gradients(self, found: Sequence[tuple[Tensor, Variable]], homes: Sequence[Variable]) -> list[Tensor]:
        grads = []
        for (g, v), home in zip(found, homes, strict=True):
            if sorted(g.shape) != sorted(v.shape):
                raise ShapeError(
                    f"the gradient {g.shape} does not have the dimensions of '{v.name}' {v.shape}.",
                    "Reduce it to the variable's dimensions.",
                    str(g.source),
                )
            # Placed before anything else uses it, so that a pending sum is scattered, not repeated.
            placed = as_stored(transpose(g, v.shape), home)
            grads.append(ew.cast(placed, "float32" if v.dtype == "bfloat16" else v.dtype))
        if self.clip_norm is None:
            return grads
        clipped, _ = clip_by_global_norm(grads, self.clip_norm)
        return clipped  # type: ignore[return-value]

    def _counter(self, graph: Graph) -> Variable:
        name = f"{self.name}/step"
        old = graph.variables.get(graph.scoped(name))
        if old is not None:
            raise VariableError(
                f"variable '{old.name}' exists: this graph has an optimizer '{self.name}' already.",
                "Give each optimizer its own name, as in mm.optimize.Adam(1e-3, name='adam_2').",
                str(old.source),
            )
        return graph.variable(Variable(graph.scoped(name), Shape(), "int32", zeros_initializer(), False))

    def _rates(self, variables: Sequence[Variable], done: Tensor) -> list[Tensor | float]:
        """The learning rate of each variable; every schedule is in the graph once."""
        rates = self.learning_rate
        if not isinstance(rates, Mapping):
            return [self._at_step(rates, done, "learning rate")] * len(variables)
        found: list[str] = []
        for v in variables:
            pattern = next((p for p in rates if re.search(p, v.name)), None)
            if pattern is None:
                raise ConfigError(
                    f"no learning rate of '{self.name}' matches variable '{v.name}': its patterns are {list(rates)}.",
                    'Add one for it, or "" at the end for all others.',
                )
            found.append(pattern)
        used = [pattern for pattern in rates if pattern in found]
        made = {p: self._at_step(rates[p], done, "learning rate") for p in used}
        return [made[pattern] for pattern in found]

    def _at_step(self, value: Rate, done: Tensor, what: str) -> Tensor | float:
        """A number, or a float64 tensor without dims, from a number, schedule or tensor."""
        if not isinstance(value, Tensor) and callable(value):
            value = value(done)
        if not isinstance(value, Tensor):
            return float(value)
        if value.shape:
            raise ShapeError(
                f"the {what} of '{self.name}' is {value.dtype}{value.shape}.",
                "Give a number, a schedule or a tensor without dimensions.",
                str(value.source),
            )
        return ew.cast(value, "float64")


def as_variable(v: VariableLike) -> Variable:
    """The variable given as such or by its tensor; ShapeError for any other tensor."""
    found = v if isinstance(v, Variable) else v.variable
    if found is None:
        raise ShapeError(
            f"{v!r} is not the value of a variable.",
            "Give what mm.get_variable() returned.",
            str(v.source),  # type: ignore[union-attr]
        )
    return found


# -- steps whose numbers are not finite ------------------------------------------------------------
# A program has no branch, so each update chooses, element by element, between its new and its old
# value.  The choice joins the loop of the update, which has read the old value anyway; what it costs
# is one more pass over the gradients, for the sum of their squares, and that all gradients are kept
# until this sum is known (with ``clip_norm`` both happen in any case).


def _all_finite(gradients: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Whether all tensors are free of NaN and infinities; a bool without dims.

    Those with dims are judged together by the sum of their squares; one that overflows counts as infinite.
    """
    by_dtype: dict[str, list[Tensor]] = {}
    for g in [*gradients, *(x for x in others if x.shape and x.dtype in FLOATS)]:
        by_dtype.setdefault(g.dtype, []).append(g)
    numbers = [global_norm(same) for same in by_dtype.values()]
    numbers += [x for x in others if not x.shape and x.dtype in FLOATS]
    finite = ew.isfinite(numbers[0])
    for x in numbers[1:]:
        finite = ew.logical_and(finite, ew.isfinite(x))
    return finite


def _only_if(condition: Tensor, updates: Sequence[Update], values: Mapping[Variable, Tensor]) -> list[Update]:
    """The updates where ``condition`` holds; else each variable keeps its value to the last bit.

    ``values``: variable -> its old value, wide, where its update is computed; others are read.
    """
    chosen: list[Update] = []
    for variable, new in updates:
        old = values.get(variable)
        old = read_stored(variable) if old is None else ew.cast(old, variable.dtype)
        chosen.append(assign(variable, ew.where(condition, new, old)))
    return chosen
