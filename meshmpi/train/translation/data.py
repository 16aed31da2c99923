"""Translation data made ready once: pairs fetched or read, cleaned, divided, as tokens in files.

Knows nothing of models, meshes or batches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshmpi.errors import ConfigError, DataError, suggest
from meshmpi.train.cache import cache_folder, make_file, make_folder
from meshmpi.train.data import token_dtype
from meshmpi.train.settings import Settings
from meshmpi.train.translation import debian
from meshmpi.train.translation.packing import TokenPairs
from meshmpi.train.translation.pairs import (
    Cleaning,
    Pair,
    clean,
    divide,
    read_parallel,
    read_tsv,
    statistics,
)
from meshmpi.train.translation.vocabulary import END, EndedVocabulary
from meshmpi.train.vocabulary import check_vocabulary_name

_FORMAT = "1"  # part of every name in the cache: raise it when files or their making change


@dataclass(frozen=True)
class TranslationData:
    """Pairs in tokens.

    Attributes:
        vocabulary: Shared by source and target.
        train: Pairs to learn from.
        held_out: Pairs to test with, in an order in which any first part is a fair sample.
        sentences: The text of ``held_out``: (source, target).
        digest: Checksum of all tokens and the vocabulary.
        report: What was found and left out, for people.
    """

    vocabulary: EndedVocabulary
    train: TokenPairs
    held_out: TokenPairs
    sentences: list[tuple[str, str]]
    digest: str
    report: dict[str, Any]


def prepare(settings: Settings) -> TranslationData:
    """Fetches or reads pairs and writes their tokens, unless that has been done.

    All ranks may call this at once: one on each file system does the work, the others wait for it.

    Raises:
        DataError: The pairs cannot be had, or are none; see `pairs` and `debian`.
        ConfigError: The settings name both a collection and files, or neither.
    """
    s, data = settings.translation, settings.data
    check_vocabulary_name(data.vocabulary)
    rules = Cleaning(s.least_words, s.most_words, s.ratio)
    files = _files(settings)
    parts = [_FORMAT, data.vocabulary, repr(asdict(rules)), repr(data.held_out_fraction)]
    for path in files:
        parts += [str(path.resolve()), _digest(path)]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    name = "".join(c if c.isalnum() else "-" for c in f"{files[0].stem}-{data.vocabulary}")
    folder = cache_folder("tokens") / f"pairs-{name[:60]}-{key}"
    named = not s.source and s.pairs in debian.NAMES
    make_folder(folder, lambda beside: _write(beside, _read(files, named), rules, settings))
    return load(folder)


def _files(settings: Settings) -> list[Path]:
    """The file of pairs, or the two files of sources and targets; fetched where they are named."""
    s = settings.translation
    if (s.source or s.target) and not (s.source and s.target):
        raise ConfigError(
            f"translation.source is '{s.source}' and translation.target '{s.target}'.",
            "Give both files, whose lines belong together, or translation.pairs alone.",
        )
    if s.source:
        return [_existing(s.source), _existing(s.target)]
    if s.pairs not in debian.NAMES:
        if Path(s.pairs).expanduser().is_file():
            return [Path(s.pairs).expanduser()]
        near = suggest(s.pairs, debian.NAMES) if "/" not in s.pairs else ""
        known = "" if near.startswith("Known") else f" Known names: {', '.join(debian.NAMES)}."
        raise DataError(
            f"translation.pairs is '{s.pairs}': there is no such file or collection.",
            f"{near}{known} Or give the path of a file of lines source TAB target.".strip(),
        )
    path = cache_folder("pairs") / f"{s.pairs}-{_FORMAT}.jsonl"
    return [make_file(path, lambda beside: _fetch(s.pairs, beside))]


def _existing(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError(f"there is no file '{name}'.", "Give the path of a text file.")
    return path


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def _fetch(name: str, path: Path) -> None:
    lines = (json.dumps(list(pair), ensure_ascii=False) for pair in debian.debian_pairs(name))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _read(files: Sequence[Path], named: bool) -> list[Pair]:
    if len(files) == 2:
        return read_parallel(*files)
    if named:
        with open(files[0], encoding="utf-8") as file:
            return [Pair(*json.loads(line)) for line in file]
    return read_tsv(files[0])


def _write(folder: Path, pairs: list[Pair], rules: Cleaning, settings: Settings) -> None:
    kept, left_out = clean(pairs, rules)
    division = divide(kept, settings.data.held_out_fraction)
    lines = (text for p in division.train for text in (p.source, p.target))
    vocabulary = EndedVocabulary.build(settings.data.vocabulary, lines)
    state = json.dumps(vocabulary.state()) + "\n"
    (folder / "vocabulary.json").write_text(state, encoding="utf-8")
    digest, dtype = hashlib.sha256(state.encode()), token_dtype(vocabulary.size)
    for name, part in (("train", division.train), ("held_out", division.held_out)):
        for suffix, data in zip(("bin", "starts"), _tokens(vocabulary, part, dtype), strict=True):
            digest.update(data.tobytes())
            (folder / f"{name}.{suffix}").write_bytes(data.tobytes())
    sentences = [[p.source, p.target] for p in division.held_out]
    (folder / "sentences.json").write_text(json.dumps(sentences), encoding="utf-8")
    about = {
        "dtype": dtype.name, "digest": digest.hexdigest(),
        "report": {
            "found": len(pairs), "left out": left_out, "kept": dict(statistics(kept)),
            "training pairs": len(division.train), "held-out pairs": len(division.held_out),
            "not trained on, too like held-out ones": division.leaking,
        },
    }  # fmt: skip
    (folder / "about.json").write_text(json.dumps(about) + "\n", encoding="utf-8")


def _tokens(
    vocabulary: EndedVocabulary, pairs: Iterable[Pair], dtype: np.dtype[Any]
) -> tuple[np.ndarray, np.ndarray]:
    sequences = [[*vocabulary.encode(text), END] for p in pairs for text in (p.source, p.target)]
    starts = np.zeros(len(sequences) + 1, np.int64)
    np.cumsum([len(s) for s in sequences], out=starts[1:])
    return np.array([t for s in sequences for t in s], dtype), starts


def load(folder: Path) -> TranslationData:
    """Reads what `prepare` wrote.

    Raises:
        DataError: A file is missing or damaged.
    """
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        state = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
        sentences = json.loads((folder / "sentences.json").read_text(encoding="utf-8"))
        train, held_out = (_part(folder, n, about["dtype"]) for n in ("train", "held_out"))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"the token files in {folder} are damaged: {error}.", "Delete the folder; it is remade."
        ) from error
    return TranslationData(
        EndedVocabulary.restore(state), train, held_out, [(a, b) for a, b in sentences],
        about["digest"], about["report"],
    )  # fmt: skip


def _part(folder: Path, name: str, dtype: str) -> TokenPairs:
    starts = np.fromfile(folder / f"{name}.starts", np.int64)
    path = folder / f"{name}.bin"
    expected = int(starts[-1]) * np.dtype(dtype).itemsize
    if path.stat().st_size != expected:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, expected {expected}")
    return TokenPairs(np.memmap(path, dtype, mode="r"), starts)
