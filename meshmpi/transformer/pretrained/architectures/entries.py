"""Says as data where a checkpoint has the numbers of each variable, so that any block can be read alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from meshmpi.dims import Dimension, Shape
from meshmpi.transformer.models import TransformerConfig


@dataclass(frozen=True)
class FileDim:
    """One dim of an array in a file, as dims of our variable.

    Attributes:
        dims: The dims of ours that it runs over, the last fastest: the 768 columns of a projection
            of 12 heads are ``(heads=12, d_kv=64)``.
        start: Where our block of it begins: in a matrix that holds queries, keys and values side by
            side, the keys begin at ``heads * d_kv``.
    """

    dims: tuple[Dimension, ...]
    start: int = 0
    total: int = 0  # size of the dim in the file; 0: the product of ``dims``
    period: int = 0  # distance in the file of neighbours along the first of ``dims``; 0: they follow each other

    @property
    def extent(self) -> int:
        """Number of its indices that are ours."""
        return math.prod(d.size for d in self.dims)

    @property
    def size(self) -> int:
        """Its size in the file."""
        return self.total or self.extent


@dataclass(frozen=True)
class Entry:
    """One array of a file that is one variable of ours, or a part of one.

    Several entries may fill one variable (each expert is an array of its own), and several may take
    from one array (queries, keys and values side by side).

    Attributes:
        keys: Names that the array has in files: the present one, which is written, then legacy
            ones.  Those of the inner model may lack `Architecture.prefix` in a file.
        at: (dim, index) of dims of the variable that the array lacks: the number of the expert.
        ties: Keys of other arrays that a file may hold too, with the same numbers; not written.  A
            file in which they differ contradicts its config.
    """

    variable: str
    keys: tuple[str, ...]
    file_dims: tuple[FileDim, ...]  # dims of the array, in its order
    at: tuple[tuple[Dimension, int], ...] = ()
    ties: tuple[str, ...] = ()

    @property
    def file_shape(self) -> tuple[int, ...]:
        return tuple(d.size for d in self.file_dims)

    @property
    def dims(self) -> tuple[Dimension, ...]:
        """Dims of the variable that the array runs over, in the file's order."""
        return tuple(d for f in self.file_dims for d in f.dims)


@dataclass(frozen=True)
class Architecture:
    """A kind of model as its files describe it: config, variables and where they stand.

    Attributes:
        prefix: What the keys of the inner model begin with, as "transformer."; files of models
            saved without their head lack it.
        ignored: Regular expressions of whole keys that hold nothing the model needs: buffers, and
            heads for other tasks.
        special: Token ids by purpose ("pad", "mask", "bos", "eos", "decoder_start"), as far as the
            config has them.
    """

    name: str  # its ``model_type``, such as "gpt2"
    kind: str  # "lm" (`mm.transformer.lm`), "encoder_decoder" or "encoder" (with `masked_lm`)
    config: TransformerConfig
    entries: tuple[Entry, ...]  # every variable of ours, from arrays of files
    prefix: str
    ignored: tuple[str, ...]
    special: Mapping[str, int]
    values: Mapping[str, object]  # the content of config.json, to be written next to the weights


def entries_of(
    config: TransformerConfig, names: str, legacy: Sequence[tuple[str, str]] = (), conv1d: bool = False
) -> tuple[Entry, ...]:
    """The entries of a model, from a table of names.

    Args:
        config: The Transformer.
        names: On each line one of our layers or tables, and the name of its arrays without ``.weight``.  ``{i}`` is
            the number of a layer, ``{e}`` becomes ``.experts.expert_0`` and so on where a layer has experts, and
            ``[1/2]`` is the second half of the array's columns, ``[k/qkv]`` the keys behind the queries, and
            ``[k|qkv]`` the same in each head.  Further names: the other factors of a gated unit, else arrays with
            the same numbers.  A softmax that is tied is such an array of the embedding; a softmax that is not takes
            the last name of its bias.
        legacy: (ending, old ending) of keys in older files.
        conv1d: Whether matrices of layers are (in, out), as in GPT-2, rather than (out, in), as in a torch Linear.
    """
    rows = [line.split() for line in names.splitlines() if line.strip()]
    ties = tuple(f"{row[1]}.weight" for row in rows if config.tied_softmax and row[0].endswith("/softmax"))
    found: list[Entry] = []
    for layered, group in groupby(rows, key=lambda row: "{i}" in row[1]):
        lines, stack = list(group), config
        if layered:
            stack = config.encoder_stack if lines[0][0].startswith("encoder/") else config.decoder_stack
        for i in range(stack.layers) if layered else (0,):
            arrays = _Arrays(stack, i, ties, conv1d)
            for several, part in groupby(lines, key=lambda row: "{e}" in row[1]):
                same = list(part)
                experts: Sequence[int | None] = [None]
                if several and stack.has_experts(i):
                    experts = range(stack.experts)
                found += [entry for n in experts for row in same for entry in arrays.of(row[0], row[1:], n)]
    return tuple(_with_legacy(entry, legacy) for entry in found)


def _with_legacy(entry: Entry, legacy: Sequence[tuple[str, str]]) -> Entry:
    old = [k.removesuffix(end) + earlier for k in entry.keys for end, earlier in legacy if k.endswith(end)]
    return Entry(entry.variable, (*entry.keys, *old), entry.file_dims, entry.at, entry.ties)


class _Arrays:
    """The arrays of one layer, or of what stands outside of layers."""

    def __init__(self, config: TransformerConfig, layer: int, ties: tuple[str, ...], conv1d: bool) -> None:
        self.config, self.layer, self.ties, self.conv1d = config, layer, ties, conv1d
        queries, memories = config.attention_options().heads_dims(config.heads_dim)
        model, hidden = [config.model_dim], [config.ff_dim]
        heads, memory = [*queries, config.kv_dim], [*memories, config.kv_dim]
        own, out = config.attention_bias, config.attention_has_output_bias
        self.linears = {
            "q": (model, heads, "", "_bias", own),
            "k": (model, memory, "", "_bias", own),
            "v": (model, memory, "", "_bias", own),
            "o": (heads, model, "", "_bias", out),
            "wi": (model, hidden, "/kernel", "/bias", config.ff_bias),
            "wo": (hidden, model, "/kernel", "/bias", config.ff_bias),
            "head": (model, [config.transform_dim], "/kernel", "/bias", True),
        }
        self.heads = queries

    def of(self, ours: str, theirs: Sequence[str], expert: int | None) -> Iterator[Entry]:
        """The entries of a line of the table; none for what the model does not have."""
        config, last = self.config, ours.rpartition("/")[2]
        name = ours.replace("/layer/", f"/layer_{self.layer:03d}/")
        e = "" if expert is None else f".experts.expert_{expert}"
        keys = [key.format(i=self.layer, e=e) for key in theirs]
        if last in self.linears:
            for n, key in enumerate(keys):
                yield from self._linear(last, f"{name}/dense_{n}" if len(keys) > 1 else name, key, expert)
        elif last in ("q_norm", "k_norm"):
            dims = self.linears[last[0]][1] if config.query_norm == "all" else [config.kv_dim]
            yield Entry(f"{name}/scale", (f"{keys[0]}.weight",), (FileDim(tuple(dims)),))
        elif last.endswith("norm"):
            if config.norm_scale and (last != "embedding_norm" or config.embedding_norm):
                model = (FileDim((config.model_dim,)),)
                yield Entry(f"{name}/scale", (f"{keys[0]}.weight",), model)
                if config.norm == "layer" and config.norm_bias:
                    yield Entry(f"{name}/bias", (f"{keys[0]}.bias",), model)
        elif last == "softmax_bias":
            first, *others = (f"{k}.bias" for k in (keys if config.tied_softmax else keys[-1:]))
            yield Entry(name, (first,), (FileDim((config.vocab_dim,)),), ties=tuple(others))
        elif not (
            (last == "softmax" and config.tied_softmax) or (last == "router" and not config.has_experts(self.layer))
        ):
            ties = (*(f"{k}.weight" for k in keys[1:]), *(self.ties if last == "embedding" else ()))
            dims = tuple(FileDim(tuple(d)) for d in self._table(last))
            yield Entry(name, (f"{keys[0]}.weight",), dims, ties=ties)

    def _linear(self, last: str, name: str, key: str, expert: int | None) -> Iterator[Entry]:
        into, out_of, weight, bias, biased = self.linears[last]
        columns = FileDim(tuple(out_of))
        if key.endswith("]"):
            key, _, part = key[:-1].partition("[")
            columns = self._part(part, columns)
        at = () if expert is None else ((self.config.experts_dim, expert),)
        dims = (FileDim(tuple(into)), columns) if self.conv1d else (columns, FileDim(tuple(into)))
        yield Entry(name + weight, (f"{key}.weight",), dims, at)
        if biased:
            yield Entry(name + bias, (f"{key}.bias",), (columns,), at)

    def _part(self, part: str, columns: FileDim) -> FileDim:
        """The ``columns`` of a matrix in an array that holds several."""
        own, each, parts = part.replace("/", " / ").replace("|", " | ").split()
        if parts.isdigit():
            return FileDim(columns.dims, int(own) * columns.extent, int(parts) * columns.extent)
        # Of all heads, or of one where every head has its queries, keys and values side by side.
        sizes = [Shape(self.linears[x][1][each == "|" :]).size for x in parts]
        start, total = sum(sizes[: parts.index(own)]), sum(sizes)
        if each == "/":
            return FileDim(columns.dims, start, total)
        return FileDim(columns.dims, start, total * columns.dims[0].size, total)

    def _table(self, last: str) -> tuple[Sequence[Dimension], Sequence[Dimension]]:
        """Dims of an array that is not a linear layer."""
        config = self.config
        model = [config.model_dim]
        if last == "relative_position_bias":
            return [Dimension("buckets", config.relative_buckets)], self.heads
        if last == "router":
            return [config.experts_dim._replace(name=f"all_{config.experts_dim.name}")], model
        rows = {"positions": "positions_dim", "token_types": "types_dim"}
        return [getattr(config, rows.get(last, "vocab_dim"))], model
