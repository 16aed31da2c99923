"""Random graphs for the properties: einsums, and other steps between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

import meshmpi as mm
from meshmpi.dims import Axes
from tests.layouts import options

NAMES = "abcde"


class Chain:
    """A random graph: placeholders, then steps, each of which takes tensors made before.

    A dim whose size changes gets a new name, so that any two tensors can meet in an einsum.

    Args:
        draw: Of the example.
        mesh: That constraints and storage layouts name axes of; steps that need it need this.
        dtypes: Types that `mixed` computes in; its results are float64 again.
    """

    def __init__(self, draw: st.DrawFn, mesh: mm.MeshShape | None = None, dtypes: Sequence[str] = ("float64",)):
        self.draw, self.mesh, self.dtypes = draw, mesh, dtypes
        self.sizes = {n: draw(st.integers(1, 6)) for n in NAMES}
        self.rng = np.random.default_rng(draw(st.integers(0, 1000)))
        self.feeds: dict[str, np.ndarray] = {}
        self.made: list[mm.Tensor] = []
        self.weights: list[mm.Tensor] = []
        self.fresh = iter("fghijklmnopqrstuvw")
        for _ in range(draw(st.integers(2, 3))):
            dims = draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
            self.feed(mm.Shape([(n, self.sizes[n]) for n in dims]))
        self.sources = list(self.made)

    def feed(self, shape: mm.Shape) -> None:
        name = f"x{len(self.feeds)}"
        self.feeds[name] = self.rng.uniform(-1, 1, shape.sizes)
        self.made.append(mm.placeholder(name, shape, "float64"))

    def split(self, shape: mm.Shape) -> str:
        """A random legal way to split all dims of a tensor, whatever the layout says of them."""
        chosen: dict[str, Axes] = {}
        for name in self.draw(st.permutations(shape.names)):
            used = [a for axes in chosen.values() for a in axes]
            free = [axes for axes in options(self.mesh) if not set(axes) & set(used)]
            chosen[name] = self.draw(st.sampled_from(free))
        return ";".join(f"{n}:{'+'.join(axes)}" for n, axes in chosen.items())

    def variables(self) -> None:
        """Variables of one shape, each stored in a layout of its own."""
        dims = self.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True))
        shape = mm.Shape([(n, self.sizes[n]) for n in dims])
        for n in range(self.draw(st.integers(1, 3))):
            value = self.rng.uniform(-1, 1, shape.sizes)
            w = mm.get_variable(f"w{n}", shape, "float64", initializer=value, storage=self.split(shape))
            self.weights.append(w)
        self.made += self.weights

    def any_tensor(self) -> mm.Tensor:
        """One with dims, if there is any; those made last come first."""
        found = [t for t in reversed(self.made) if t.shape]
        return self.draw(st.sampled_from(found)) if found else self.einsum()

    def constrained(self) -> mm.Tensor:
        x = self.any_tensor()
        return mm.constrain(x, self.split(x.shape)) if x.shape else x

    def mixed(self) -> mm.Tensor:
        """One tensor in two splits, brought together along its rows."""
        draw, x = self.draw, self.any_tensor()
        if not x.shape:
            return x
        dim = draw(st.sampled_from(x.shape.names))
        w = mm.constrain(x, self.split(x.shape)) if draw(st.booleans()) else x
        dtype = draw(st.sampled_from(self.dtypes))
        if dtype == "float64":
            return draw(st.sampled_from(MIXTURES))(self, x, w, dim)
        x, w = mm.cast(x, dtype), mm.cast(w, dtype)
        return mm.cast(draw(st.sampled_from(MIXTURES))(self, x, w, dim), "float64")

    def einsum(self) -> mm.Tensor:
        """Contracts two tensors down to some dims."""
        draw = self.draw
        left, right = draw(st.sampled_from(self.made)), draw(st.sampled_from(self.made))
        present = list(dict.fromkeys([*left.shape, *right.shape]))
        kept = [d for d in draw(st.permutations(present)) if draw(st.booleans())][:3]
        y = mm.einsum([left, right], kept)
        choices = [lambda: y, lambda: mm.tanh(y), lambda: y * 2.0 + y, lambda: mm.tanh(mm.reduce_sum(y)) * y]
        return draw(st.sampled_from(choices))()

    def along_a_dim(self) -> mm.Tensor:
        """Moves, repeats, drops or adds up elements along one dim of the newest tensor with any."""
        draw = self.draw
        x = next((t for t in reversed(self.made) if t.shape), None)
        if x is None:
            return self.einsum()
        dim = draw(st.sampled_from(list(x.shape)))
        step = draw(st.sampled_from(STEPS))
        y = step(self, x, dim)
        changed = [n for n in y.shape.names if y.shape.dim(n) not in x.shape]
        return mm.rename(y, {n: next(self.fresh) for n in changed})

    def finish(self) -> tuple[list[mm.Tensor], dict[str, np.ndarray]]:
        """What to fetch (the last tensor, a loss, its gradients), and the feeds."""
        loss = mm.reduce_sum(mm.square(self.made[-1]))
        grads = [g for g in mm.gradients(loss, self.sources) if g is not None]
        return [self.made[-1], loss, *grads], self.feeds


def _times_its_sum(c: Chain, x: mm.Tensor, w: mm.Tensor, dim: str) -> mm.Tensor:
    return mm.tanh(x * mm.reduce_sum(w, reduced_dim=dim))


def _weighted(c: Chain, x: mm.Tensor, w: mm.Tensor, dim: str) -> mm.Tensor:
    return mm.softmax(w, dim) * x


def _normalized(c: Chain, x: mm.Tensor, w: mm.Tensor, dim: str) -> mm.Tensor:
    centred = w - mm.reduce_mean(w, reduced_dim=dim)
    return x + centred * mm.rsqrt(mm.reduce_mean(mm.square(centred), reduced_dim=dim) + 0.1)


def _dropped(c: Chain, x: mm.Tensor, w: mm.Tensor, dim: str) -> mm.Tensor:
    return mm.dropout(w, True, rate=0.3) + x * mm.dropout(x, True, rate=0.4)


def _both_sums(c: Chain, x: mm.Tensor, w: mm.Tensor, dim: str) -> mm.Tensor:
    """Sums along and across the rows of one tensor."""
    y = mm.sigmoid(w) * x
    return mm.reduce_sum(y) * 0.1 + mm.reduce_sum(y * x, reduced_dim=dim)


def _scored(c: Chain, x: mm.Tensor, w: mm.Tensor, dim: str) -> mm.Tensor:
    """Scores of all pairs along a dim, and what they weigh: long enough for a loop."""
    new = next(c.fresh)
    keys = mm.rename(w, {dim: new})
    scores = mm.einsum([x, keys], [x.shape.dim(dim), keys.shape.dim(new)])
    return mm.einsum([mm.softmax(scores, new), keys], x.shape)


def _part(c: Chain, x: mm.Tensor, w: mm.Tensor, dim: str) -> mm.Tensor:
    """A dim of one name in two sizes."""
    part = mm.slice(w, 0, c.draw(st.integers(1, x.shape.dim(dim).size)), x.shape.dim(dim))
    return mm.reduce_sum(mm.tanh(part) * part, reduced_dim=dim) + mm.reduce_sum(x, reduced_dim=dim)


MIXTURES = (_times_its_sum, _weighted, _normalized, _dropped, _both_sums, _scored, _part)


def _shifted(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    offset = c.draw(st.integers(-dim.size - 1, dim.size + 1))
    return mm.shift(x, offset, dim, wrap=c.draw(st.booleans()))


def _sliced(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    begin = c.draw(st.integers(0, dim.size - 1))
    return mm.slice(x, begin, c.draw(st.integers(1, dim.size - begin)), dim, stride=c.draw(st.integers(1, 3)))


def _padded(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    widths = [c.draw(st.integers(0, 4)), c.draw(st.integers(0, 4))]
    return mm.pad(x, widths, dim, c.draw(st.sampled_from([0.0, 1.5])))


def _joined(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    parts = [x, mm.slice(x * 0.5, 0, c.draw(st.integers(1, dim.size)), dim), x]
    return mm.concat(c.draw(st.permutations(parts))[: c.draw(st.integers(2, 3))], dim)


def _reshaped(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    """One dim as two, or two neighbours as one."""
    k = x.shape.position(dim.name)
    if k + 1 < len(x.shape) and c.draw(st.booleans()):
        both = [dim, x.shape[k + 1]]
        return mm.replace_dimensions(x, both, mm.Dimension("_new", both[0].size * both[1].size))
    factor = c.draw(st.sampled_from([n for n in range(1, dim.size + 1) if dim.size % n == 0]))
    new = [mm.Dimension("_new", factor), mm.Dimension("_other", dim.size // factor)]
    return mm.replace_dimensions(x, dim, new)


def _renamed(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    return mm.rename(x, {dim.name: "_new"})


def _summed(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    return mm.cumsum(x, dim, exclusive=c.draw(st.booleans()), reverse=c.draw(st.booleans()))


def _picked(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    """Rows by index, a few of them outside; all rows, or for each row of a batch its own."""
    name = f"n{len(c.feeds)}"
    others = [d for d in x.shape if d != dim][: c.draw(st.integers(0, 1))]
    shape = mm.Shape([mm.Dimension("_new", c.draw(st.integers(1, 7))), *others])
    c.feeds[name] = c.rng.integers(-1, dim.size + 1, shape.sizes).astype(np.int32)
    index = mm.rename(mm.placeholder(name, shape, "int32"), {"_new": (new := next(c.fresh))})
    y = mm.gather(x, index, dim)
    assert y.shape.find(new) >= 0
    return y


def _scattered(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    name = f"n{len(c.feeds)}"
    rows = mm.Dimension("_new", c.draw(st.integers(1, 7)))
    c.feeds[name] = c.rng.integers(-1, rows.size + 1, dim.size).astype(np.int32)
    return mm.scatter_add(x, mm.placeholder(name, [dim], "int32"), rows)


def _ranked(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    k = mm.Dimension("_new", c.draw(st.integers(1, dim.size)))
    return mm.top_k(x, dim, k, smallest=c.draw(st.booleans()))[0]


def _convolved(c: Chain, x: mm.Tensor, dim: mm.Dimension) -> mm.Tensor:
    """With a filter along one dim, of any stride, dilation, padding and size of the result."""
    taps = mm.Dimension(next(c.fresh), c.draw(st.integers(1, 4)))
    c.feed(mm.Shape([taps]))
    c.sources.append(c.made.pop())
    slide = mm.ConvDims(
        dim.name,
        taps.name,
        "_new",
        stride=c.draw(st.integers(1, 3)),
        dilation=c.draw(st.integers(1, 2)),
        before=c.draw(st.integers(-1, 4)),
    )
    size = c.draw(st.integers(1, 8))
    shape = [mm.Dimension("_new", size) if d == dim else d for d in x.shape]
    return mm.conv(x, c.sources[-1], [slide], shape)


STEPS = (_shifted, _sliced, _padded, _joined, _reshaped, _renamed, _summed, _picked, _scattered, _ranked, _convolved)
