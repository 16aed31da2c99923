"""The two ways in which this app splits a model; the model knows neither.

Both hold one copy of the split weights over all ranks.

`2d` is the layout that GSPMD calls "2D finalized" (Xu et al. 2021): matrices are cut along d_model
over rows and along heads or d_ff over cols.  A matrix is gathered along d_model before its use and
activations along d_model too; between sublayers these are split over batch and d_model.

`megatron` cuts heads and d_ff only (Shoeybi et al. 2019): no weight is ever gathered, but all
activations are on every rank, and summed over all of them twice a layer.
"""

from __future__ import annotations

from typing import NamedTuple

from meshmpi.dims import MeshShape
from meshmpi.errors import ConfigError, suggest
from meshmpi.transformer.models import TransformerConfig


class Splits(NamedTuple):
    """How a model lies on a mesh.

    Attributes:
        mesh: Axes and sizes.
        layout: Computation layout.
        storage: How variables are kept, or None.
        residual: Constraint of the residual stream, or empty.
    """

    mesh: str
    layout: str
    storage: str | None
    residual: str

    def config(self, config: TransformerConfig) -> TransformerConfig:
        """The config with its residual stream placed as this says."""
        return config.with_options(residual_constraint=self.residual)


_SPLIT = "heads:{0};d_ff:{0};d_transform?:{0};vocab:{0}"
NAMES = ("2d", "megatron", "replicated")


def splits(name: str, ranks: int, mesh: str = "") -> Splits:
    """A layout by name.

    Args:
        name: "2d", "megatron", or "replicated" (every rank has all weights and a part of the
            batch).
        ranks: In all.
        mesh: As ``rows:2;cols:4``; default: the squarest one for 2d, else all ranks on one axis.
    """
    if name not in NAMES:
        raise ConfigError(f"there is no layout '{name}'.", suggest(name, NAMES))
    chosen = mesh or _mesh(name, ranks)
    axes = MeshShape(chosen).names
    if len(axes) != (2 if name == "2d" else 1):
        raise ConfigError(
            f"layout '{name}' on the mesh '{chosen}'.", "Give rows:N;cols:M for 2d, and one axis for the others."
        )
    if name == "2d":
        rows, cols = axes
        return Splits(chosen, f"batch:{rows};{_SPLIT.format(cols)}", f"d_model:{rows}", f"d_model:{cols}")
    (axis,) = axes
    layout = _SPLIT.format(axis) if name == "megatron" else f"batch:{axis}"
    return Splits(chosen, layout, None, "")


def _mesh(name: str, ranks: int) -> str:
    if name != "2d":
        return f"all:{ranks}"
    rows = max(r for r in range(1, ranks + 1) if ranks % r == 0 and r * r <= ranks)
    return f"rows:{rows};cols:{ranks // rows}"
