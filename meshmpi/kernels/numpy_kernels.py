"""NumPy kernels: the meaning of every local instruction, and the oracle of every other kernel.

`bind` turns one instruction into a function without arguments on the arrays of one rank, whose
addresses do not change from step to step.  Knows program, dims and scalar only: no graph, no MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from meshmpi.errors import ProgramError
from meshmpi.ir.kinds import Reduce
from meshmpi.ir.program import Instruction, Program
from meshmpi.kernels.bands import band_of, plan_band_contract, plan_band_reduce, without_band
from meshmpi.kernels.binding import Call, Operand, Plan, Runtime, local_call
from meshmpi.kernels.contraction import plan_contract
from meshmpi.kernels.expressions import plan_map
from meshmpi.kernels.fused import plan_fused
from meshmpi.kernels.native import Site, scratch_bytes
from meshmpi.kernels.random_numbers import plan_random
from meshmpi.kernels.reduction import identity, plan_reduce
from meshmpi.kernels.steps import Bound
from meshmpi.kernels.structure import PAIRS, plan_copies, plan_iota, plan_step


def _reduce(call: Call) -> Plan:
    if band_of(call) is None:
        return plan_reduce(without_band(call))
    return plan_band_reduce(call, _planned, identity(call.of(Reduce).op, call.inputs[0].type.dtype))


def _contract(call: Call) -> Plan:
    return plan_contract(without_band(call)) if band_of(call) is None else plan_band_contract(call, _planned)


# What few programs need is imported when it is: many ranks read their files at once.


def _conv(call: Call) -> Plan:
    from meshmpi.kernels.convolution import plan_conv

    return plan_conv(call)


def _indexed(call: Call) -> Plan:
    from meshmpi.kernels.indexing import plan_gather, plan_put, plan_scatter_add

    plans = {"gather": plan_gather, "put": plan_put, "scatter_add": plan_scatter_add}
    return plans[call.instruction.kind](call)


def _ranked(call: Call) -> Plan:
    from meshmpi.kernels.ranking import plan_top_k

    return plan_top_k(call)


def _scanned(call: Call) -> Plan:
    from meshmpi.kernels.scan import plan_block_sum, plan_cumsum

    return (plan_cumsum if call.instruction.kind == "cumsum" else plan_block_sum)(call)


def _local_function(call: Call) -> Plan:
    from meshmpi.kernels.local_functions import plan_local_function

    return plan_local_function(call)


def _tiled(call: Call) -> Plan:
    from meshmpi.kernels.tiled import plan_tiled

    return plan_tiled(call, _planned)


PLANS: dict[str, Callable[[Call], Plan]] = {
    "map": plan_map,
    "reduce": _reduce,
    "contract": _contract,
    "conv": _conv,
    "random": plan_random,
    "gather": _indexed,
    "scatter_add": _indexed,
    "top_k": _ranked,
    "put": _indexed,
    "block_sum": _scanned,
    "cumsum": _scanned,
    "iota": plan_iota,
    "step": plan_step,
    "fused": lambda call: plan_fused(call, _planned),
    "tiled": _tiled,
    "local_function": _local_function,
    **{kind: partial(plan_copies, pairs=pairs) for kind, pairs in PAIRS.items()},
}
"""Kind -> how it is planned.  feed, read and write are the executor's own."""
SHARED = ("map", "reduce", "contract")
"""Kinds of which equal instructions, as those of equal layers, share a plan: it depends on nothing
but attributes and operands."""


def plan(instruction: Instruction, program: Program, coordinates: Mapping[str, int]) -> Plan:
    """How the rank at ``coordinates`` will run the instruction.

    Raises:
        ProgramError: The kind has no local kernel, or the blocks do not fit together.
    """
    if instruction.kind not in PLANS:
        raise ProgramError(
            f"there is no NumPy kernel for '{instruction.kind}'.",
            f"Kinds with one: {', '.join(PLANS)}.",
            str(instruction.source),
        )
    known = _recent.plans_of(program)
    key = (id(instruction), tuple(coordinates.items()))
    if key not in known:  # with the instruction, so that no other can take its address
        known[key] = instruction, _planned(local_call(instruction, program, coordinates))
    return known[key][1]


class _Recent:
    """Plans of the program planned last: its cost, its memory and its kernels ask one by one."""

    def __init__(self) -> None:
        self._program: Program | None = None
        self._plans: dict[tuple, tuple[Instruction, Plan]] = {}
        self.shared: dict[tuple, Plan] = {}

    def plans_of(self, program: Program) -> dict[tuple, tuple[Instruction, Plan]]:
        """The plans made for ``program`` so far; those of any other are forgotten."""
        if program is not self._program:
            self._program, self._plans, self.shared = program, {}, {}
        return self._plans


_recent = _Recent()


def _planned(call: Call) -> Plan:
    kind = call.instruction.kind
    if kind not in SHARED:
        return PLANS[kind](call)
    # repr: 0.0 and -0.0 are equal, and so are 1 and True
    operands = (*map(_form, call.inputs), None, *map(_form, call.outputs))
    form = (kind, repr(call.instruction.attrs), bool(call.ranges), *operands)
    if form not in _recent.shared:
        _recent.shared[form] = PLANS[kind](call)
    return _recent.shared[form]


def _form(x: Operand) -> tuple:
    """All of an operand that a plan depends on."""
    return x.type, x.block, None if x.steps is None else tuple(x.steps.items())


def workspace_bytes(instruction: Instruction, program: Program, coordinates: Mapping[str, int]) -> int:
    """The most bytes of the shared workspace that the bound kernel uses, this one or that in C."""
    of_numpy = plan(instruction, program, coordinates).workspace_bytes
    return max(of_numpy, scratch_bytes(Site(instruction, program.types, program.mesh, coordinates)))


def bind(
    instruction: Instruction,
    program: Program,
    coordinates: Mapping[str, int],
    arrays: Mapping[int, np.ndarray],
    workspace: np.ndarray,
    runtime: Runtime,
) -> Bound:
    """The instruction as a function without arguments.

    Args:
        arrays: Value number -> array of the local block: C-contiguous, dims in its type's order.
        workspace: uint8, 64-byte aligned, at least `workspace_bytes` long; shared by all kernels,
            which run one after another.

    Returns:
        A function that reads the inputs and writes the outputs.  Only a `map` or
        `put` may have an output in the very memory of an input of equal type.

    Raises:
        ProgramError: An array or the workspace does not fit.
    """
    planned = plan(instruction, program, coordinates)
    call = local_call(instruction, program, coordinates)
    for x in (*call.inputs, *call.outputs):
        a = arrays[x.value]
        if a.shape != x.sizes or a.dtype != x.dtype or not a.flags.c_contiguous:
            raise call.fail(
                f"value {x.value} is {a.dtype}{a.shape}, its block is {x.dtype}{x.sizes}.",
                "Give C-contiguous arrays of the local blocks.",
            )
    if workspace.nbytes < planned.workspace_bytes:
        raise call.fail(
            f"the workspace has {workspace.nbytes} bytes, {planned.workspace_bytes} are needed.",
            "Size it by workspace_bytes().",
        )
    ins = [arrays[v] for v in instruction.inputs]
    outs = [arrays[v] for v in instruction.outputs]
    return planned.bind(ins, outs, workspace, runtime)
