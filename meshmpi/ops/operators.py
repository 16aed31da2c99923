"""Python operators of `Tensor`; installed here because the graph does not know the operations."""

from __future__ import annotations

from meshmpi.graph import Tensor
from meshmpi.ops import elementwise as ew
from meshmpi.ops.contraction import matmul

_BINARY = {
    "add": ew.add, "sub": ew.subtract, "mul": ew.multiply, "truediv": ew.divide,
    "floordiv": ew.floordiv, "mod": ew.mod, "pow": ew.pow,
}  # fmt: skip
_OTHER = {"neg": ew.negative, "abs": ew.abs, "matmul": matmul}
_COMPARE = {"lt": ew.less, "le": ew.less_equal, "gt": ew.greater, "ge": ew.greater_equal}


def install() -> None:
    """Gives Tensor its operators.  == and != stay identity, so that tensors can be dict keys."""
    for name, function in _BINARY.items():
        setattr(Tensor, f"__{name}__", lambda a, b, f=function: f(a, b))
        setattr(Tensor, f"__r{name}__", lambda a, b, f=function: f(b, a))
    for name, function in _COMPARE.items():
        setattr(Tensor, f"__{name}__", lambda a, b, f=function: f(a, b))
    for name, function in _OTHER.items():
        setattr(Tensor, f"__{name}__", function)


install()
