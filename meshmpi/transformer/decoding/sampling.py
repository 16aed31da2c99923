"""Continues a text, given and returned as text: a `Generator` with a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from meshmpi.dims import LayoutLike
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.runtime.variables import VariableStore
from meshmpi.transformer.decoding.beams import Hypothesis
from meshmpi.transformer.decoding.decoding import Generator, Sampling
from meshmpi.transformer.models import TransformerConfig
from meshmpi.transformer.text.base import Vocabulary


class Sampler:
    """Continues texts.

    Args:
        config: The Transformer.
        vocabulary: What the tokens mean.
        mesh: The mesh.
        layout: Computation layout.
        storage: Storage rules of the variables.
        variables: ``step.variables`` of a step with the same model, mesh, layout and storage; None
            makes new ones, to be loaded from a checkpoint.
        sampling: How tokens are chosen.
        seed: Seed of the noise.
        between: Called before each program; an exception of it ends the work.

    Attributes:
        variables: The model's variables.
    """

    def __init__(
        self,
        config: TransformerConfig,
        vocabulary: Vocabulary,
        mesh: AnyMesh,
        layout: LayoutLike = "",
        storage: LayoutLike = None,
        variables: VariableStore | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008
        seed: int = 0,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self.vocabulary, self.sampling, self.seed = vocabulary, sampling, seed
        self._generator = Generator(
            config,
            mesh,
            layout,
            variables=variables,
            storage=storage,
            vocabulary_size=vocabulary.size,
            seed=seed,
            between=between,
        )
        self.variables = self._generator.variables

    def tokens(self, prompt: str, count: int) -> Iterator[int]:
        """Tokens that continue the prompt, as they are drawn.  Collective.

        Args:
            prompt: The text to continue; an empty one counts as a line end.
            count: Number of tokens.

        Raises:
            DataError: The vocabulary lacks a character of the prompt.
        """
        text = [int(t) for t in self.vocabulary.encode(prompt or "\n")]
        drawn = self._generator.stream([text], count, sampling=self.sampling, seed=self.seed)
        return (t.token for t in drawn)

    def pieces(self, prompt: str, count: int, stop: Sequence[str] = ()) -> Iterator[str]:
        """The continuation piece by piece, each as soon as no later token can change it.

        Args:
            prompt, count: As `tokens`.
            stop: The text ends before the first of these strings.
        """
        tokens: list[int] = []
        shown = 0
        for token in self.tokens(prompt, count):
            tokens.append(token)
            text = self.vocabulary.decode(tokens)
            ends = [text.find(s) for s in stop if s and s in text]
            if ends:
                yield text[shown : min(ends)]
                return
            # An unfinished letter and the beginning of a stop string are not shown yet.
            sure = len(text.rstrip("\ufffd"))
            sure -= max((_overlap(text[:sure], s) for s in stop), default=0)
            if sure > shown:
                yield text[shown:sure]
                shown = sure
        yield self.vocabulary.decode(tokens)[shown:]

    def text(self, prompt: str, count: int, stop: Sequence[str] = ()) -> str:
        """The continuation of ``prompt`` by ``count`` tokens, without the prompt.  Collective."""
        return "".join(self.pieces(prompt, count, stop))

    def best(self, prompt: str, count: int, beams: int, alpha: float) -> list[Hypothesis]:
        """The results of `Generator.beam_search` for a prompt.  Collective."""
        text = [int(t) for t in self.vocabulary.encode(prompt or "\n")]
        return self._generator.beam_search([text], count, beams=beams, alpha=alpha)[0]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` with which ``stop`` begins."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
