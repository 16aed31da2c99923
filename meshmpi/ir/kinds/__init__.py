"""The table of instruction kinds: one class each, with everything that is known about it.

Each class documents its kind, see also `program.Kind`. A new kind needs a row here, NumPy code
(`kernels.numpy_kernels`), C if any, and a case in the tests.
"""

from meshmpi.ir.kinds.computing import Contract, Conv, Map, Product, Reduce, linear_in
from meshmpi.ir.kinds.functions import LocalFunction
from meshmpi.ir.kinds.indexing import BlockSum, Cumsum, Gather, Lookup, Put, ScatterAdd, TopK, block_sums
from meshmpi.ir.kinds.moving import (
    COLLECTIVES,
    AllGather,
    AllReduce,
    AllToAll,
    LocalSlice,
    Redistribution,
    ReduceScatter,
    Shift,
    Wait,
    bytes_sent,
    nests,
    wire_bytes,
)
from meshmpi.ir.kinds.regions import Fused, Tiled, TileDim
from meshmpi.ir.kinds.shaping import Concat, Pad, Slice, Transpose, View, aligned_groups, view_splits
from meshmpi.ir.kinds.sources import Feed, Iota, Random, Read, StepNumber, Write
from meshmpi.ir.program import KINDS, Collective, Region
