"""Texts from a trained Transformer: one token at a time, with the keys and values of the past kept.

`Generator` compiles a few programs that share parameters and caches.  What is drawn depends on the
seed, the number of the prompt and the position alone: every layout draws the same text, as far as
rounding does not turn a near tie.  Knows token ids, not what they mean, and no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshmpi.nn.transformer import TransformerConfig


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


class Token(NamedTuple):
    """A token as it is drawn: of prompt number ``row``; ``last`` where the row ends with it.

    Where a stop token ends a row, it is the ``token``.
    """

    row: int
    token: int
    last: bool


@dataclass(frozen=True)
class Hypothesis:
    """A result of beam search.

    Attributes:
        tokens: Without the stop token.
        score: ``log_probability`` divided by the length penalty.
        log_probability: Of the tokens, and of the stop token where there is one; nats.
        ended: Whether a stop token ended it; else it reached the greatest length.
    """

    tokens: tuple[int, ...]
    score: float
    log_probability: float
    ended: bool


class Generator:
    """Continues prompts, or translates sources.

    Args:
        config: The Transformer.
        mesh: A Mesh or SimulatedMesh.
        layout: Computation layout; caches are split as it says of batch, beam, heads, d_kv and
            memory_length.
        model: "lm" or "encoder_decoder".
        variables: ``step.variables`` of a step with the same model, mesh, layout and storage; None
            makes new ones, to be loaded from a checkpoint (``generator.variables``).
        storage: Storage rules of the variables.
        batch: Rows computed together; a finished row makes place for the next prompt.
        max_length: Positions that caches hold; default (and at most, where positions are learned)
            the config's length.
        source_length: Of an encoder_decoder the longest source; default the config's length.
        vocabulary_size: Ids from here on are never chosen; default the config's vocabulary.
        start: First token of the decoder of an encoder_decoder, and of a language model where the
            prompt is empty; default the padding id, or 0.
        kernels: As `mm.compile`.
        seed: Of first values, where ``variables`` are made.

    Attributes:
        variables: The variables: parameters, and caches under ``cache/``.
    """

    def __init__(
        self, config: TransformerConfig, mesh: Any, layout: Any = "", *, model: str = "lm",
        variables: Any = None, storage: Any = None, batch: int = 1, max_length: int | None = None,
        source_length: int | None = None, vocabulary_size: int | None = None,
        start: int | None = None, kernels: str = "auto", seed: int = 0,
    ) -> None:  # fmt: skip
        raise NotImplementedError

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *,
        sampling: Sampling = Sampling(), stop: Sequence[int] = (), seed: int = 0,
    ) -> list[list[int]]:  # fmt: skip
        """Continuations of all prompts, in their order.  Collective.

        Args:
            prompts: Token ids, of any lengths; of an encoder_decoder the sources.
            max_tokens: Most tokens of a continuation.
            sampling: How tokens are chosen.
            stop: A row ends at any of these tokens, which is not part of the result.
            seed: Of the noise.

        Returns:
            The new tokens of each prompt.
        """
        raise NotImplementedError

    def stream(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *,
        sampling: Sampling = Sampling(), stop: Sequence[int] = (), seed: int = 0,
    ) -> Iterator[Token]:  # fmt: skip
        """As `generate`, but gives each token as soon as it is drawn.  All ranks must iterate."""
        raise NotImplementedError

    def beam_search(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, beams: int = 4,
        alpha: float = 0.6, stop: Sequence[int] = (),
    ) -> list[list[Hypothesis]]:  # fmt: skip
        """The best ``beams`` continuations of each prompt, best first.  Collective.

        A continuation Y scores log P(Y) / ((5 + |Y|) / 6)**alpha, its stop token counted in |Y|
        (Wu et al. 2016, equation 14).

        Args:
            prompts: As `generate`.
            max_tokens: Most tokens of a continuation, its stop token counted.
            beams: Continuations kept at each step, and returned.
            alpha: Of the length penalty; 0: none.
            stop: Tokens that end a continuation.
        """
        raise NotImplementedError
