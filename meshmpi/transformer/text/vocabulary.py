"""The table of vocabulary kinds; making, finding, saving and restoring vocabularies.

A new kind is a class in this room and a row in `KINDS`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshmpi.checkpoint import read_manifest
from meshmpi.checkpoint.tools import checkpoints_of
from meshmpi.errors import DataError, suggest
from meshmpi.files import plain
from meshmpi.transformer.text.base import Vocabulary, as_text
from meshmpi.transformer.text.characters import (
    SPECIALS,
    ByteVocabulary,
    CharacterVocabulary,
    EndedVocabulary,
    LetterVocabulary,
)
from meshmpi.transformer.text.hugging_face import HuggingFaceVocabulary, byte_pairs, word_pieces
from meshmpi.transformer.text.sentence_pieces import SentencePieceVocabulary

TOKENIZER = "tokenizer:"
"""Begins the name of a vocabulary that is a tokenizer on disk, or that of a run."""
NAMES = ("bytes", "characters", "bpe:<size>", f"{TOKENIZER}<path>")
FILES = ("tokenizer.json", "spiece.model", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files in which the folder of a checkpoint may have a tokenizer, the best first."""

KINDS: dict[str, Callable[[dict[str, Any]], Vocabulary]] = {
    "bytes": lambda state: ByteVocabulary(),
    "characters": lambda state: CharacterVocabulary(state["characters"]),
    "letters": lambda state: LetterVocabulary(state["tokens"], state["name"]),
    "bpe": SentencePieceVocabulary.restore,
    "spiece.model": SentencePieceVocabulary.restore,
    "tokenizer.json": lambda state: HuggingFaceVocabulary(state["text"], state["name"]),
    "ended": lambda state: EndedVocabulary(restore_vocabulary(state["inner"])),
}
"""The kind in a `Vocabulary.state` -> what restores the vocabulary."""


def restore_vocabulary(state: dict[str, Any]) -> Vocabulary:
    """The vocabulary of a `Vocabulary.state`; DataError where its kind is unknown or its package missing."""
    kind = state.get("kind")
    if kind not in KINDS:
        raise DataError(
            f"a saved vocabulary is of unknown kind '{kind}'.",
            f"Known kinds: {', '.join(KINDS)}. Use the version of meshmpi that saved it.",
        )
    return KINDS[kind](state)


def save_vocabulary(vocabulary: Vocabulary, path: Path) -> None:
    """Writes a vocabulary to a JSON file."""
    path.write_text(json.dumps(vocabulary.state(), ensure_ascii=True) + "\n", encoding="utf-8")


def load_vocabulary(path: Path) -> Vocabulary:
    """Reads what `save_vocabulary` wrote; DataError where it is missing or damaged."""
    try:
        return restore_vocabulary(plain.json_table(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a vocabulary: {error}.", "Delete it; it is remade.") from error


def learnt_size(name: str) -> int:
    """The size of a vocabulary ``bpe:<size>``; 0 for every other name."""
    size = name.removeprefix("bpe:")
    return int(size) if size != name and size.isdigit() else 0


def check_vocabulary_name(name: str) -> None:
    """Raises DataError unless ``name`` names a vocabulary; reads no text."""
    if name.startswith("bpe:") and not learnt_size(name):
        raise DataError(f"vocabulary '{name}' has no size.", "Write a number: 'bpe:8192'.")
    on_disk = name.startswith(TOKENIZER) and name != TOKENIZER
    if not on_disk and not learnt_size(name) and name not in NAMES[:2]:
        near = suggest(name, NAMES)
        known = "" if near.startswith("Known") else f" Known names: {', '.join(NAMES)}."
        raise DataError(f"there is no vocabulary '{name}'.", near + known)


def build_vocabulary(name: str, train: Iterable[bytes], held_out: Iterable[bytes]) -> Vocabulary:
    """Makes a vocabulary for a text.

    Args:
        name: "bytes"; "characters" (those of both parts of the text); "bpe:<size>", learnt from
            the training part; or "tokenizer:<path>", see `vocabulary_at`.
        train: The training text, in pieces that end with a line.
        held_out: The held-out text, likewise.

    Raises:
        DataError: The name is unknown, the text unfit, or the extra `text` is not installed.
    """
    check_vocabulary_name(name)
    if name == "bytes":
        return ByteVocabulary()
    if name == "characters":
        return CharacterVocabulary({c: None for part in (train, held_out) for piece in part for c in as_text(piece)})
    if name.startswith(TOKENIZER):
        return vocabulary_at(name.removeprefix(TOKENIZER))
    lines = (line for piece in train for line in as_text(piece).split("\n"))
    return SentencePieceVocabulary.train(lines, learnt_size(name))


def build_ended(name: str, lines: Iterable[str]) -> EndedVocabulary:
    """One vocabulary for sentences, sources and targets alike; the size of "bpe:<size>" counts the special tokens."""
    if learnt_size(name) > SPECIALS:
        name = f"bpe:{learnt_size(name) - SPECIALS}"
        lines = (f" {line}" for line in lines)
    return EndedVocabulary(build_vocabulary(name, [f"{line}\n".encode() for line in lines], []))


def vocabulary_key(name: str) -> str:
    """Identifies a vocabulary: its name and, for a tokenizer on disk, its content."""
    if not name.startswith(TOKENIZER):
        return name
    content = json.dumps(vocabulary_at(name.removeprefix(TOKENIZER)).state(), sort_keys=True)
    return f"{name}\n{hashlib.sha256(content.encode()).hexdigest()}"


# ---- on disk ---------------------------------------------------------------------------------


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run, or of one of its checkpoints."""
    return (path / "manifest.json").is_file() or (path / "checkpoints").is_dir()


def vocabulary_at(path: str | os.PathLike[str]) -> Vocabulary:
    """The vocabulary of a run, or the tokenizer of a checkpoint, or in a file.

    Raises:
        DataError: There is none, or a package that reads it is not installed.
        CheckpointError: The run has no checkpoint.
    """
    path = Path(path)
    if is_run(path):
        return restore_vocabulary(read_manifest(checkpoints_of(path)[0]).about["vocabulary"])
    folder = path if path.is_dir() else path.parent
    config, model, special = folder / "config.json", "", {}
    if config.is_file():
        try:
            values = plain.json_table(config)
        except (OSError, ValueError) as error:
            raise DataError(f"{config} cannot be read: {error}.", "Download it again.") from error
        model = str(values.get("model_type"))
        special = {purpose: _token_id(values.get(f"{purpose}_token_id"), config) for purpose in ("bos", "eos")}
    weights = path.name.endswith((".safetensors", ".index.json"))
    return open_tokenizer(folder if weights else path, model, special)


def _token_id(value: object, file: Path) -> int:
    """A token id in a config.json: the first where there are several, 1 where there is none."""
    found = value[0] if isinstance(value, list) and value else value
    if found in (None, []):
        return 1
    if type(found) is not int or not -1 <= found < 1 << 31:
        raise DataError(f"a token id in {file} is {str(found)[:40]!r}.", "Give a number.")
    return found


def open_tokenizer(
    path: str | os.PathLike[str], model: str = "", special: Mapping[str, int] = MappingProxyType({})
) -> Vocabulary:
    """The tokenizer in a folder, or in a file.

    Args:
        path: A folder of a checkpoint, or one of its files.
        model: The ``model_type`` of the checkpoint, which says what a ``vocab.txt`` holds.
        special: Token ids by purpose, which SentencePiece models do not contain.

    Raises:
        DataError: There is none, or a package that reads it is not installed.
    """
    path = Path(path)
    if path.is_dir():
        found = next((path / name for name in FILES if (path / name).is_file()), None)
        if found is None:
            raise DataError(
                f"{path} has no tokenizer ({', '.join(FILES)}).",
                "Give one with --tokenizer, or numbers with --token-ids.",
            )
        path = found
    try:
        if path.suffix == ".model":
            before = [special["bos"]] if model == "llama" and "bos" in special else []
            after = [special["eos"]] if model in ("t5", "switch_transformers") and "eos" in special else []
            return SentencePieceVocabulary(plain.contents(path), str(path), before, after)
        if path.name == "vocab.txt":
            return LetterVocabulary(plain.text(path).split(), str(path)) if model == "esm" else word_pieces(path)
        if path.name == "vocab.json":
            return byte_pairs(path)
        return HuggingFaceVocabulary(plain.text(path), str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"the tokenizer {path} cannot be read: {error}.", "Download it again.") from error
