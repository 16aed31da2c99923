"""Real proteins to train on: 20,000 sequences of the Debian package mmseqs2-examples.

They are fetched once, checked and kept in the cache, with the families that tell what may be held
out.  A FASTA file of one's own serves as well.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from apps.esm2 import fasta, similarity
from apps.esm2.alphabet import numbers
from apps.fetching.debian import debian_files
from meshmpi.errors import DataError
from meshmpi.files import plain
from meshmpi.files.cache import cache_folder, make_file, make_folder
from meshmpi.transformer.training.corpora import checked_file
from meshmpi.transformer.training.sealed import Sealed, seal

NAME = "mmseqs2-examples"
MEMBER = "example-data/DB.fasta.gz"
SHA256 = "92a65aa435f5d3e0f33eb47d87910fe7fc6033a28bf4ed1367094377d791d567"
"""The checksum of the file in the package, taken when this was written."""


class Proteins(NamedTuple):
    """Sequences of a file and which of them are held out.

    Attributes:
        sequences: uint8 numbers of residues, without marks.
        held_out: bool, for each sequence.
        families: Number of families.
    """

    sequences: list[np.ndarray]
    held_out: np.ndarray
    families: int


def load(name: str, share: float) -> Proteins:
    """Proteins by the name of the package, or of the path of a FASTA file.

    Args:
        name: `NAME`, or a path.
        share: Of the sequences that is held out, about; families are not divided.

    Raises:
        DataError: They cannot be fetched or read, or nothing is left on one side.
    """
    path = fetched() if name == NAME else Path(name).expanduser()
    records = fasta.read(path)
    sequences = [numbers(r.sequence) for r in records]
    family = _families(path, sequences)
    chosen = similarity.held_out([r.name for r in records], family, share)
    if chosen.all() or not chosen.any():
        raise DataError(
            f"of the {len(records)} sequences of {path}, in {len(np.unique(family))} families,"
            f" {int(chosen.sum())} would be held out with a share of {share:g}.",
            "Give more sequences, or another data.held_out_fraction.",
        )
    return Proteins(sequences, chosen, len(np.unique(family)))


def fetched() -> Path:
    """The FASTA file of the package, fetched when it is not in the cache."""
    path = cache_folder("proteins") / f"{NAME}-{SHA256[:12]}.fasta.gz"
    return checked_file(make_file(path, _fetch), SHA256)


def _fetch(path: Path) -> None:
    otherwise = "give the path of a FASTA file as data.corpus"
    ((_, content),) = debian_files(NAME, MEMBER, otherwise=otherwise) or [("", b"")]
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        raise DataError(
            f"{MEMBER} of Debian package '{NAME}' is damaged or has changed: checksum"
            f" {digest[:12]}.. of {len(content):,} bytes, expected {SHA256[:12]}..",
            f"Fetch it again, or {otherwise}.",
        )
    path.write_bytes(content)


def _families(path: Path, sequences: list[np.ndarray]) -> np.ndarray:
    """Families of the sequences, found once for each file and kept."""
    stat = path.stat()
    rule = (similarity.WORD, similarity.LEAST_WORDS, similarity.LEAST_SHARE, similarity.COMMON)
    key = f"{os.path.realpath(path)}\n{stat.st_size}\n{stat.st_mtime_ns}\n{rule}"
    kept = cache_folder("proteins") / f"families-{hashlib.sha256(key.encode()).hexdigest()[:24]}-2"

    def fill(beside: Path) -> None:
        np.save(beside / "families.npy", similarity.families(sequences))
        seal(beside)

    sealed = Sealed(make_folder(kept, fill))
    found = plain.parse_npy(sealed.read("families.npy"))
    if len(found) != len(sequences):
        raise sealed.damaged(f"{len(found)} families for {len(sequences)} sequences")
    return found
