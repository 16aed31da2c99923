"""The kind that calls a function of the user on the blocks of a rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshmpi.ir.kinds.checks import check_pending, require
from meshmpi.ir.program import Extents, Instruction, Kind, LocalType, Program, Traits, Work


class ArrayType(NamedTuple):
    """An array as the function knows it: the names of its dims in order, and its data type."""

    names: tuple[str, ...]
    dtype: str


@dataclass(frozen=True, eq=False)
class Function:
    """A function of the user's and what it is declared to do.  Two are equal only if they are one object.

    Passes and digests see its name alone, which must be another for another function.

    Attributes:
        name: As programs print it.
        call: Takes one array for each of ``takes``; returns one for each of ``makes``, or that one alone.
        flops: Floating-point operations for each element of the first result.
        derivative_of: The function whose gradient this is, if it is one: ``takes`` are then its inputs, its results
            and their gradients.
    """

    name: str
    call: Callable[..., Any]
    takes: tuple[ArrayType, ...]
    makes: tuple[ArrayType, ...]
    flops: int = 0
    derivative_of: Function | None = None

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False, repr=False)
class LocalFunction(Kind, kind="local_function", traits=Traits(hides_network=True)):
    """``function`` of the blocks; indices along ``batch_dims`` are independent of each other, others are whole.

    A result that lacks a batch dim is the sum of what the function makes of its parts, so along a split one that sum
    is pending.  ``checked``: the function is compared with its declaration in every call.
    """

    function: Function
    batch_dims: tuple[str, ...]
    checked: bool = False

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        ys = [program.types[v] for v in i.outputs]
        for held, t in zip((*self.function.takes, *self.function.makes), (*xs, *ys), strict=True):
            require(sorted(held.names) == sorted(t.shape.names), f"has {t} where its function has {held.names}")
        require(not any(t.partial for t in xs), "has an unfinished input")
        splits = {n: t.split(n) for t in (*xs, *ys) for n in t.shape.names}
        for t in (*xs, *ys):
            require(all(t.split(n) == splits[n] for n in t.shape.names), "has one dimension split in two ways")
        for name, axes in splits.items():
            require(not axes or name in self.batch_dims, f"splits '{name}', which is no batch dimension")
        used = [a for axes in splits.values() for a in axes]
        require(len(used) == len({*used}), "splits two dimensions over one axis")
        for y in ys:
            check_pending(
                program.mesh, y, [a for n, axes in splits.items() if y.shape.find(n) < 0 for a in axes], "sum"
            )

    def flops(self, ins: Sequence[Extents], outs: Sequence[Extents]) -> int:
        return self.function.flops * math.prod(outs[0].values())

    @property
    def work(self) -> Work | None:
        return Work(("simple",), "output", weight=self.function.flops) if self.function.flops else None
