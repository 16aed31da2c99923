"""Suggests layouts that hold each weight of a Transformer once on the whole mesh; any other works too."""

from __future__ import annotations

from typing import NamedTuple

from meshmpi.dims import MeshShape
from meshmpi.errors import LayoutError, suggest
from meshmpi.transformer.models import TransformerConfig

STYLES = ("storage", "megatron", "2d")
_WHOLE_DIMS = ("d_model", "d_ff", "vocab", "heads", "length", "d_kv")
"""Dims of variables, those with the largest blocks first.  A variable is stored split along the first that it has."""


class Suggestion(NamedTuple):
    """Arguments of ``mm.compile``: computation layout and storage rules."""

    layout: str
    storage: str


def suggested_layout(config: TransformerConfig, mesh: str | MeshShape, style: str = "megatron") -> Suggestion:
    """A layout and a storage in which every rank holds its share of the weights.

    Args:
        config: The model.
        mesh: Names and sizes of the mesh axes.
        style: "storage": the batch is split over all ranks, weights are gathered where they are
            used (ZeRO-3; best for large batches).  "megatron": heads, d_ff and vocab are split over
            all ranks (Shoeybi et al. 2019; best for small batches, on one host).  "2d": the batch
            over the first axis, heads, d_ff and vocab over the others, weights stored over both
            (GSPMD's finalized layout, Xu et al. 2021; best for large models on many ranks).

    Returns:
        Rules for computing and for storing.

    Raises:
        LayoutError: There is no such style, or "2d" on a mesh of one axis.

    Example:
        >>> from meshmpi.transformer.pretrained import suggested_layout
        >>> config = mm.transformer.paper_language_model(0)
        >>> suggested_layout(config, "rows:2;cols:4", "2d").layout
        'batch?:rows;heads?:cols;d_ff?:cols;vocab?:cols'
    """
    shape = MeshShape(mesh)
    everything = "+".join(shape.names)
    if style == "storage":
        return Suggestion(f"batch?:{everything}", _over(everything, _WHOLE_DIMS))
    if style == "megatron":
        layout = _over(everything, [_heads(config, shape.size), "d_ff", "vocab"])
        return Suggestion(layout, _over(everything, _WHOLE_DIMS))
    if style != "2d":
        raise LayoutError(f"there is no layout '{style}'.", suggest(style, STYLES))
    if len(shape.names) < 2:
        raise LayoutError(
            f"layout '2d' on mesh {shape}, which has one axis.",
            f"Give two, as rows:2;cols:{max(1, shape.size // 2)}, or use 'megatron'.",
        )
    rows, cols = shape.names[0], "+".join(shape.names[1:])
    split = [_heads(config, shape.size // shape.sizes[0]), "d_ff", "vocab"]
    # Keys and values that have no split heads are split by their width.
    _, memories = config.attention_options().heads_dims(config.heads_dim)
    width = rows if split[0] in [d.name for d in memories] else cols
    return Suggestion(f"batch?:{rows};{_over(cols, split)}", f"d_model?:{rows};d_kv?:{width};length?:{cols}")


def _over(axes: str, dims: list[str] | tuple[str, ...]) -> str:
    return ";".join(f"{dim}?:{axes}" for dim in dims)


def _heads(config: TransformerConfig, blocks: int) -> str:
    """The dim of heads that splits evenly; grouped queries have two dims of heads."""
    queries, _ = config.attention_options().heads_dims(config.heads_dim)
    even = [d.name for d in queries if d.size % blocks == 0]
    return even[0] if even else max(queries, key=lambda d: d.size).name
