"""The closed set of primitives, one family per file; see `meshmpi.graph.Operation`."""

from meshmpi.graph.arguments import check_all as _check_all
from meshmpi.graph.ops import operators as _operators
from meshmpi.graph.ops.contraction import einsum, matmul
from meshmpi.graph.ops.convolution import conv
from meshmpi.graph.ops.elementwise import (
    abs,
    add,
    add_n,
    broadcast,
    cast,
    cos,
    divide,
    equal,
    erf,
    exp,
    floor,
    floordiv,
    greater,
    greater_equal,
    identity,
    isfinite,
    less,
    less_equal,
    log,
    log1p,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    minimum,
    mod,
    multiply,
    negative,
    not_equal,
    pow,
    reciprocal,
    rsqrt,
    sigmoid,
    sign,
    sin,
    sqrt,
    square,
    sub,
    subtract,
    tanh,
    to_bfloat16,
    to_float,
    to_int32,
    where,
)
from meshmpi.graph.ops.indexing import gather, put, scatter_add, top_k
from meshmpi.graph.ops.local_functions import local_function
from meshmpi.graph.ops.placement import as_stored, constrain, stop_gradient
from meshmpi.graph.ops.positions import range
from meshmpi.graph.ops.reductions import (
    cumsum,
    reduce_all,
    reduce_any,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_prod,
    reduce_std,
    reduce_sum,
    reduce_variance,
)
from meshmpi.graph.ops.regions import custom_gradient
from meshmpi.graph.ops.sources import (
    VariableDType,
    assign,
    constant,
    get_variable,
    ones,
    ones_like,
    placeholder,
    random_normal,
    random_uniform,
    read_stored,
    step_number,
    zeros,
    zeros_like,
)
from meshmpi.graph.ops.structure import (
    concat,
    pad,
    rename,
    rename_dimension,
    replace_dimensions,
    reshape,
    shift,
    slice,
    split,
    stack,
    transpose,
    unstack,
)
from meshmpi.ir.convolutions import ConvDims

Slide = ConvDims
"""The earlier name of `ConvDims`, kept for programs that were written with it; deprecated."""

__all__ = [name for name in dir() if not name.startswith("_")]
_check_all(globals(), __all__)
