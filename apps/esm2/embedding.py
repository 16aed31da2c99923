"""Vectors of proteins: the mean over the residues of each, or one for every residue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from apps.esm2.fasta import Record
from apps.esm2.inference import Inference
from apps.esm2.rows import Batch, Window, batches


def means(
    records: Sequence[Record], parts: Sequence[Window], run: Inference, tokens: int, multiple: int = 1
) -> np.ndarray:
    """float32 [records, d_model]: the mean of the vectors of residues, marks left out.

    Args: as `scoring.score`; ``run`` computes `sums_of_vectors`.  Collective.
    """
    out = np.zeros((len(records), run.config.d_model), np.float64)
    for batch in batches([len(p.tokens) for p in parts], lambda k: parts[k].tokens, tokens, multiple):
        weights = np.zeros(batch.tokens.shape, run.config.dtype)
        for line, k in zip(weights, batch.rows, strict=False):
            line[parts[k].columns()] = 1.0 / len(records[parts[k].sequence].sequence)
        for vector, k in zip(run(batch, weights=weights), batch.rows, strict=False):
            out[parts[k].sequence] += vector
    return out.astype(np.float32)


def per_residue(
    records: Sequence[Record], parts: Sequence[Window], run: Inference, tokens: int, multiple: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of all residues, and where those of each record begin.

    Args: as `scoring.score`; ``run`` computes `residue_vectors`.  Collective.

    Returns:
        float32 [residues of all records, d_model], and int64 [records + 1].
    """
    starts = np.cumsum([0, *(len(r.sequence) for r in records)], dtype=np.int64)
    out = np.zeros((int(starts[-1]), run.config.d_model), np.float32)
    for batch in batches([len(p.tokens) for p in parts], lambda k: parts[k].tokens, tokens, multiple):
        for vectors, k in zip(run(batch), batch.rows, strict=False):
            part = parts[k]
            at = int(starts[part.sequence])
            out[at + part.kept[0] : at + part.kept[1]] = vectors[part.columns()]
    return out, starts


def _batches(parts: Sequence[Window], tokens: int, multiple: int) -> Iterator[Batch]:
    return batches([len(p.tokens) for p in parts], lambda k: parts[k].tokens, tokens, multiple)
