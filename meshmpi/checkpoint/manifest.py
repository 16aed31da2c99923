"""What a checkpoint says of itself, and where checkpoints are.

Knows no arrays and no stores but their types: what is read here is small.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshmpi.errors import CheckpointError
from meshmpi.runtime.variables import VariableStore

FORMAT = 1
"""Raised when the meaning of a manifest changes."""
_NAME = re.compile(r"^step-(\d{8,})$")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        folder: Where it is.
        step: Training steps done.
        about: What the writer told: settings, mesh, layout, data and so on.
        tensors: Name -> global shape, data type and blocks with their files and checksums.
    """

    folder: Path
    step: int
    about: dict[str, Any]
    tensors: dict[str, dict[str, Any]]


def digest(text: str) -> str:
    """Vouches for the text of a manifest."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()



def find(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in a folder, newest first."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = [(int(m[1]), p) for p in folder.iterdir() if (m := _NAME.match(p.name))]
    return [p for _, p in sorted(found, reverse=True)]


def read_manifest(checkpoint: str | os.PathLike[str]) -> Manifest:
    """Reads and verifies the manifest of a checkpoint.

    Raises:
        CheckpointError: It is missing, damaged, or of another version.
    """
    folder = Path(checkpoint)
    path = folder / "manifest.json"
    try:
        expected, text = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
        if (found := digest(text)) != expected:
            raise ValueError(f"checksum {found[:8]}.. expected {expected[:8]}..")
        content = json.loads(text)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"there is no checkpoint in {folder}: manifest.json is missing.",
            "Give a folder such as runs/name/checkpoints/step-00001200.",
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the manifest of {folder} is damaged ({error}).", f"Remove {folder}."
        ) from error
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"the checkpoint {folder} has format {content.get('format')}, this version of meshmpi"
            f" reads {FORMAT}.", "Use the version that wrote it.",
        )  # fmt: skip
    return Manifest(folder, content["step"], content["about"], content["tensors"])


class ForeignCheckpointError(CheckpointError):
    """A checkpoint of another model: its variables differ."""


def check_same_model(manifest: Manifest, store: VariableStore, extra: bool = False) -> None:
    """Raises ForeignCheckpointError unless names, shapes and types are those of ``store``."""
    differences = []
    for name, variable in store.types.items():
        there, t = manifest.tensors.get(name), variable.type
        if there is None:
            differences.append(f"it has no '{name}'")
        elif (there["shape"], there["dtype"]) != (list(t.shape.sizes), t.dtype):
            differences.append(
                f"'{name}' is {there['dtype']}{there['shape']} there and"
                f" {t.dtype}{list(t.shape.sizes)} here"
            )
    if not extra:
        differences += [
            f"it has '{name}' in addition" for name in manifest.tensors if name not in store.types
        ]
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise ForeignCheckpointError(
            f"the checkpoint {manifest.folder} belongs to another model:"
            f" {'; '.join(differences[:3])}{more}.",
            "Use the configuration that it was made with, or start anew in another folder.",
        )
