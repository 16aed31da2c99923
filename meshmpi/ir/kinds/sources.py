"""Inputs and outputs of a program: feeds, variables, the step number, indices, random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshmpi.ir.kinds.checks import require, result_type
from meshmpi.ir.program import Alias, Instruction, Kind, LocalType, Program, Traits, Work


class Source(Kind):
    """Kinds without inputs."""

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        y = result_type(program, i)
        require(not xs and not y.partial, "has inputs or an unfinished result")
        self.check_result(program, y)

    def check_result(self, program: Program, y: LocalType) -> None:
        """What the kind demands of its result."""


@dataclass(frozen=True, eq=False, repr=False)
class Feed(Source, kind="feed", traits=Traits(free=True, given=True, kept=True)):
    """The block of a value given at each step."""

    name: str

    @property
    def label(self) -> str:
        return self.name

    def check_result(self, program: Program, y: LocalType) -> None:
        require(program.feeds[self.name] == y, "differs from the type of the feed")

    def alias(self, program: Program, i: Instruction) -> Alias:
        return Alias("feed", self.name)


@dataclass(frozen=True, eq=False, repr=False)
class Read(Source, kind="read", traits=Traits(free=True, given=True)):
    """The stored block of a variable, as it was when the step began."""

    variable: str

    @property
    def label(self) -> str:
        return self.variable

    def check_result(self, program: Program, y: LocalType) -> None:
        require(program.variables[self.variable].type == y, "differs from the stored type")

    def alias(self, program: Program, i: Instruction) -> Alias:
        return Alias("variable", self.variable)


@dataclass(frozen=True, eq=False, repr=False)
class Write(Kind, kind="write", traits=Traits(kept=True)):
    """The new block of a variable; takes effect after every read of the step."""

    variable: str

    @property
    def label(self) -> str:
        return self.variable

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        require(not i.outputs and len(xs) == 1, "takes one value and makes none")
        require(program.variables[self.variable].type == xs[0], "differs from the stored type")

    def touched(self, i: Instruction, sizes: Mapping[int, int], in_place: bool) -> dict[int, int]:
        return {v: 2 * size for v, size in sizes.items()}

    def workspace(self, program: Program, i: Instruction, at: Mapping[str, int]) -> int:
        return 0


@dataclass(frozen=True, eq=False, repr=False)
class StepNumber(Source, kind="step", traits=Traits(repeatable=True)):
    """The number of the step, int32, without dims."""

    def check_result(self, program: Program, y: LocalType) -> None:
        require(y.dtype == "int32" and not y.shape, "is not an int32 without dims")


@dataclass(frozen=True, eq=False, repr=False)
class Iota(Source, kind="iota", traits=Traits(repeatable=True)):
    """The global index along the one dimension of the result."""

    dim: str

    def check_result(self, program: Program, y: LocalType) -> None:
        require(y.shape.names == (self.dim,) and y.dtype == "int32", "is not an int32 of its dim")


@dataclass(frozen=True, eq=False, repr=False)
class Random(
    Source, kind="random", traits=Traits(repeatable=True, pointwise=True, fusible=True, tileable=True, native=True)
):
    """Numbers of a ``distribution``: uniform in [0, 1), or normal.

    They depend on the program's seed, ``key``, the step and the global index.  With a ``barrier``
    they are not merged with equal ones.
    """

    distribution: str
    key: str
    barrier: str = ""

    @property
    def work(self) -> Work:
        return Work(("random",), "output", weight=1.0)
