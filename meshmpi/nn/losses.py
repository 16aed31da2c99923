"""Losses.  Cross entropy never gathers its logits: a split vocabulary stays split."""

from __future__ import annotations

from meshmpi.dims import DimsLike
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.positions import range as index_range
from meshmpi.graph.ops.reductions import reduce_mean, reduce_sum
from meshmpi.graph.ops.structure import DimLike, dim_name
from meshmpi.ir.scalar import INTEGERS
from meshmpi.nn.activations import softplus
from meshmpi.nn.functions import reduce_logsumexp, widened


def softmax_cross_entropy_with_logits(
    logits: Tensor, targets: Tensor, vocab_dim: DimLike, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> Tensor:
    """-sum over the vocabulary of target probability * log softmax(logits), in nats.

    Args:
        logits: With ``vocab_dim``; bfloat16 is widened to float32.
        targets: Integers over the other dims, or probabilities of the dims of logits.
        vocab_dim: The dim (or its name) of the classes.
        z_loss: Adds ``z_loss * log(sum of e**logits)**2``, which keeps logits from drifting.
        label_smoothing: This share of the target probability is spread evenly over all classes (Szegedy et al. 2016).

    Returns:
        The loss of every element: dims of logits without ``vocab_dim``.

    Raises:
        ShapeError: Dims of targets do not fit.

    Lowers: where the vocabulary is split, three all_reduces without that dim (max, sum of exponentials, target logit).

    Example:
        >>> with mm.Graph():
        ...     logits = mm.placeholder("logits", "batch:8;length:16;vocab:100")
        ...     targets = mm.placeholder("targets", "batch:8;length:16", "int32")
        ...     mm.softmax_cross_entropy_with_logits(logits, targets, "vocab").shape
        [batch=8, length=16]
    """
    logits = widened(logits)
    dim = logits.shape.dim(dim_name(vocab_dim))
    indices = logits.shape.without([dim.name])
    if sorted(targets.shape) != sorted(indices if targets.dtype in INTEGERS else logits.shape):
        raise ShapeError(
            f"softmax_cross_entropy_with_logits: targets are {targets.dtype}{targets.shape} for"
            f" logits {logits.shape} over '{dim.name}'.",
            f"Give integers of {indices} or probabilities of {logits.shape}.",
            str(targets.source),
        )
    log_z = reduce_logsumexp(logits, dim)
    if targets.dtype in INTEGERS:
        is_target = ew.equal(targets, index_range(dim, targets.dtype), output_shape=logits.shape)
        picked = ew.where(is_target, logits, 0.0)
    else:
        picked = ew.multiply(ew.cast(targets, logits.dtype), logits, output_shape=logits.shape)
    hit = reduce_sum(picked, reduced_dim=dim)
    if label_smoothing:
        mean_logit = reduce_mean(logits, reduced_dim=dim)
        hit = ew.add(ew.multiply(1.0 - label_smoothing, hit), ew.multiply(label_smoothing, mean_logit))
    loss = ew.subtract(log_z, hit)
    return ew.add(loss, ew.multiply(z_loss, ew.square(log_z))) if z_loss else loss


def sigmoid_cross_entropy_with_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """-t log(sigmoid(x)) - (1 - t) log(1 - sigmoid(x)) at every element, without overflow.

    Args:
        logits: x, any shape; bfloat16 is widened to float32.
        targets: t, probabilities in [0, 1] of the same dims.
    """
    logits = widened(logits)
    targets = ew.cast(targets, logits.dtype)
    return ew.subtract(softplus(logits), ew.multiply(targets, logits), output_shape=logits.shape)


def weights_nonzero(ids: Tensor, padding_id: int = 0, dtype: str = "float32") -> Tensor:
    """1 where ``ids`` is not ``padding_id``, else 0."""
    return ew.cast(ew.not_equal(ids, padding_id), dtype)


def weighted_mean(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """sum(values * weights) / sum(weights) over all elements; 0 where all weights are 0.

    Args:
        values: For example the loss of every token.
        weights: A tensor of the same dims, for example `weights_nonzero` of the targets; None: all 1.
    """
    if weights is None:
        return reduce_mean(values)
    total = reduce_sum(weights)
    safe = ew.where(ew.not_equal(total, 0.0), total, 1.0)
    return ew.divide(reduce_sum(ew.multiply(values, weights, output_shape=values.shape)), safe)


def corr(x: Tensor, y: Tensor, reduced_dim: DimsLike | None = None) -> Tensor:
    """Pearson's correlation of x and y over ``reduced_dim`` (one or a list; default all dims).

    Args:
        x: Any floating-point tensor.
        y: A tensor of the same dims.
        reduced_dim: Dims (or names) over which the two are samples.

    Returns:
        Numbers in [-1, 1] over the other dims; NaN where x or y does not vary.

    Lowers: where a reduced dim is split, all_reduces of the results.

    Source: Mesh-TensorFlow's corr.
    """
    if sorted(x.shape) != sorted(y.shape):
        raise ShapeError(
            f"corr: x is {x.shape} and y is {y.shape}.", "Give tensors of the same dimensions.", str(x.source)
        )
    dims = list(x.shape.names) if reduced_dim is None else reduced_dim
    x, y = (ew.subtract(t, reduce_mean(t, reduced_dim=dims), output_shape=t.shape) for t in map(widened, (x, y)))
    products = [
        reduce_mean(ew.multiply(a, b, output_shape=x.shape), reduced_dim=dims) for a, b in ((x, y), (x, x), (y, y))
    ]
    return ew.divide(products[0], ew.sqrt(ew.multiply(products[1], products[2])))
