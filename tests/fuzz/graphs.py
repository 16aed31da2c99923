"""A random training graph from a seed: layers, structure, storage layouts, constraints, updates.

It builds graphs and their data, and knows nothing of how they are lowered or run.  Intermediate
values stay between about -3 and 3, so that errors are those of rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

import meshmpi as mm
from meshmpi.dims import MeshShape
from meshmpi.graph import Operation, Tensor, Update
from meshmpi.nn import optimize

DIMS = "abcde"
LARGEST_DIM = 7
LARGEST_TENSOR = 1500
"""Elements; a step that would make a larger tensor is not taken."""


@dataclass
class Random:
    """The random choices of one graph.

    Args:
        seed: The same seed gives the same choices.
    """

    seed: int

    def __post_init__(self):
        self.numbers = np.random.default_rng(self.seed)

    def integer(self, low: int, high: int) -> int:
        """Between ``low`` and ``high``, both included."""
        return int(self.numbers.integers(low, high + 1))

    def chance(self, probability: float) -> bool:
        return bool(self.numbers.random() < probability)

    def one(self, choices: Sequence):
        return choices[self.integer(0, len(choices) - 1)]

    def some(self, choices: Sequence, probability: float = 0.5) -> list:
        """A random subset in random order."""
        order = self.numbers.permutation(len(choices))
        return [choices[k] for k in order if self.chance(probability)]


@dataclass
class Fuzzed:
    """A graph and what it is run with.

    Attributes:
        graph: The graph.
        dtype: "float64", or the narrower type that activations have.
        feeds: Placeholder name -> array.
        fetches: What each step returns.
        updates: Variable updates of each step.
        steps: The names of the steps that made it, for the report of a failure.
    """

    graph: mm.Graph
    dtype: str
    feeds: dict[str, np.ndarray] = field(default_factory=dict)
    fetches: list[Tensor] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)


def random_graph(choose: Random, mesh: MeshShape) -> Fuzzed:
    """A graph of two to seven random steps with a loss, gradients and (mostly) an optimizer."""
    dtype = choose.one(["float64"] * 6 + ["float32", "bfloat16"])
    with mm.Graph() as graph:
        made = Fuzzed(graph, dtype)
        builder = _Builder(choose, mesh, made)
        for _ in range(choose.integer(2, 7)):
            builder.step()
        builder.finish()
    return made


class _Builder:
    """Adds steps to a graph; ``tensors`` are the float tensors made so far, the newest last."""

    def __init__(self, choose: Random, mesh: MeshShape, made: Fuzzed):
        self.choose, self.mesh, self.made = choose, mesh, made
        self.sizes = {n: choose.integer(1, LARGEST_DIM) for n in DIMS}
        if choose.chance(0.4):
            self.sizes[choose.one(DIMS)] = choose.integer(8, 20)
        self.master = "float64" if made.dtype == "float64" else "float32"
        self.tensors: list[Tensor] = []
        self.sources: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.names = (f"{c}{k}" for k in range(1, 99) for c in "uvwxyz")
        for _ in range(choose.integer(1, 3)):
            self.tensors.append(self.source())

    # -- sources -----------------------------------------------------------------------------------

    def fresh(self, size: int) -> mm.Dimension:
        return mm.Dimension(next(self.names), size)

    def shape(self, least: int = 0, most: int = 3) -> mm.Shape:
        names = list(self.choose.numbers.permutation(list(DIMS)))
        return mm.Shape([(str(n), self.sizes[n]) for n in names[: self.choose.integer(least, most)]])

    def narrowed(self, x: Tensor) -> Tensor:
        """x in the type of activations."""
        return x if x.dtype == self.made.dtype else mm.cast(x, self.made.dtype)

    def source(self, shape: mm.Shape | None = None) -> Tensor:
        """A fed tensor or a variable, which may have a storage layout of its own."""
        shape = self.shape() if shape is None else shape
        values = np.asarray(self.choose.numbers.uniform(-1.5, 1.5, shape.sizes))
        if self.choose.chance(0.4):
            name = f"feed{len(self.made.feeds)}"
            self.made.feeds[name] = values.astype(self.master)
            x = mm.placeholder(name, shape, self.master)
        else:
            name = f"var{len(self.made.graph.variables)}"
            storage = self.placement(shape) if self.choose.chance(0.5) else None
            x = mm.get_variable(name, shape, self.master, initializer=values.astype(self.master), storage=storage)
        self.sources.append(x)
        return self.narrowed(x)

    def integers(self, shape: mm.Shape, low: int, high: int) -> Tensor:
        """Fed indices from ``low`` to ``high``, both included."""
        name = f"feed{len(self.made.feeds)}"
        values = self.choose.numbers.integers(low, high + 1, shape.sizes)
        self.made.feeds[name] = np.asarray(values).astype(np.int32)
        return mm.placeholder(name, shape, "int32")

    def placement(self, shape: mm.Shape) -> str:
        """Some dims of a shape over disjoint axes of the mesh, some said to be whole."""
        axes, rules = list(self.mesh.names), []
        for dim in self.choose.some(list(shape), 0.7):
            taken = self.choose.some(axes, 0.5)[:2]
            axes = [a for a in axes if a not in taken]
            rules.append(f"{dim.name}:{'+'.join(taken)}")
        return ";".join(rules)

    # -- steps -------------------------------------------------------------------------------------

    def step(self) -> None:
        """Takes one random step from a random tensor, mostly the newest."""
        x = self.tensors[-1] if self.choose.chance(0.7) else self.choose.one(self.tensors)
        take = self.choose.one(STEPS)
        if take in NEEDS_A_DIM and not x.shape.ndims:
            take = _product
        if take in NEEDS_TWO_DIMS and x.shape.ndims < 2:
            take = _product
        if self.choose.chance(0.25) and x.shape.ndims:
            x = mm.constrain(x, self.placement(x.shape))
            self.made.steps.append("constrain")
        self.made.steps.append(take.__name__.strip("_"))
        if take in RECOMPUTABLE and self.choose.chance(0.15):
            self.made.steps[-1] += " recomputed"
            y = mm.recompute_grad(lambda x: self.kept_small(take(self, x)), [x])
        else:
            y = self.kept_small(take(self, x))
        if y.shape.size <= LARGEST_TENSOR:
            self.tensors.append(y)

    def kept_small(self, y: Tensor) -> Tensor:
        """y in the type of activations, scaled so that its size is that of its inputs."""
        return mm.tanh(self.narrowed(y))

    def finish(self) -> None:
        """Loss, gradients and updates; what is fetched."""
        y = self.tensors[-1]
        loss = mm.reduce_sum(mm.square(mm.cast(y, self.master)))
        for one in self.losses:
            loss = loss + mm.cast(one, self.master)
        if self.choose.chance(0.3):  # a second reader of an older tensor
            other = mm.cast(self.choose.one(self.tensors), self.master)
            loss = loss + mm.reduce_mean(mm.square(other))
        grads = [g for g in mm.gradients(loss, self.sources) if g is not None]
        self.made.fetches = [y, loss, *grads]
        read = {o.variable.name for o in operations_of([loss]) if hasattr(o, "variable")}
        variables = [v for v in self.made.graph.trainable_variables if v.name in read]
        if variables and self.choose.chance(0.8):
            self.made.updates = self.optimizer().minimize(loss, variables)

    def optimizer(self) -> optimize.Optimizer:
        choose = self.choose
        clip = {"clip_norm": 0.7} if choose.chance(0.5) else {}
        kind = choose.one(["SGD", "Momentum", "Adam", "AdamW", "Adafactor", "LAMB"])
        self.made.steps.append(f"{kind}{' clipped' if clip else ''}")
        if kind == "SGD":
            return optimize.SGD(0.1, **clip)
        if kind == "Adafactor":
            return optimize.Adafactor(0.1, min_dim_size_to_factor=2, epsilon1=1e-3, **clip)
        if kind == "Momentum":
            return optimize.Momentum(0.1, **clip)
        # A large epsilon: gradients that are zero up to rounding must not decide the direction.
        return getattr(optimize, kind)(0.1, epsilon=0.1, **clip)


def operations_of(fetches: Sequence[Tensor]) -> list[Operation]:
    """The operations that tensors are computed from."""
    needed = {t.operation for t in fetches}
    for operation in reversed(fetches[0].graph.operations):
        if operation in needed:
            needed.update(x.operation for x in operation.inputs)
    return [o for o in fetches[0].graph.operations if o in needed]


Step = Callable[[_Builder, Tensor], Tensor]


def _product(b: _Builder, x: Tensor) -> Tensor:
    other = b.choose.one(b.tensors) if b.choose.chance(0.5) else b.source()
    present = list(dict.fromkeys([*x.shape, *other.shape]))
    kept = b.choose.some(present, 0.6)[:4]
    return mm.einsum([x, other], kept) * 0.5


def _product_of_three(b: _Builder, x: Tensor) -> Tensor:
    others = [b.source(), b.choose.one(b.tensors)]
    present = list(dict.fromkeys(d for t in [x, *others] for d in t.shape))
    return mm.einsum([x, *others], b.choose.some(present, 0.5)[:3]) * 0.5


def _broadcast(b: _Builder, x: Tensor) -> Tensor:
    """Two tensors of overlapping dims, one of which may be split differently."""
    other = b.choose.one(b.tensors) if b.choose.chance(0.5) else b.source()
    present = list(dict.fromkeys([*x.shape, *other.shape]))
    if other.shape.ndims and b.choose.chance(0.4):
        other = mm.constrain(other, b.placement(other.shape))
    combine = b.choose.one([mm.add, mm.multiply, mm.subtract, mm.maximum, mm.minimum])
    return combine(x, other, output_shape=mm.Shape(present))


def _reduced_and_back(b: _Builder, x: Tensor) -> Tensor:
    """A reduction over some dims, used again beside what was reduced (norms, attention)."""
    gone = b.choose.some(list(x.shape), 0.6) or [x.shape[0]]
    kept = mm.Shape([d for d in x.shape if d not in gone])
    source = mm.constrain(x, b.placement(x.shape)) if b.choose.chance(0.4) else x
    reduce = b.choose.one([mm.reduce_sum, mm.reduce_mean, mm.reduce_max, mm.reduce_min])
    s = reduce(source, output_shape=kept)
    return b.choose.one([lambda: x * s, lambda: x - s, lambda: s * 0.3])()


def _function(b: _Builder, x: Tensor) -> Tensor:
    name = b.choose.one(
        [
            "relu",
            "gelu",
            "sigmoid",
            "silu",
            "softplus",
            "sin",
            "cos",
            "exp",
            "erf",
            "abs",
            "elu",
            "square",
            "squared_relu",
            "selu",
            "leaky_relu",
        ]
    )
    return getattr(mm, name)(x)


def _chosen(b: _Builder, x: Tensor) -> Tensor:
    other = b.choose.one(b.tensors)
    condition = mm.greater(x, b.choose.one([0.0, 0.3]))
    present = list(dict.fromkeys([*x.shape, *other.shape]))
    return mm.where(condition, x, other, output_shape=mm.Shape(present))


def _softmax(b: _Builder, x: Tensor) -> Tensor:
    dim = b.choose.one(list(x.shape))
    return b.choose.one([mm.softmax, mm.log_softmax])(x, dim)


def _norm(b: _Builder, x: Tensor) -> Tensor:
    dim = b.choose.one(list(x.shape))
    norm = b.choose.one([mm.layer_norm, mm.rms_norm, mm.scale_norm])
    return norm(x, dim, 0.1, name=f"norm{len(b.made.graph.variables)}")


def _dense(b: _Builder, x: Tensor) -> Tensor:
    gone = b.choose.one(list(x.shape))
    new = b.fresh(b.choose.integer(1, LARGEST_DIM))
    name = f"dense{len(b.made.graph.variables)}"
    return mm.dense(x, new, gone, activation=b.choose.one([None, "relu", "gelu"]), name=name)


def _dropped(b: _Builder, x: Tensor) -> Tensor:
    noise = x.shape if b.choose.chance(0.6) else mm.Shape(b.choose.some(list(x.shape)))
    name = f"dropout{len(b.made.steps)}"
    return mm.dropout(x, True, rate=0.3, noise_shape=noise, name=name)


def _attention(b: _Builder, x: Tensor) -> Tensor:
    name = f"attention{len(b.made.graph.variables)}"
    length = x.shape[-2]
    memory = mm.Dimension(f"memory_{length.name}", length.size)
    x = mm.transpose(x, mm.Shape([*x.shape.without([length.name, x.shape[-1].name]), *x.shape[-2:]]))
    mask = mm.attention_mask_autoregressive(length, memory) if b.choose.chance(0.5) else None
    heads, kv = b.fresh(b.choose.integer(1, 4)), b.fresh(b.choose.integer(1, 3))
    rate = 0.2 if b.choose.chance(0.3) else 0.0
    return mm.multihead_attention(
        x,
        mm.rename(x, {length.name: memory.name}),
        mask,
        kv,
        heads,
        rate > 0,
        rate,
        use_bias=b.choose.chance(0.5),
        name=name,
    )


def _local_attention(b: _Builder, x: Tensor) -> Tensor:
    name = f"attention{len(b.made.graph.variables)}"
    heads, kv = b.fresh(2), b.fresh(3)
    return mm.local_self_attention(x, kv, heads, b.choose.integer(1, 4), b.choose.chance(0.6), name=name)


def _experts(b: _Builder, x: Tensor) -> Tensor:
    gating = mm.Gating(
        choices=b.choose.one([1, 2]),
        min_capacity=1,
        z_loss=0.01,
        capacity_factor=b.choose.one([1.0, 2.0]),
        chooser=b.choose.one(["tokens", "tokens", "experts"]),
    )
    name = f"experts{len(b.made.graph.variables)}"
    experts = b.fresh(b.choose.integer(2, 4))
    y = mm.mixture_of_experts(x, experts, b.fresh(b.choose.integer(1, 4)), gating, True, activation="tanh", name=name)
    b.losses.append(y.loss)
    return y.output


def _cross_entropy(b: _Builder, x: Tensor) -> Tensor:
    dim = x.shape[-1]
    targets = b.integers(x.shape.without([dim.name]), 0, dim.size - 1)
    return mm.softmax_cross_entropy_with_logits(x, targets, dim, b.choose.one([0.0, 0.01])) * 0.3


# -- steps along one dim, which exchange between blocks where it is split --------------------------


def _renamed(b: _Builder, y: Tensor, x: Tensor) -> Tensor:
    """y, with new names for the dims whose size is no longer that in x."""
    changed = [d.name for d in y.shape if d not in x.shape]
    return mm.rename(y, {n: next(b.names) for n in changed})


def _shifted(b: _Builder, x: Tensor) -> Tensor:
    dim = b.choose.one(list(x.shape))
    return mm.shift(x, b.choose.integer(-dim.size - 1, dim.size + 1), dim, wrap=b.choose.chance(0.5))


def _sliced(b: _Builder, x: Tensor) -> Tensor:
    dim = b.choose.one(list(x.shape))
    begin = b.choose.integer(0, dim.size - 1)
    size = b.choose.integer(1, dim.size - begin)
    return _renamed(b, mm.slice(x, begin, size, dim, stride=b.choose.integer(1, 3)), x)


def _padded(b: _Builder, x: Tensor) -> Tensor:
    dim = b.choose.one(list(x.shape))
    widths = [b.choose.integer(0, 3), b.choose.integer(0, 3)]
    return _renamed(b, mm.pad(x, widths, dim, b.choose.one([0.0, 0.5])), x)


def _joined(b: _Builder, x: Tensor) -> Tensor:
    dim = b.choose.one(list(x.shape))
    part = mm.slice(x * 0.5, 0, b.choose.integer(1, dim.size), dim)
    return _renamed(b, mm.concat([x, part], dim), x)


def _summed(b: _Builder, x: Tensor) -> Tensor:
    dim = b.choose.one(list(x.shape))
    return mm.cumsum(x, dim, b.choose.chance(0.5), b.choose.chance(0.5)) * 0.4


def _picked(b: _Builder, x: Tensor) -> Tensor:
    dim = b.choose.one(list(x.shape))
    others = [d for d in x.shape if d != dim][: b.choose.integer(0, 1)]
    rows = mm.Shape([b.fresh(b.choose.integer(1, 6)), *others])
    return mm.gather(x, b.integers(rows, -1, dim.size), dim, may_miss=True)


def _scattered(b: _Builder, x: Tensor) -> Tensor:
    dim, rows = b.choose.one(list(x.shape)), b.fresh(b.choose.integer(1, 6))
    return mm.scatter_add(x, b.integers(mm.Shape([dim]), -1, rows.size), rows, may_miss=True)


def _ranked(b: _Builder, x: Tensor) -> Tensor:
    dim = b.choose.one(list(x.shape))
    k = b.fresh(b.choose.integer(1, dim.size))
    return mm.top_k(x, dim, k, smallest=b.choose.chance(0.5))[0]


def _convolved(b: _Builder, x: Tensor) -> Tensor:
    dim, taps = b.choose.one(list(x.shape)), b.fresh(b.choose.integer(1, 3))
    weights, out = b.source(mm.Shape([taps])), b.fresh(b.choose.integer(1, 8))
    slide = mm.ConvDims(
        dim.name,
        taps.name,
        out.name,
        stride=b.choose.integer(1, 3),
        dilation=b.choose.integer(1, 2),
        before=b.choose.integer(-1, 3),
    )
    return mm.conv(x, weights, [slide], [out if d == dim else d for d in x.shape])


def _reshaped(b: _Builder, x: Tensor) -> Tensor:
    """Two neighbouring dims as one, or one as two."""
    k = b.choose.integer(0, x.shape.ndims - 1)
    dim = x.shape[k]
    if k + 1 < x.shape.ndims and b.choose.chance(0.5):
        both = [dim, x.shape[k + 1]]
        return mm.replace_dimensions(x, both, b.fresh(both[0].size * both[1].size))
    factor = b.choose.one([n for n in range(1, dim.size + 1) if dim.size % n == 0])
    return mm.replace_dimensions(x, dim, [b.fresh(factor), b.fresh(dim.size // factor)])


def _new_names(b: _Builder, x: Tensor) -> Tensor:
    return mm.rename(x, {d.name: next(b.names) for d in b.choose.some(list(x.shape), 0.6)})


def _parts(b: _Builder, x: Tensor) -> Tensor:
    dim = b.choose.one(list(x.shape))
    parts = mm.unstack(x, dim)
    return mm.stack([mm.sin(p) for p in parts[::-1]], b.fresh(len(parts)).name)


STEPS: list[Step] = [
    _product,
    _product,
    _product,
    _product_of_three,
    _broadcast,
    _broadcast,
    _reduced_and_back,
    _reduced_and_back,
    _function,
    _chosen,
    _softmax,
    _norm,
    _dense,
    _dropped,
    _attention,
    _attention,
    _local_attention,
    _experts,
    _cross_entropy,
    _shifted,
    _sliced,
    _padded,
    _joined,
    _summed,
    _picked,
    _scattered,
    _ranked,
    _convolved,
    _reshaped,
    _new_names,
    _parts,
]
NEEDS_A_DIM = [s for s in STEPS if s not in (_product, _product_of_three, _broadcast, _function)]
NEEDS_TWO_DIMS = [_attention, _local_attention, _experts]
RECOMPUTABLE = [_function, _softmax, _reduced_and_back, _dropped, _summed, _chosen]
