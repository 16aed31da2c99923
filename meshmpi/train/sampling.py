"""Continuations of a text, one token at a time, each from a window of the model's length.

The noise depends on the seed and the place of the token alone: every layout draws the same text, as
far as rounding does not turn a near tie.  Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from meshmpi.api import compile as compile_step
from meshmpi.nn.transformer import TransformerConfig
from meshmpi.train.model import build_sampling_graph
from meshmpi.train.vocabulary import Vocabulary


class Sampler:
    """Draws continuations.

    Args:
        config: The Transformer.
        vocabulary: What the tokens mean.
        mesh: The mesh.
        layout: Computation layout.
        storage: Storage rules of the variables.
        variables: ``step.variables`` of a step with the same model, mesh, layout and storage; None
            makes new ones, to be loaded from a checkpoint.
        temperature: 0 takes the most probable token.
        seed: Of the noise.

    Attributes:
        variables: The model's variables.
    """

    def __init__(
        self, config: TransformerConfig, vocabulary: Vocabulary, mesh: Any, layout: Any = "",
        storage: Any = None, variables: Any = None, temperature: float = 1.0, seed: int = 0,
    ) -> None:  # fmt: skip
        built = build_sampling_graph(config, vocabulary.size, temperature)
        self.config, self.vocabulary = config, vocabulary
        self._token = built.token
        self._step = compile_step(
            built.graph, mesh, layout, fetches=[built.token], storage=storage, seed=seed,
            variables=variables,
        )  # fmt: skip
        self.variables = self._step.variables

    def tokens(self, prompt: str, count: int) -> Iterator[int]:
        """Tokens that continue the prompt, as they are drawn.  Collective.

        Args:
            prompt: The text to continue; an empty one counts as a line end.
            count: Number of tokens.

        Raises:
            DataError: The vocabulary lacks a character of the prompt.
        """
        text = [int(t) for t in self.vocabulary.encode(prompt or "\n")]
        window = np.zeros((1, self.config.length), np.int32)
        for _ in range(count):
            recent = text[-self.config.length :]
            window[0, : len(recent)] = recent
            self._step.step_number = len(text)
            found = self._step(sample_tokens=window, last=np.int32(len(recent) - 1))
            text.append(int(found[self._token].numpy()[0]))
            yield text[-1]

    def text(self, prompt: str, count: int) -> str:
        """The continuation of ``prompt`` by ``count`` tokens, without the prompt.  Collective."""
        return self.vocabulary.decode(list(self.tokens(prompt, count)))
