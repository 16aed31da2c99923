"""Updates that are made only if the numbers of the step are finite.

A program has no branch, so each update chooses, element by element, between its new and its old
value.  The choice joins the loop of the update, which has read the old value anyway; what it costs
is one more pass over the gradients, for the sum of their squares, and that all gradients are kept
until this sum is known (with ``clip_norm`` both happen in any case).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshmpi.graph import Tensor, Update, Variable
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.sources import assign, read_stored
from meshmpi.ir.scalar import FLOATS
from meshmpi.nn.functions import global_norm


def all_finite(gradients: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Whether gradients and other tensors are free of NaN and infinities; a bool without dims.

    Args:
        gradients: Judged together by the sum of their squares, which one NaN or infinity spoils;
            one that overflows counts as infinite.
        others: Numbers without dims are judged as they are, others like gradients.
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


def only_if(condition: Tensor, updates: Sequence[Update], values: Mapping[Variable, Tensor]) -> list[Update]:
    """The updates where ``condition`` holds; else each variable keeps its value to the last bit.

    Args:
        condition: A bool without dims.
        updates: Updates of different variables.
        values: Variable -> its old value where its update is computed, of a type that holds all
            its numbers; of the others the stored value is read.
    """
    chosen: list[Update] = []
    for variable, new in updates:
        old = values.get(variable)
        old = read_stored(variable) if old is None else ew.cast(old, variable.dtype)
        chosen.append(assign(variable, ew.where(condition, new, old)))
    return chosen
