"""The 33 tokens of ESM2 and how a protein becomes a row of their numbers.

Source: the order in which ESM's checkpoints number them (Lin et al. 2023).
"""

from __future__ import annotations

import numpy as np

RESIDUES = "LAGVSERTIDPKQNFYMHWCXBUZO"
"""Letters of amino acids from number 4 on: the usual twenty, X for any, rare ones and B, Z."""
TOKENS = ("<cls>", "<pad>", "<eos>", "<unk>", *RESIDUES, ".", "-", "<null_1>", "<mask>")
CLS, PAD, EOS, UNKNOWN, MASK = (TOKENS.index(t) for t in ("<cls>", "<pad>", "<eos>", "<unk>", "<mask>"))
FIRST_RESIDUE = TOKENS.index(RESIDUES[0])
USUAL = tuple(range(FIRST_RESIDUE, FIRST_RESIDUE + 20))
"""Numbers of the twenty usual amino acids."""

_NUMBERS = np.zeros(256, np.uint8)
_NUMBERS[np.frombuffer(RESIDUES.encode(), np.uint8)] = [TOKENS.index(r) for r in RESIDUES]


def numbers(sequence: str) -> np.ndarray:
    """uint8 numbers of the residues of a sequence, without marks of begin and end.

    Args:
        sequence: Letters of `RESIDUES` only, as `fasta.read` gives them.
    """
    found = _NUMBERS[np.frombuffer(sequence.encode("latin-1"), np.uint8)]
    if len(found) and not found.all():
        at = int(np.argmin(found))
        raise ValueError(f"letter {sequence[at]!r} at position {at + 1} is not a residue")
    return found


def letters(tokens: np.ndarray) -> str:
    """The sequence that numbers stand for; marks are written out as <mask> and so on."""
    return "".join(TOKENS[int(n)] for n in tokens)
