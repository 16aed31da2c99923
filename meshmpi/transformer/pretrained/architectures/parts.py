"""Entries of what models have in common: linear maps, norms, attention, feed-forward layers."""

from __future__ import annotations

from collections.abc import Sequence

from meshmpi.dims import Dimension
from meshmpi.nn.layers import factors
from meshmpi.transformer.models import TransformerConfig
from meshmpi.transformer.pretrained.architectures.entries import Entry, FileDim

Dims = Sequence[Dimension]


class Parts:
    """Makes the entries of one model.

    Args:
        config: The Transformer, whose dims the entries are made of.
        legacy: (ending, old ending) of keys in older files, as (".LayerNorm.weight",
            ".LayerNorm.gamma").
    """

    def __init__(self, config: TransformerConfig, legacy: Sequence[tuple[str, str]] = ()):
        self.config, self.legacy = config, legacy
        self.entries: list[Entry] = []
        queries, memories = config.attention_options().heads_dims(config.heads_dim)
        self.model: Dims = [config.model_dim]
        self.hidden: Dims = [config.ff_dim]
        self.queries: Dims = [*queries, config.kv_dim]
        self.memories: Dims = [*memories, config.kv_dim]
        self.heads: Dims = queries

    def add(
        self,
        variable: str,
        key: str | tuple[str, ...],
        *file_dims: Dims | FileDim,
        at: tuple[tuple[Dimension, int], ...] = (),
        ties: tuple[str, ...] = (),
    ) -> None:
        """One array: its dims in the file's order."""
        keys = (key,) if isinstance(key, str) else key
        old = [k.removesuffix(e) + o for k in keys for e, o in self.legacy if k.endswith(e)]
        dims = tuple(d if isinstance(d, FileDim) else FileDim(tuple(d)) for d in file_dims)
        self.entries.append(Entry(variable, (*keys, *old), dims, at, ties))

    def linear(
        self,
        weight: str,
        bias: str,
        key: str,
        into: Dims,
        out_of: Dims,
        biased: bool,
        at: tuple[tuple[Dimension, int], ...] = (),
    ) -> None:
        """A torch Linear: ``key.weight`` is (out, in), ``key.bias`` (out)."""
        self.add(weight, f"{key}.weight", out_of, into, at=at)
        if biased:
            self.add(bias, f"{key}.bias", out_of, at=at)

    def norm(self, name: str, key: str) -> None:
        """The scale of a norm and, where it has one, the bias."""
        self.add(f"{name}/scale", f"{key}.weight", self.model)
        if self.config.norm == "layer" and self.config.norm_bias:
            self.add(f"{name}/bias", f"{key}.bias", self.model)

    def attention(self, name: str, q: str, k: str, v: str, o: str) -> None:
        """The four projections of an attention layer as torch Linears."""
        biased = self.config.attention_bias
        for letter, key in (("q", q), ("k", k), ("v", v)):
            heads = self.queries if letter == "q" else self.memories
            self.linear(f"{name}/{letter}", f"{name}/{letter}_bias", key, self.model, heads, biased)
        biased = self.config.attention_has_output_bias
        self.linear(f"{name}/o", f"{name}/o_bias", o, self.queries, self.model, biased)

    def feed_forward(
        self, name: str, into: Sequence[str], out_of: str, at: tuple[tuple[Dimension, int], ...] = ()
    ) -> None:
        """The matrices of a feed-forward layer: one into it for each factor of the activation."""
        biased = self.config.ff_bias
        gated = len(factors(self.config.activation)) > 1
        for i, key in enumerate(into):
            inner = f"{name}/wi/dense_{i}" if gated else f"{name}/wi"
            self.linear(f"{inner}/kernel", f"{inner}/bias", key, self.model, self.hidden, biased, at)
        self.linear(f"{name}/wo/kernel", f"{name}/wo/bias", out_of, self.hidden, self.model, biased, at)

    def done(self) -> tuple[Entry, ...]:
        """All entries."""
        return tuple(self.entries)
