"""The programs of a `Generator`: compiled at first use, all on the same parameters and caches.

Programs have no branches, so there is one for each chunk length and each number of positions to look back, both from
a short list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from meshmpi.api import compile as compile_step
from meshmpi.dims import Dimension, Layout, LayoutLike, Shape
from meshmpi.errors import ConfigError, VariableError, suggest
from meshmpi.graph import Graph, Tensor, Update
from meshmpi.graph.ops.placement import constrain
from meshmpi.graph.ops.sources import placeholder
from meshmpi.nn.decoding import beam_candidates, draw, known_only
from meshmpi.nn.ordering import argmax
from meshmpi.runtime.compiled import CompiledStep
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.runtime.variables import OverlaidStore, VariableStore
from meshmpi.transformer.models import TransformerConfig, encoder_decoder, lm
from meshmpi.transformer.models.caches import MEMORY, OF_BEAMS, encoder_caches, reordered_caches, spread_caches
from meshmpi.transformer.models.incremental import Chunk, Decoded, incremental_decoder, incremental_lm
from meshmpi.transformer.models.transformers import SOURCE_LENGTH

LEAST_SEEN = 64
"""Positions that the smallest program looks at; each larger program looks at twice as many."""
MOST_TOKENS = 256
"""Most tokens that a program is given at a time.  Assumption: products of this many rows run at full speed."""
MODELS = ("lm", "encoder_decoder")


Built = tuple[dict[str, Tensor], list[Update]]
"""Fetches and updates of a program."""


class Choosing(NamedTuple):
    """How a program chooses tokens: a form of program, not its numbers.

    ``kind`` is "none" (it only fills caches), "greedy" or "draw".
    """

    kind: str
    top_k: int = 0
    top_p: bool = False


class Sizes(NamedTuple):
    """Sizes of the programs: `Generator`'s batch, max_length, source_length and vocabulary_size."""

    batch: int
    memory: int
    source_length: int
    known: int


class DecodingPrograms:
    """Args: as `Generator`; ``parameters`` is the store of the model's variables."""

    def __init__(
        self,
        config: TransformerConfig,
        mesh: AnyMesh,
        layout: LayoutLike,
        model: str,
        variables: VariableStore | None,
        storage: LayoutLike,
        sizes: Sizes,
        kernels: str,
        seed: int,
    ) -> None:
        if model not in MODELS:
            raise ConfigError(f"there is no model '{model}' to decode with.", suggest(model, MODELS))
        self.config, self.mesh, self.model = config, mesh, model
        self.batch, self.memory, self.known = Dimension("batch", sizes.batch), sizes.memory, sizes.known
        self.source = Dimension(SOURCE_LENGTH, sizes.source_length)
        whole, self.splits_memory = Layout(layout), bool(Layout(layout).axes(MEMORY))
        self._options = {"seed": seed, "kernels": kernels}
        self._made: dict[tuple, CompiledStep] = {}
        names = [*self._model_graph()[0].dim_names, "beam"]
        for rules in (whole, Layout(storage)):
            rules.check(mesh.shape, names)
        self.layout = _optional(whole)
        self.storage = None if storage is None else _optional(Layout(storage))  # None: once per host, as in training
        self.parameters = self._first_values() if variables is None else variables
        self._store = OverlaidStore(self.parameters)
        self._beams = 0

    def _model_graph(self) -> tuple[Graph, Tensor]:
        """The whole model on one token: it has all parameters and all dimensions."""
        one = Shape([self.batch, Dimension("length", 1)])
        with Graph() as graph:
            tokens = placeholder("tokens", one, "int32")
            if self.model == "lm":
                return graph, lm(self.config, tokens)
            source = placeholder("source", [self.batch, self.source], "int32")
            return graph, encoder_decoder(self.config, source, tokens)

    def _first_values(self) -> VariableStore:
        graph, logits = self._model_graph()
        step = compile_step(graph, self.mesh, self.layout, fetches=[logits], storage=self.storage, **self._options)
        return step.variables

    # ---- sizes -----------------------------------------------------------------------------

    def seen(self, needed: int) -> int:
        """Positions that a program looks at when it needs at least ``needed``."""
        if self.splits_memory:  # the first positions are not a block of every rank
            return self.memory
        size = LEAST_SEEN
        while size < needed:
            size *= 2
        return min(size, self.memory)

    def tokens_at_once(self, waiting: int) -> int:
        """Tokens that a program is given when ``waiting`` are waiting: 1, 4, 16, 64 or 256."""
        size = 1
        while size < min(waiting, MOST_TOKENS):
            size *= 4
        return min(size, self.memory)

    # ---- programs --------------------------------------------------------------------------

    def chunk(self, length: int, seen: int, choosing: Choosing) -> CompiledStep:
        """Feeds ``tokens`` [batch, length], ``start``, ``count``; fetches ``token`` [batch].

        A draw also takes ``uniform`` [batch] and the scalars ``temperature`` and ``top_p``.
        """

        def build() -> Built:
            done = self._decode(Shape([self.batch, Dimension("length", length)]), seen)
            fetches = {} if choosing.kind == "none" else {"token": _whole(self._choose(done.logits, choosing))}
            return fetches, done.updates

        return self._program(("chunk", length, seen, choosing), build)

    def beam_step(self, beams: int, candidates: int, seen: int) -> CompiledStep:
        """Feeds ``tokens`` [batch, beam, 1], ``start``, ``count``; fetches the candidates.

        ``log_probability`` and ``token`` are [batch, beam, candidates].
        """
        self._widen(beams)

        def build() -> Built:
            beam = Dimension("beam", beams)
            done = self._decode(Shape([self.batch, beam, Dimension("length", 1)]), seen)
            found = beam_candidates(known_only(done.logits, "vocab", self.known), "vocab", candidates)
            return dict(zip(("log_probability", "token"), map(_whole, found), strict=True)), done.updates

        return self._program(("beam_step", beams, candidates, seen), build)

    def reorder(self, beams: int, seen: int) -> CompiledStep:
        """Feeds ``parents`` [batch, beam]: each beam goes on from the past of this one."""

        def build() -> Built:
            rows = Shape([self.batch, Dimension("beam", beams)])
            parents = placeholder("parents", rows, "int32")
            return {}, reordered_caches(self.config, rows, parents, self.memory, seen)

        return self._program(("reorder", beams, seen), build)

    def spread(self, beams: int) -> CompiledStep:
        """Gives all beams of a row the past that `chunk` has kept."""
        self._widen(beams)
        rows = Shape([self.batch, Dimension("beam", beams)])
        return self._program(("spread", beams), lambda: ({}, spread_caches(self.config, rows, self.memory)))

    def encode(self) -> CompiledStep:
        """Feeds ``source`` [batch, source_length] and ``fresh``, bool [batch]."""

        def build() -> Built:
            source = placeholder("source", [self.batch, self.source], "int32")
            fresh = placeholder("fresh", [self.batch], "bool")
            return {}, encoder_caches(self.config, source, fresh)

        return self._program(("encode",), build)

    def _widen(self, beams: int) -> None:
        """Forgets programs and caches of another number of beams: caches are large."""
        if beams != self._beams:
            self._beams = beams
            self._made = {k: v for k, v in self._made.items() if k[0] in ("chunk", "encode")}
            self._store.drop([n for n in self._store if n.endswith(OF_BEAMS)])

    def _decode(self, shape: Shape, seen: int) -> Decoded:
        tokens = placeholder("tokens", shape, "int32")
        start, count = (placeholder(n, [self.batch], "int32") for n in ("start", "count"))
        chunk = Chunk(tokens, start, count, self.memory, seen)
        if self.model == "lm":
            return incremental_lm(self.config, chunk)
        return incremental_decoder(self.config, chunk, self.source.size)

    def _choose(self, logits: Tensor, choosing: Choosing) -> Tensor:
        logits = known_only(logits, "vocab", self.known)
        if choosing.kind == "greedy":
            return argmax(logits, "vocab")
        uniform = placeholder("uniform", [self.batch])
        temperature = placeholder("temperature", ())
        top_p = placeholder("top_p", ()) if choosing.top_p else None
        return draw(logits, "vocab", uniform, temperature, top_p, choosing.top_k)

    def _program(self, key: tuple, build: Callable[[], Built]) -> CompiledStep:
        if key not in self._made:
            with Graph() as graph:
                fetches, updates = build()
            self._check(graph)
            asked = {"fetches": fetches, "updates": updates, "storage": self.storage, "variables": self._store}
            self._made[key] = compile_step(graph, self.mesh, self.layout, **asked, **self._options)
        return self._made[key]

    def _check(self, graph: Graph) -> None:
        """Every parameter must be there: a missing one would be made anew, with random values."""
        missing = [n for n, v in graph.variables.items() if v.trainable and n not in self.parameters.types]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise VariableError(
                f"the variables lack '{missing[0]}'{more} of this {self.model}.",
                "Give the variables of a step with the same model.",
            )


def _whole(x: Tensor) -> Tensor:
    """x on all ranks."""
    return constrain(x, ";".join(f"{n}:" for n in x.shape.names))


def _optional(layout: Layout) -> Layout:
    """The same rules as optional ones: each program has only some of the dimensions."""
    return Layout([(f"{r.dim}?", r.axes) for r in layout])


__all__ = ["Choosing", "DecodingPrograms"]
