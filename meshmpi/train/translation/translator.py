"""Translations of sentences by beam search with a trained encoder-decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshmpi.errors import DataError
from meshmpi.nn.transformer import TransformerConfig
from meshmpi.train.decoding import Generator
from meshmpi.train.settings import Settings
from meshmpi.train.translation.pairs import main_script
from meshmpi.train.translation.vocabulary import END, PADDING, EndedVocabulary


class Translator:
    """Translates sentences.

    Args:
        settings: Of the run: beams, alpha, sentences together, storage.
        config: The Transformer.
        vocabulary: Of both languages.
        mesh: The mesh.
        layout: The computation layout.
        variables: ``step.variables`` of a step with the same model, mesh, layout and storage; None
            makes new ones, to be loaded from a checkpoint.

    Attributes:
        variables: The model's variables.
    """

    def __init__(
        self, settings: Settings, config: TransformerConfig, vocabulary: EndedVocabulary, mesh: Any,
        layout: Any = "", variables: Any = None,
    ) -> None:  # fmt: skip
        self._settings, self._config, self._vocabulary = settings.translation, config, vocabulary
        self.source_length = self._settings.source_length or config.length
        self._generator = Generator(
            config, mesh, layout, model="encoder_decoder", variables=variables,
            storage=settings.mesh.storage or None, batch=self._settings.sentence_batch,
            source_length=self.source_length, vocabulary_size=vocabulary.size, start=PADDING,
        )  # fmt: skip
        self.variables = self._generator.variables

    def translate(self, sentences: Sequence[str], where: str = "sentence") -> list[str]:
        """The best translation of each sentence; of an empty one the empty one.  Collective.

        Args:
            sentences: Without line ends.
            where: What the sentences are, for messages.

        Raises:
            DataError: A sentence has more tokens than the model takes; names its number.
        """
        sources = {
            k: self._encode(text, f"{where} {k + 1}")
            for k, text in enumerate(sentences) if text.strip()
        }  # fmt: skip
        found = self._generator.beam_search(
            list(sources.values()), self._config.length, beams=self._settings.beams,
            alpha=self._settings.alpha, stop=[END],
        ) if sources else []  # fmt: skip
        best = {
            k: self._vocabulary.decode(hypotheses[0].tokens)
            for k, hypotheses in zip(sources, found, strict=True)
        }
        return [best.get(k, "") for k in range(len(sentences))]

    def _encode(self, text: str, where: str) -> list[int]:
        tokens = [*map(int, self._vocabulary.encode(" ".join(text.split()))), END]
        if len(tokens) > self.source_length:
            raise DataError(
                f"{where} has {len(tokens)} tokens, the model takes {self.source_length}.",
                "Cut it into sentences.",
            )
        return tokens


def strange_lines(sentences: Sequence[str], script: str) -> list[int]:
    """Numbers, from 1, of sentences written in other letters than ``script`` (as "LATIN")."""
    scripts = (main_script(text) for text in sentences)
    return [k for k, found in enumerate(scripts, start=1) if found and found != script]
