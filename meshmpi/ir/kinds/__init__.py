"""The table of instruction kinds: one row each, with everything that is known of it.

| kind | inputs -> outputs | attributes and meaning |
|---|---|---|
| feed | -> x | ``name``: the block of a value given at each step |
| read | -> x | ``variable``: the stored block of a variable, as it was when the step began |
| write | x -> | ``variable``: its new block; takes effect after every read of the step |
| step | -> s | the number of the step, int32, no dimensions |
| map | x... -> y... | ``expr`` (scalar.Expr) at every point; inputs broadcast by name to y's dims |
| iota | -> y[d] | ``dim``: the *global* index along the one dimension of y |
| random | -> y | ``distribution`` (uniform in [0, 1) or normal), ``key`` [2] |
| reduce | x -> y | ``op`` sum, max, min, prod over the dims of x that y lacks(, ``band``) [5] |
| contract | a, b -> y | sum of products over the dims that y lacks(, ``band``) [5] |
| conv | a, b -> y | ``dims``: sum of products of what meets, see `convolutions.ConvDims` [6] |
| transpose | x -> y | the same dims in y's order |
| view | x -> y | the same elements in the same order under other dims [8] |
| slice | x -> y | ``dim, start, stop, stride`` along a whole dimension |
| pad | x -> y | ``dim, before, after, value`` along a whole dimension |
| concat | x... -> y | ``dim``: along a whole dimension |
| gather | table, index -> y | ``dim``: rows of the block of table that index hits, else 0 [7] |
| scatter_add | updates, index -> y | ``dim``: sums updates into the rows of y that index hits [7] |
| put | x, updates, index -> y | ``dim``: x but for the rows that index hits, where held [7] |
| block_sum | x -> y | ``dim, blocks``: sum of the own block; y has one element per block there |
| cumsum | x(, sums) -> y | ``dim, exclusive, reverse(, blocks)``: running sums; of all blocks |
| fused | x... -> y... | ``body``: instructions over the same ``rows`` as one loop nest [1] |
| tiled | x... -> y... | ``body``, a block of the dims ``over`` at a time; see `regions` |
| top_k | x(, index) -> values, index | ``dim, k(, smallest)``: largest first, ties in order [9] |
| all_reduce | x... -> y... | ``axes, op``: finishes what is pending over axes, in one message [4] |
| wait | x -> y | the result of an all_reduce that was only started [4] |
| reduce_scatter | x -> y | ``dim, axes, op``: the same, and keeps only the own block of dim |
| all_gather | x -> y | ``dim, axes``: makes dim whole over its last axes |
| all_to_all | x -> y | ``split, concat, axes``: moves axes from dim ``concat`` to dim ``split`` |
| shift | x... -> y | y[o] = x_j[stride o + offset_j] along split dim, else ``value`` [3] |
| take_shard | x -> y | ``dim, axes``: keeps the own block of dim; no traffic |

[1] They are maps and reductions; ``inner`` has the types of the values that only they use.
[2] A number depends on the program's seed, the key, the step and the global index of its element.
[3] ``dim, axes, stride, offsets, wrap, value``: blocks exchange what others need of them.  Where y
    has a `HaloRegion` along dim, each rank gets that part of x instead of its block.
[4] With ``start`` it runs while the next instructions do; only `wait` may use its result.
[5] Terms whose pair of indices is outside the `Band` do not exist, whatever they would be: a sum or
    maximum leaves them out, and where y has both dims it is 0 there.
[6] And over the other dims that y lacks, as contract does.  Along a convolved dim a or b may be held
    in the `HaloRegion` that the blocks of y, or of the other operand, need.
[7] Dims that index shares with table (or y) are batch dims, but for ``dim``.  ``checked``: an index
    outside raises `RangeError`; ``may_miss``: it is meant.
[8] With a ``barrier`` it is not one with an equal view, random numbers neither: what is computed
    from it is computed anew.
[9] Along a split dim the k largest of each block.  With an index, that of every element is given
    instead of its position.

A row is a class, see `program.Kind`.  A new kind is a row here, its meaning in NumPy
(`kernels.numpy_kernels`), C if it is to have any, and a case in the tests.
"""

from meshmpi.ir.kinds.computing import Contract, Conv, Map, Product, Reduce, linear_in
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
