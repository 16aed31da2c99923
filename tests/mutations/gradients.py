"""Gradients: derivatives of operations, and how reverse mode adds them up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import meshmpi as mm
from meshmpi.graph import Tensor, autodiff
from meshmpi.graph.ops import contraction, elementwise, indexing, reductions
from meshmpi.graph.ops import structure as ops_structure
from tests.mutations.registry import Patch, mutation


@mutation("one_tensor_many_times")
def the_second_gradient_replaces_the_first(m: Patch) -> None:
    def wrong(total: dict, x: Any, dx: Any) -> None:
        total[x] = dx if dx.shape == x.shape else ops_structure.transpose(dx, x.shape)

    m.setattr(autodiff, "_accumulate", wrong)


@mutation("divide_union")
def division_forgets_a_sign(m: Patch) -> None:
    right = elementwise._DERIVATIVES["divide"]

    def wrong(dy: Any, y: Any, a: Any, b: Any) -> tuple:
        da, db = right(dy, y, a, b)
        return da, db if db is None else elementwise.negative(db)

    m.setitem(elementwise._DERIVATIVES, "divide", wrong)


@mutation("tanh")
def tanh_is_differentiated_at_its_input(m: Patch) -> None:
    m.setitem(elementwise._DERIVATIVES, "tanh", lambda dy, y, x: (dy * (1.0 - elementwise.square(x)),))


@mutation("reduce_max_shares_ties")
def ties_get_the_whole_gradient_each(m: Patch) -> None:
    """As in Mesh-TensorFlow."""

    def wrong(self: Any, dys: Any) -> list:
        (x,), (dy,), y = self.inputs, dys, self.output
        if self.op == "sum":
            return [elementwise.broadcast(dy, x.shape)]
        return [elementwise.multiply(elementwise.cast(elementwise.equal(x, y), x.dtype), dy)]

    m.setattr(reductions.Reduce, "grad", wrong)


@mutation("split")
def slices_of_gradients_are_put_one_too_far(m: Patch) -> None:
    def wrong(self: Any, dys: Any) -> list:
        (dy,) = dys
        return [ops_structure.shift(right(self, [dy])[0], 1, self.dim, wrap=True)]

    right = ops_structure.Slice.grad
    m.setattr(ops_structure.Slice, "grad", wrong)


@mutation("einsum_of_three")
def einsum_forgets_the_third_operand(m: Patch) -> None:
    def wrong(self: Any, dys: Any) -> list:
        grads = []
        for i, x in enumerate(self.inputs):
            others = [dys[0], *[o for k, o in enumerate(self.inputs) if k != i][:1]]
            dims = {d for o in others for d in o.shape}
            shape = mm.Shape([d for d in x.shape if d in dims])
            dx = contraction.einsum(others, shape)
            grads.append(dx if shape == x.shape else elementwise.broadcast(dx, x.shape))
        return grads

    m.setattr(contraction.Einsum, "grad", wrong)


@mutation("top_k")
def top_k_gives_its_gradient_to_the_last(m: Patch) -> None:
    right = indexing.TopK.grad

    def wrong(self: Any, dys: Any) -> list:
        (dx,) = right(self, dys)
        return [None if dx is None else ops_structure.shift(dx, 1, self.dim, wrap=True)]

    m.setattr(indexing.TopK, "grad", wrong)


@mutation("stop_gradient")
def the_gradient_of_stop_gradient_passes(m: Patch) -> None:
    m.setattr(mm, "stop_gradient", mm.identity)


def _derivative(m: Patch, function: str, wrong: Callable[..., tuple]) -> None:
    assert function in elementwise._DERIVATIVES
    m.setitem(elementwise._DERIVATIVES, function, wrong)


@mutation("numbers_left_and_right")
def subtraction_forgets_a_sign(m: Patch) -> None:
    _derivative(m, "subtract", lambda dy, y, a, b: (dy, dy if isinstance(b, Tensor) else None))


@mutation("divide_union")
def products_are_differentiated_by_themselves(m: Patch) -> None:
    right = elementwise._DERIVATIVES["multiply"]
    _derivative(m, "multiply", lambda dy, y, a, b: right(dy, y, b, a))


@mutation("where_of_tensors")
def where_sends_its_gradient_to_the_other_side(m: Patch) -> None:
    right = elementwise._where_grads
    _derivative(m, "where", lambda dy, y, c, a, b: (None, *right(dy, y, c, a, b)[:0:-1]))


@mutation("maximum_shares_ties")
def tied_maxima_get_the_whole_gradient_each(m: Patch) -> None:
    """As in Mesh-TensorFlow."""

    def wrong(dy: Any, y: Any, a: Any, b: Any) -> tuple:
        return tuple(elementwise.where(elementwise.equal(x, y), dy, 0.0, output_shape=dy.shape) for x in (a, b))

    _derivative(m, "maximum", wrong)


@mutation("divide_union")
def gradients_of_broadcast_inputs_are_not_summed(m: Patch) -> None:
    """As in Mesh-TensorFlow's minimum and maximum: one row of the gradient is taken."""

    def wrong(x: Any, output_shape: Any) -> Any:
        while len(x.shape) > len(output_shape):
            d = next(d for d in x.shape if d not in output_shape)
            x = ops_structure.reshape(ops_structure.slice(x, 0, 1, d), x.shape.without([d.name]))
        return x

    m.setattr(autodiff, "reduce_sum", wrong)


@mutation("square")
def squares_lose_their_two(m: Patch) -> None:
    _derivative(m, "square", lambda dy, y, x: (dy * x,))


@mutation("sqrt")
def roots_are_differentiated_at_their_input(m: Patch) -> None:
    _derivative(m, "sqrt", lambda dy, y, x: (0.5 * dy / x,))


@mutation("rsqrt")
def reciprocal_roots_lose_a_power(m: Patch) -> None:
    _derivative(m, "rsqrt", lambda dy, y, x: (-0.5 * dy * y,))


@mutation("log1p")
def log1p_is_differentiated_as_log(m: Patch) -> None:
    _derivative(m, "log1p", lambda dy, y, x: (dy / x,))


@mutation("cos")
def cosines_forget_a_sign(m: Patch) -> None:
    _derivative(m, "cos", lambda dy, y, x: (dy * elementwise.sin(x),))


@mutation("sigmoid")
def sigmoid_is_differentiated_at_its_input(m: Patch) -> None:
    _derivative(m, "sigmoid", lambda dy, y, x: (dy * x * (1.0 - x),))


@mutation("erf")
def erf_lacks_its_factor(m: Patch) -> None:
    _derivative(m, "erf", lambda dy, y, x: (dy * elementwise.exp(-elementwise.square(x)),))


@mutation("abs")
def abs_is_differentiated_as_identity(m: Patch) -> None:
    _derivative(m, "abs", lambda dy, y, x: (dy,))


@mutation("power_of_numbers")
def powers_keep_their_exponent(m: Patch) -> None:
    def wrong(dy: Any, y: Any, a: Any, b: Any) -> tuple:
        da, db = elementwise._power_grads(dy, y, a, b)
        return (da if da is None else dy * b * y), db

    _derivative(m, "power", wrong)


@mutation("matmul_of_itself")
def a_tensor_multiplied_by_itself_counts_once(m: Patch) -> None:
    """The other factors are looked for by name of the tensor, not by place."""

    def wrong(self: Any, dys: Any) -> list:
        grads = []
        for x in self.inputs:
            others = [dys[0], *(o for o in self.inputs if o is not x)]
            dims = {d for o in others for d in o.shape}
            dx = contraction.einsum(others, mm.Shape([d for d in x.shape if d in dims]))
            grads.append(elementwise.broadcast(dx, x.shape))
        return grads

    m.setattr(contraction.Einsum, "grad", wrong)


@mutation("reduce_mean")
def a_mean_divides_by_all_elements(m: Patch) -> None:
    """However few dims are reduced."""

    def wrong(x: Any, *, output_shape: Any = None, reduced_dim: Any = None) -> Any:
        y = reductions.reduce_sum(x, output_shape=output_shape, reduced_dim=reduced_dim)
        return elementwise.multiply(y, 1.0 / x.shape.size)

    m.setattr(mm, "reduce_mean", wrong)


@mutation("pad")
def the_gradient_of_pad_is_cut_from_the_start(m: Patch) -> None:
    def wrong(self: Any, dys: Any) -> list:
        size = self.inputs[0].shape.dim(self.dim).size
        return [ops_structure.slice(dys[0], 0, size, self.dim)]

    m.setattr(ops_structure.Pad, "grad", wrong)


@mutation("concat")
def every_part_of_a_concat_gets_the_first_gradient(m: Patch) -> None:
    def wrong(self: Any, dys: Any) -> list:
        sizes = [x.shape.dim(self.dim).size for x in self.inputs]
        return [ops_structure.slice(dys[0], 0, n, self.dim) for n in sizes]

    m.setattr(ops_structure.Concat, "grad", wrong)


@mutation("slice_with_stride")
def strided_gradients_begin_at_zero(m: Patch) -> None:
    right = ops_structure._spread

    def wrong(x: Any, shape: Any, dim: str, start: int, stride: int) -> Any:
        return right(x, shape, dim, 0, stride)

    m.setattr(ops_structure, "_spread", wrong)


@mutation("matmul_transposed")
def the_loss_is_averaged_before_it_is_differentiated(m: Patch) -> None:
    right = autodiff._seeds

    def wrong(ys: Any, grad_ys: Any) -> list:
        return [0.5 * dy for dy in right(ys, grad_ys)]

    m.setattr(autodiff, "_seeds", wrong)


@mutation("scatter_add_ordered")
def the_gradient_of_scatter_add_is_spread_evenly(m: Patch) -> None:
    right = indexing.ScatterAdd.grad

    def wrong(self: Any, dys: Any) -> list:
        dx, none = right(self, dys)
        mean = reductions.reduce_mean(dx, output_shape=dx.shape.without(self.inputs[1].shape.names))
        return [elementwise.broadcast(mean, dx.shape), none]

    m.setattr(indexing.ScatterAdd, "grad", wrong)
