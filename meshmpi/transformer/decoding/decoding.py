"""Generates texts with a trained Transformer, token by token, with a key-value cache.

A draw depends only on the seed, the number of the prompt and the position of the token, so every layout draws the
same text unless rounding decides a near tie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from meshmpi.dims import LayoutLike
from meshmpi.errors import ConfigError, DataError
from meshmpi.kernels import random_block
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.runtime.variables import VariableStore
from meshmpi.transformer.decoding.beams import Beams, Hypothesis
from meshmpi.transformer.decoding.programs import Choosing, DecodingPrograms, Sizes
from meshmpi.transformer.models import TransformerConfig


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the model's probabilities.

    Attributes:
        temperature: Logits are divided by it; 0 takes the most probable token.
        top_k: Only the k most probable tokens are drawn from; 0: all.
        top_p: Only the most probable tokens that together reach this probability are drawn from (of
            those of ``top_k``, where both are given); 1: all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ConfigError(
                f"sampling: temperature {self.temperature}, top_k {self.top_k} and top_p {self.top_p} are not valid.",
                "Give a temperature and top_k from 0, and top_p above 0 and up to 1.",
            )

    def choosing(self) -> Choosing:
        """The form of program that samples so."""
        if self.temperature == 0:
            return Choosing("greedy")
        return Choosing("draw", self.top_k, self.top_p < 1)


class Token(NamedTuple):
    """A token drawn for prompt number ``row``; ``last`` where it ends the row, as a stop token does."""

    row: int
    token: int
    last: bool


@dataclass
class _Row:
    """A text that is being continued."""

    number: int  # of its prompt
    text: list[int]  # the tokens that count
    noise: np.ndarray  # one uniform number for each new token
    cached: int = 0  # caches hold this many tokens of the text
    drawn: int = 0  # number of new tokens
    fresh: bool = True

    @property
    def waiting(self) -> int:
        """Tokens that the model has not seen."""
        return len(self.text) - self.cached


@dataclass(frozen=True)
class _Order:
    """The arguments of `generate`."""

    prompts: Sequence[Sequence[int]]
    max_tokens: int
    sampling: Sampling
    stop: frozenset[int]
    seed: int


class Generator:
    """Continues prompts, or translates sources.

    A text that outgrows the caches is cut to its last half cache, which is read again as if the text began
    there; a longer prompt is cut to the end that fits.

    Args:
        config: The Transformer.
        mesh: A Mesh or SimulatedMesh.
        layout: Computation layout; it also splits the dimensions batch, beam, heads, d_kv and
            memory_length of the caches.
        model: "lm" or "encoder_decoder".
        variables: ``step.variables`` of a step with the same model, mesh, layout and storage; None
            makes new ones, to be loaded from a checkpoint (``generator.variables``).
        storage: Storage rules of the variables.
        batch: Rows computed together; the next prompt takes the place of a finished row.
        max_length: Positions that caches hold; default (and at most, where positions are learned)
            the config's length.
        source_length: Longest source of an encoder_decoder; default the config's length.
        vocabulary_size: Ids from here on are never chosen; default the config's vocabulary.
        start: First token of the decoder of an encoder_decoder, and of a language model where the
            prompt is empty; default the padding id, or 0.
        kernels: "auto", "native" or "numpy".
        seed: Seed of the first values, where ``variables`` are made.
        between: Called before each program that advances texts; an exception of it ends the work.

    Attributes:
        variables: The parameters.

    Example:
        >>> config = mm.transformer.TransformerConfig(
        ...     vocab=50, length=32, d_model=16, d_ff=32, heads=2, d_kv=8, layers=1)
        >>> generator = Generator(config, mm.SimulatedMesh("all:2"), "heads:all;d_ff:all", batch=2)
        >>> [len(text) for text in generator.generate([[1, 2, 3], [4]], max_tokens=5)]
        [5, 5]
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: AnyMesh,
        layout: LayoutLike = "",
        *,
        model: str = "lm",
        variables: VariableStore | None = None,
        storage: LayoutLike = None,
        batch: int = 1,
        max_length: int | None = None,
        source_length: int | None = None,
        vocabulary_size: int | None = None,
        start: int | None = None,
        kernels: str = "auto",
        seed: int = 0,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.model, self.batch = config, model, batch
        self.max_length = config.length if max_length is None else max_length
        self.source_length = config.length if source_length is None else source_length
        self.vocabulary_size = config.vocab if vocabulary_size is None else vocabulary_size
        self.start = max(config.padding_id, 0) if start is None else start
        self._between = between
        longest = config.length if config.learned_positions else None
        bounds = {"batch": None, "max_length": longest, "source_length": longest, "vocabulary_size": config.vocab}
        for name, most in bounds.items():
            n = getattr(self, name)
            if n < 1 or (most is not None and n > most):
                remedy = "Give at least 1." if most is None else f"Give 1 to {most}."
                raise ConfigError(f"Generator: {name} is {n}.", remedy)
        if model == "encoder_decoder" and config.padding_id < 0:
            raise ConfigError(
                "sources of different lengths are decoded together, but the config has no padding_id.",
                "Give the config the id that pads sources.",
            )
        sizes = Sizes(batch, self.max_length, self.source_length, self.vocabulary_size)
        self._programs = DecodingPrograms(config, mesh, layout, model, variables, storage, sizes, kernels, seed)
        self.variables = self._programs.parameters

    # ---- sampling --------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        sampling: Sampling = Sampling(),
        stop: Sequence[int] = (),
        seed: int = 0,
    ) -> list[list[int]]:
        """Continuations of all prompts, in their order.  Collective.

        Args:
            prompts: Token ids, of any lengths; for an encoder_decoder the sources.
            max_tokens: Most tokens of a continuation.
            sampling: How tokens are chosen.
            stop: A row ends at any of these tokens, which is not part of the result.
            seed: Seed of the noise.

        Returns:
            The new tokens of each prompt.

        Raises:
            DataError: A prompt has an id outside of the vocabulary, or a source is too long.
        """
        texts: list[list[int]] = [[] for _ in prompts]
        ends = frozenset(stop)
        for t in self.stream(prompts, max_tokens, sampling=sampling, stop=stop, seed=seed):
            if t.token not in ends:
                texts[t.row].append(t.token)
        return texts

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        sampling: Sampling = Sampling(),
        stop: Sequence[int] = (),
        seed: int = 0,
    ) -> Iterator[Token]:
        """As `generate`, but gives each token as soon as it is drawn.  All ranks must iterate."""
        self._check_prompts(prompts, max_tokens)
        return self._stream(_Order(prompts, max_tokens, sampling, frozenset(stop), seed))

    def _stream(self, order: _Order) -> Iterator[Token]:
        rows: list[_Row | None] = [None] * self.batch
        upcoming = iter(range(len(order.prompts)) if order.max_tokens else ())
        while True:
            for place, row in enumerate(rows):
                number = next(upcoming, None) if row is None else None
                if number is not None:
                    rows[place] = self._row(order, number)
            if not any(rows):
                return
            self._between()
            self._encode(order, rows)
            for place, token in self._advance(order, rows):
                row = rows[place]
                assert row is not None
                row.text.append(token)
                row.drawn += 1
                last = token in order.stop or row.drawn == order.max_tokens
                if last:
                    rows[place] = None
                elif len(row.text) > self.max_length:
                    row.text, row.cached = row.text[-max(1, self.max_length // 2) :], 0
                yield Token(row.number, token, last)

    def _row(self, order: _Order, number: int) -> _Row:
        text = [self.start]
        if self.model == "lm" and len(order.prompts[number]):
            text = [int(t) for t in order.prompts[number]][-self.max_length :]
        n = order.max_tokens
        noise = random_block("uniform", order.seed, f"prompt {number}", 0, (n,), ((0, n),), "float32")
        return _Row(number, text, noise)

    def _advance(self, order: _Order, rows: Sequence[_Row | None]) -> list[tuple[int, int]]:
        """Runs one program; returns (row, token) for each row whose whole text the model has seen."""
        length = self._programs.tokens_at_once(max(r.waiting for r in rows if r))
        feeds, needed = _next_tokens(rows, self.batch, length, 0)
        ready = [k for k, row in enumerate(rows) if row and not row.waiting]
        choosing = order.sampling.choosing() if ready else Choosing("none")
        step = self._programs.chunk(length, self._programs.seen(needed), choosing)
        if choosing.kind == "draw":
            uniform = np.array([row.noise[row.drawn] if row else 0 for row in rows], np.float32)
            feeds |= {"uniform": uniform, "temperature": np.float32(order.sampling.temperature)}
            feeds |= {"top_p": np.float32(order.sampling.top_p)} if choosing.top_p else {}
        found: Any = step(feeds)
        return [(k, int(found["token"].local[k])) for k in ready]

    def _encode(self, order: _Order, rows: Sequence[_Row | None]) -> None:
        """Keeps keys and values of the sources of new rows."""
        new = {k: row for k, row in enumerate(rows) if row and row.fresh}
        if self.model == "lm" or not new:
            return
        source = np.full((self.batch, self.source_length), self.config.padding_id, np.int32)
        for k, row in new.items():
            given = order.prompts[row.number]
            source[k, : len(given)] = given
            row.fresh = False
        fresh = np.array([k in new for k in range(self.batch)])
        self._programs.encode()(source=source, fresh=fresh)

    # ---- beams -----------------------------------------------------------------------------

    def beam_search(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        beams: int = 4,
        alpha: float = 0.6,
        stop: Sequence[int] = (),
        power: float | None = None,
        early_stopping: bool | str = False,
    ) -> list[list[Hypothesis]]:
        """The best ``beams`` continuations of each prompt that the search finds, best first.

        At each step the best extensions of all beams are kept.  A continuation Y scores
        log P(Y) / ((5 + |Y|) / 6)**alpha, where |Y| counts its stop token; one that reaches
        ``max_tokens`` without a stop token is a result by the same score.  The search of a row ends
        when no beam can score more than its results.  Collective.

        Args:
            prompts: As `generate`.
            max_tokens: Most tokens of a continuation, its stop token counted.
            beams: Continuations kept at each step, and returned.
            alpha: Exponent of the length penalty; 0: none.
            stop: Tokens that end a continuation.
            power: Given: the search of `transformers`, token for token.  A continuation scores
                log P(Y) / |Y|**power (its ``length_penalty``); ``alpha`` is not used.
            early_stopping: With ``power``, as there: True ends a row as soon as ``beams``
                continuations have ended; False when the best beam, at its present length, cannot
                come before them; "never" when it could not at any length.

        Returns:
            For each prompt its `Hypothesis` list.

        Raises:
            ConfigError: Prompt and continuation do not fit into the caches.
            DataError: As `generate`.

        Source: Wu et al. 2016, section 7, equation 14, without the coverage penalty.
        """
        self._check_prompts(prompts, max_tokens)
        if beams < 1 or max_tokens < 1:
            raise ConfigError(f"beam search with {beams} beams and {max_tokens} tokens.", "Give at least 1.")
        found: list[list[Hypothesis]] = []
        for first in range(0, len(prompts), self.batch):
            numbers = range(first, min(first + self.batch, len(prompts)))
            order = _Order(prompts, max_tokens, Sampling(), frozenset(stop), 0)
            rows = [self._row(order, n) for n in numbers]
            self._check_room(prompts, rows, max_tokens)
            search = [Beams(beams, alpha, tuple(stop), max_tokens, power, early_stopping) for _ in rows]
            self._encode(order, rows)
            _BeamRun(self._programs, rows, search).run(self._between)
            found += [s.ended for s in search]
        return found

    def _check_room(self, prompts: Sequence[Sequence[int]], rows: Sequence[_Row], max_tokens: int) -> None:
        for row in rows:
            given = len(prompts[row.number]) if self.model == "lm" else 1
            if given + max_tokens - 1 > self.max_length:
                raise ConfigError(
                    f"prompt {row.number} has {given} tokens; with {max_tokens} more it does not"
                    f" fit into {self.max_length} positions.",
                    "Cut it, ask for fewer tokens, or give a greater max_length.",
                )

    def _check_prompts(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        if max_tokens < 0:
            raise ConfigError(f"max_tokens is {max_tokens}.", "Give 0 or more.")
        translates = self.model == "encoder_decoder"
        if translates and max_tokens > self.max_length:
            raise ConfigError(
                f"max_tokens is {max_tokens}, but the decoder has {self.max_length} positions.",
                "Ask for fewer tokens, or give a greater max_length.",
            )
        for number, prompt in enumerate(prompts):
            for place, token in enumerate(prompt):
                if not 0 <= token < self.config.vocab:
                    raise DataError(
                        f"token {place} of prompt {number} is {token}.", f"Give ids from 0 to {self.config.vocab - 1}."
                    )
            if translates and not 1 <= len(prompt) <= self.source_length:
                raise DataError(
                    f"source {number} has {len(prompt)} tokens.", f"Give 1 to {self.source_length}; see source_length."
                )


def _next_tokens(rows: Sequence[_Row | None], batch: int, length: int, keep: int) -> tuple[dict[str, Any], int]:
    """Feeds of the next ``length`` tokens of each row but its last ``keep``, which the rows then count as cached.

    Returns:
        ``tokens`` [batch, length], ``start`` and ``count`` [batch]; and how many positions the program must see.
    """
    tokens = np.zeros((batch, length), np.int32)
    start, count = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
    for k, row in enumerate(rows):
        if row is not None:
            n = min(row.waiting - keep, length)
            tokens[k, :n] = row.text[row.cached : row.cached + n]
            start[k], count[k] = row.cached, n
            row.cached += n
    return {"tokens": tokens, "start": start, "count": count}, max(int((start + count).max()), length)


class _BeamRun:
    """The search of up to ``batch`` rows."""

    def __init__(self, programs: DecodingPrograms, rows: list[_Row], search: list[Beams]) -> None:
        self._programs, self._rows, self._search = programs, rows, search
        self._batch, self._width = programs.batch.size, search[0].width

    def run(self, between: Callable[[], None]) -> None:
        """Until all rows are done; ``between`` is called before each step."""
        self._fill()
        last = np.zeros((self._batch, self._width, 1), np.int32)
        for k, row in enumerate(self._rows):
            last[k] = row.text[-1]
        while not all(s.done for s in self._search):
            between()
            self._step(last)

    def _fill(self) -> None:
        """Lets the model see all but the last token of each prompt, and gives the past to all beams."""
        used = False
        while waiting := max(row.waiting - 1 for row in self._rows):
            length = self._programs.tokens_at_once(waiting)
            feeds, needed = _next_tokens(self._rows, self._batch, length, 1)
            self._programs.chunk(length, self._programs.seen(needed), Choosing("none"))(feeds)
            used = True
        if used:
            self._programs.spread(self._width)()

    def _step(self, last: np.ndarray) -> None:
        """Extends all beams by a token; ``last`` [batch, beam, 1] holds the last tokens."""
        programs, width = self._programs, self._width
        start, count = np.zeros(self._batch, np.int32), np.zeros(self._batch, np.int32)
        for k, (row, s) in enumerate(zip(self._rows, self._search, strict=True)):
            start[k], count[k] = row.cached, not s.done
        seen = programs.seen(int((start + count).max()))
        step = programs.beam_step(width, min(self._search[0].considered, programs.known), seen)
        found: Any = step(tokens=last, start=start, count=count)
        values, tokens = found["log_probability"].local, found["token"].local
        parents = np.tile(np.arange(width, dtype=np.int32), (self._batch, 1))
        for k, (row, s) in enumerate(zip(self._rows, self._search, strict=True)):
            if not s.done:
                chosen, origin = s.extend(values[k], tokens[k])
                row.cached += 1
                last[k, : len(chosen), 0] = chosen
                parents[k, : len(origin)] = origin
        if np.any(parents != np.arange(width)) and not all(s.done for s in self._search):
            programs.reorder(width, seen)(parents=parents)


__all__ = ["Generator", "Hypothesis", "Sampling", "Token"]
