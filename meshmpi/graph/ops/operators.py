"""Python operators of `Tensor`; installed here because the graph does not know the operations."""

from __future__ import annotations

from typing import Any

from meshmpi.errors import ArgumentError
from meshmpi.graph import Tensor, Variable, call_of
from meshmpi.graph.arguments import checked
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops import reductions as red
from meshmpi.graph.ops.contraction import matmul
from meshmpi.graph.ops.sources import value_of
from meshmpi.ir.scalar import SCALAR_FUNCTIONS

_BINARY = {
    "add": ew.add,
    "sub": ew.subtract,
    "mul": ew.multiply,
    "truediv": ew.divide,
    "floordiv": ew.floordiv,
    "mod": ew.mod,
    "pow": ew.pow,
}
_OTHER = {"neg": ew.negative, "abs": ew.abs}
_COMPARE = {"lt": ew.less, "le": ew.less_equal, "gt": ew.greater, "ge": ew.greater_equal}
_UFUNCS = {
    **{name: getattr(ew, name) for name in SCALAR_FUNCTIONS if hasattr(ew, name)},
    "true_divide": ew.divide,
    "floor_divide": ew.floordiv,
    "remainder": ew.mod,
    "power": ew.pow,
    "absolute": ew.abs,
    "matmul": matmul,
}
"""Name of a function of NumPy -> the one that means the same of tensors."""
_REDUCED = {"add": red.reduce_sum, "multiply": red.reduce_prod, "maximum": red.reduce_max, "minimum": red.reduce_min}


def _numpy_function(self: Tensor, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Tensor:
    """What ``np.exp(x)`` and ``array * x`` call: the function of the same name here."""
    name = ufunc.__name__
    known = _UFUNCS.get(name) if method == "__call__" and not options else None
    if known is not None:
        return checked(known)(*inputs)
    remedy = "Use a function of meshmpi; np.exp(x) and the like work where it has the same."
    if method == "reduce" and name in _REDUCED:
        remedy = f"Write mm.{_REDUCED[name].__name__}(x, reduced_dim=name)."
    raise ArgumentError(
        f"np.{name}: {self!r} has no value while the graph is built, so that NumPy cannot compute with it.",
        remedy,
        call_of(f"np.{name}", self),
    )


def install() -> None:
    """Gives Tensor its operators.  == and != stay identity, so that tensors can be dict keys."""
    for name, function in _BINARY.items():
        f = checked(function)
        setattr(Tensor, f"__{name}__", lambda a, b, f=f: f(a, b))
        setattr(Tensor, f"__r{name}__", lambda a, b, f=f: f(b, a))
    for name, function in {**_COMPARE, "matmul": matmul}.items():
        f = checked(function)
        setattr(Tensor, f"__{name}__", lambda a, b, f=f: f(a, b))
    for name, function in _OTHER.items():
        setattr(Tensor, f"__{name}__", function)
    Tensor.__array_ufunc__ = _numpy_function  # type: ignore[method-assign]
    Variable.value = property(value_of)  # type: ignore[assignment]


install()
