"""BLEU of translations, by sacreBLEU, so that figures may be compared with published ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshmpi.errors import DataError


@dataclass(frozen=True)
class Bleu:
    """A score of translations.

    Attributes:
        score: 0 to 100.
        signature: sacreBLEU's description of the computation; publish it with the score.
        chrf: The score chrF2 of the same translations, 0 to 100.
    """

    score: float
    signature: str
    chrf: float


def bleu(translations: Sequence[str], references: Sequence[str]) -> Bleu:
    """BLEU and chrF2 of a text.

    Args:
        translations: One for each sentence.
        references: One for each sentence, not tokenised.

    Raises:
        DataError: The extra `translate` is not installed, or the numbers of sentences differ.
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
    metric = BLEU()
    score = metric.corpus_score(list(translations), [list(references)]).score
    chrf = CHRF().corpus_score(list(translations), [list(references)]).score
    return Bleu(score, str(metric.get_signature()), chrf)
