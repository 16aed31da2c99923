"""Translates sentences by beam search with a trained encoder-decoder, and computes BLEU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshmpi.dims import LayoutLike
from meshmpi.errors import DataError
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.runtime.variables import VariableStore
from meshmpi.transformer.decoding.decoding import Generator
from meshmpi.transformer.models import TransformerConfig
from meshmpi.transformer.text.base import Vocabulary
from meshmpi.transformer.text.characters import END, PADDING
from meshmpi.transformer.training.settings import Settings
from meshmpi.transformer.translation.pairs import main_script

_RARE_SHARE = 0.05
"""An alphabet with at most this share of the vocabulary's tokens counts as unknown, because texts quote
single letters of other alphabets; assumption."""


class Translator:
    """Translates sentences; the vocabulary is that of both languages.

    Args:
        settings: Settings of the run: beams, alpha, sentences together, storage.
        variables: ``step.variables`` of a step with the same model, mesh, layout and storage; None
            makes new ones, to be loaded from a checkpoint.
        between: Called before each program; what it raises ends the work.
    """

    def __init__(
        self,
        settings: Settings,
        config: TransformerConfig,
        vocabulary: Vocabulary,
        mesh: AnyMesh,
        layout: LayoutLike = "",
        variables: VariableStore | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings, self._config, self._vocabulary = settings.translation, config, vocabulary
        self.source_length = self._settings.source_length or config.length
        self._generator = Generator(
            config,
            mesh,
            layout,
            model="encoder_decoder",
            variables=variables,
            storage=settings.mesh.storage or None,
            batch=self._settings.sentence_batch,
            source_length=self.source_length,
            vocabulary_size=vocabulary.size,
            start=PADDING,
            between=between,
        )
        self.variables = self._generator.variables

    def translate(self, sentences: Sequence[str]) -> list[str]:
        """The best translation of each sentence that `check` lets pass; an empty one stays empty.  Collective."""
        sources = {k: self._encode(s) for k, s in enumerate(sentences) if s.strip()}
        if not sources:
            return [""] * len(sentences)
        found = self._generator.beam_search(
            list(sources.values()),
            self._config.length,
            beams=self._settings.beams,
            alpha=self._settings.alpha,
            stop=[END],
        )
        best = {k: self._vocabulary.decode(hypotheses[0].tokens) for k, hypotheses in zip(sources, found, strict=True)}
        return [best.get(k, "") for k in range(len(sentences))]

    def check(self, sentences: Sequence[str], name: str) -> None:
        """Raises DataError, which names the line of the file ``name``, for a sentence that cannot be translated.

        It is too long, or written in letters that the model has not seen.
        """
        known = self._scripts()
        for number, text in enumerate(sentences, start=1):
            script = main_script(text)
            if script and script not in known:
                raise DataError(
                    f"{name}:{number} is written in {script.lower()} letters; the model has learned"
                    f" {' and '.join(known).lower()} ones.",
                    "Give sentences in the language that it translates from.",
                )
            count = len(self._encode(text))
            if count > self.source_length:
                raise DataError(
                    f"{name}:{number} has {count} tokens, the model takes {self.source_length}.",
                    "Cut the line into sentences.",
                )

    def _encode(self, text: str) -> list[int]:
        return [*map(int, self._vocabulary.encode(" ".join(text.split()))), END]

    def _scripts(self) -> list[str]:
        """Scripts of the letters of the vocabulary, without those that are rare in it."""
        scripts = Counter(
            script
            for token in range(self._vocabulary.size)
            if (script := main_script(self._vocabulary.decode([token])))
        )
        least = _RARE_SHARE * scripts.total()
        return sorted(script for script, n in scripts.items() if n > least)


class Bleu(NamedTuple):
    """A score of translations."""

    score: float  # 0 to 100
    signature: str  # sacreBLEU's description of the computation; publish it with the score
    chrf: float  # the score chrF2 of the same translations, 0 to 100


def bleu(translations: Sequence[str], references: Sequence[str]) -> Bleu:
    """BLEU and chrF2 of a text, by sacreBLEU, so that figures may be compared with published ones.

    References are not tokenised.
    """
    if len(translations) != len(references) or not references:
        raise DataError(
            f"there are {len(translations):,} translations and {len(references):,} references.",
            "Give one reference for each translation.",
        )
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as error:
        raise DataError(
            "BLEU needs the package sacrebleu, which is not installed.",
            "Install it with: pip install 'meshmpi[translate]'",
        ) from error
    metric, given = BLEU(), (list(translations), [list(references)])
    score, chrf = metric.corpus_score(*given).score, CHRF().corpus_score(*given).score
    return Bleu(score, str(metric.get_signature()), chrf)
