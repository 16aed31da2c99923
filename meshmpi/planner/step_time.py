"""Where the time of a step goes, instruction by instruction: predicted, or recorded by a trace."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from meshmpi.errors import ConfigError
from meshmpi.ir.kinds import Wait
from meshmpi.ir.program import Collective, Instruction, Program
from meshmpi.planner.machine_file import load_machine
from meshmpi.planner.timing import Prediction, predict_time
from meshmpi.runtime.trace import Recorded, read_trace

COMPUTE, WAITING, OTHER = "compute", "wait for others", "not in an instruction"


class Spent(NamedTuple):
    """Seconds of a step, on one thing."""

    instruction: int  # its number; -1: none
    row: str  # `COMPUTE`, `WAITING`, `OTHER` or mesh axes joined by +
    seconds: float


class Timed(NamedTuple):
    """Where the time of a step goes, and where that is known from."""

    about: str
    parts: tuple[Spent, ...]


def predicted(program: Program, prediction: Prediction | None = None) -> Timed:
    """Where the predicted time of a step goes; the sum is ``prediction.seconds``.

    Args:
        prediction: From `predict_time`; default: that for the stated machine ``"core"``.
    """
    prediction = prediction or predict_time(program, load_machine("core"))
    left, out = list(reversed(prediction.timings)), list[Spent]()
    for n, i in enumerate(program.instructions):
        if left and left[-1].instruction is i:
            out.append(Spent(n, _row(i), left.pop().seconds))
    out += [Spent(-1, OTHER, prediction.other)] if prediction.other else []
    return Timed(str(prediction), tuple(out))


def recorded(program: Program, path: str | Path) -> Timed:
    """Where the time of steps went that ``meshmpi train --trace`` recorded; means over steps and ranks.

    Raises:
        ConfigError: The file is not a trace, or one of another program.
    """
    out, at = list[Spent](), -1
    calls, steps, ranks = read_trace(path)
    for n, call in enumerate(calls):
        if call.kind:
            ways = range(max(at, 0), len(program.instructions))  # an instruction may make several calls
            found = next((k for k in ways if _is(program.instructions[k], call)), None)
            if found is None:
                raise ConfigError(
                    f"the trace {path} is not one of this program: its call {n}, {call.kind} of '{call.name}', is not"
                    f" among the instructions from number {max(at, 0)} on.",
                    "Give the configuration, mesh and layout of the run that wrote it.",
                )
            at, row = found, _row(program.instructions[found])
        else:
            row = OTHER
        out.append(Spent(at, row, call.seconds - call.waited))
        out += [Spent(at, WAITING, call.waited)] if call.waited else []
    whole = milliseconds(sum(s.seconds for s in out))
    return Timed(f"recorded: {whole} a step, the mean of {steps} steps on {ranks} ranks", tuple(out))


def _is(i: Instruction, call: Recorded) -> bool:
    return i.kind == call.kind and i.source.name == call.name


def _row(i: Instruction) -> str:
    return "+".join(i.attrs.axes) if isinstance(i.attrs, (Collective, Wait)) else COMPUTE


def milliseconds(seconds: float) -> str:
    """As ``"3.21 ms"``."""
    return f"{1e3 * seconds:.3g} ms"
