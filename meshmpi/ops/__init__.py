"""The closed set of primitives, one family a file; see `meshmpi.graph.Operation`."""

from meshmpi.ops import operators as _operators
from meshmpi.ops.contraction import einsum, matmul
from meshmpi.ops.convolution import conv
from meshmpi.ops.elementwise import (
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
)  # fmt: skip
from meshmpi.ops.indexing import gather, put, scatter_add, top_k
from meshmpi.ops.placement import as_stored, constrain, stop_gradient
from meshmpi.ops.reductions import (
    reduce_all,
    reduce_any,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_prod,
    reduce_std,
    reduce_sum,
    reduce_variance,
)  # fmt: skip
from meshmpi.ops.regions import custom_gradient
from meshmpi.ops.scan import cumsum
from meshmpi.ops.sources import (
    VariableDType,
    assign,
    constant,
    get_variable,
    ones,
    ones_like,
    placeholder,
    random_normal,
    random_uniform,
    range,
    read_stored,
    step_number,
    zeros,
    zeros_like,
)  # fmt: skip
from meshmpi.ops.structure import (
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
)  # fmt: skip
from meshmpi.slides import Slide

__all__ = [name for name in dir() if not name.startswith("_")]
