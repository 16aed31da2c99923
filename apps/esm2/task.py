"""Training a protein model: the masked task on families of real sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from apps.esm2 import proteins
from apps.esm2.alphabet import CLS, EOS, FIRST_RESIDUE, MASK, PAD, RESIDUES, TOKENS, USUAL, letters, numbers
from apps.esm2.masked import MaskedData, MaskedTask
from apps.esm2.masking import Masking
from apps.esm2.sequences import Sequences
from meshmpi.errors import DataError
from meshmpi.runtime.agreement import from_first, gathered
from meshmpi.transformer.text.base import Vocabulary
from meshmpi.transformer.training.settings import Settings

SPECIAL = tuple(k for k in range(len(TOKENS)) if not FIRST_RESIDUE <= k < FIRST_RESIDUE + len(RESIDUES))


def marked(residues: np.ndarray) -> np.ndarray:
    """int32: the residues between marks of begin and end."""
    return np.concatenate([[CLS], residues, [EOS]]).astype(np.int32)


class ProteinVocabulary(Vocabulary):
    """The 33 tokens as a vocabulary of the trainer."""

    def __init__(self) -> None:
        self.name, self.size = "proteins", len(TOKENS)
        self.token_bytes = np.ones(self.size, np.int32)

    def encode(self, text: str | bytes) -> np.ndarray:
        return numbers(text if isinstance(text, str) else text.decode("latin-1")).astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        return letters(np.array(list(tokens)))

    def state(self) -> dict[str, Any]:
        return {"kind": self.name}


class ProteinTask(MaskedTask):
    """Masked residues of proteins; the twenty usual ones may stand in the place of a hidden one."""

    masking = Masking(MASK, SPECIAL, USUAL[0], len(USUAL), PAD)

    @classmethod
    def vocabulary_size(cls, settings: Settings) -> int:
        return len(TOKENS)

    def load(self, say: Callable[[str], None]) -> MaskedData:
        data = self.settings.data

        def load() -> proteins.Proteins:
            return proteins.load(data.corpus, data.held_out_fraction)

        from_first(self.mesh, lambda: load() and None)  # others read what the first has cached
        found = load()
        parts = [
            Sequences([marked(s) for s, h in zip(found.sequences, found.held_out, strict=True) if h == held])
            for held in (False, True)
        ]
        digests = gathered(self.mesh, parts[0].digest())
        if len(dict.fromkeys(digests)) > 1:
            other = next(r for r, d in enumerate(digests) if d != digests[0])
            raise DataError(
                f"rank 0 and rank {other} read different proteins from '{data.corpus}'.",
                "Give every node the same file, or empty the cache of the node that differs.",
            )
        train, held_out = parts
        note = (
            f"{len(train):,} sequences with {len(train.tokens):,} tokens to train on,"
            f" {len(held_out):,} with {len(held_out.tokens):,} held out, of {found.families:,}"
            " families"
        )
        return MaskedData(train, held_out, ProteinVocabulary(), note)
