"""Prepares translation data once: reads, cleans and splits pairs, and writes their tokens to files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshmpi.errors import ConfigError, DataError, suggest
from meshmpi.files.cache import cache_folder, make_folder
from meshmpi.transformer.text.base import Vocabulary
from meshmpi.transformer.text.characters import END
from meshmpi.transformer.text.vocabulary import build_ended, check_vocabulary_name, restore_vocabulary
from meshmpi.transformer.training.corpora import fetched
from meshmpi.transformer.training.data import token_dtype
from meshmpi.transformer.training.sealed import Sealed, seal
from meshmpi.transformer.training.settings import Settings
from meshmpi.transformer.translation.packing import TokenPairs
from meshmpi.transformer.translation.pairs import Cleaning, Pair, clean, divide, read_parallel, read_tsv, statistics

_FORMAT = "2"  # part of every name in the cache: raise it when files or their making change
_PAIRS = "pairs.jsonl"
COLLECTIONS = ("debian-en-de", "debian-de-en", "debian-en-fr", "debian-fr-en")
"""Named collections of pairs, ``debian-<from>-<to>``."""


@dataclass(frozen=True)
class TranslationData:
    """Pairs in tokens."""

    vocabulary: Vocabulary  # shared by source and target
    train: TokenPairs  # pairs to learn from
    held_out: TokenPairs  # pairs to test with, in an order in which any first part is a fair sample
    sentences: list[tuple[str, str]]  # the text of ``held_out``: (source, target)
    digest: str  # checksum of all tokens and the vocabulary
    report: dict[str, Any]  # what was found and left out, to be printed


def prepare(settings: Settings) -> TranslationData:
    """Reads pairs and writes their tokens, unless that has been done.

    All ranks may call this at once: one on each file system does the work, the others wait for it.

    Raises:
        DataError: The pairs cannot be had, or are none; see `pairs`.
        ConfigError: The settings name both a collection and files, or neither.
    """
    s, data = settings.translation, settings.data
    check_vocabulary_name(data.vocabulary)
    rules = Cleaning(s.least_words, s.most_words, s.ratio)
    files = _files(settings)
    parts = [_FORMAT, data.vocabulary, repr(asdict(rules)), repr(data.held_out_fraction)]
    for path in files:
        parts += [str(path.resolve()), hashlib.sha256(path.read_bytes()).hexdigest()]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    name = "".join(c if c.isalnum() else "-" for c in f"{files[0].stem}-{data.vocabulary}")
    folder = cache_folder("tokens") / f"pairs-{name[:60]}-{key}"
    named = not s.source and s.pairs in COLLECTIONS
    make_folder(folder, lambda draft: _write(draft, _read(files, named), rules, settings))
    return _load(folder)


def _files(settings: Settings) -> list[Path]:
    """The file of pairs, or the two files of sources and targets."""
    s = settings.translation
    if (s.source or s.target) and not (s.source and s.target):
        raise ConfigError(
            f"translation.source is '{s.source}' and translation.target '{s.target}'.",
            "Give both files, whose lines belong together, or translation.pairs alone.",
        )
    if s.source:
        return [_existing(s.source), _existing(s.target)]
    if s.pairs not in COLLECTIONS:
        if Path(s.pairs).expanduser().is_file():
            return [Path(s.pairs).expanduser()]
        near = suggest(s.pairs, COLLECTIONS) if "/" not in s.pairs else ""
        known = "" if near.startswith("Known") else f" Known names: {', '.join(COLLECTIONS)}."
        raise DataError(
            f"translation.pairs is '{s.pairs}': there is no such file or collection.",
            f"{near}{known} Or give the path of a file of lines source TAB target.".strip(),
        )
    return [collection(s.pairs)]


def collection(name: str) -> Path:
    """The file of a named collection in the cache; its fetcher makes it where it is missing."""

    def fetch(draft: Path) -> None:
        pairs = fetched(name, "give files of your own: translation.source and translation.target")
        lines = (json.dumps(list(pair), ensure_ascii=False) for pair in pairs)
        (draft / _PAIRS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        seal(draft)

    folder = cache_folder("pairs") / f"{name}-{_FORMAT}"
    return make_folder(folder, fetch) / _PAIRS


def _existing(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError(f"there is no file '{name}'.", "Give the path of a text file.")
    return path


def _read(files: Sequence[Path], named: bool) -> list[Pair]:
    if len(files) == 2:
        return read_parallel(*files)
    if named:
        lines = Sealed(files[0].parent).read(_PAIRS).decode("utf-8").split("\n")
        return [Pair(*json.loads(line)) for line in lines if line]
    return read_tsv(files[0])


def _write(folder: Path, pairs: list[Pair], rules: Cleaning, settings: Settings) -> None:
    kept, left_out = clean(pairs, rules)
    division = divide(kept, settings.data.held_out_fraction)
    lines = (text for p in division.train for text in (p.source, p.target))
    vocabulary = build_ended(settings.data.vocabulary, lines)
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
        "dtype": dtype.name,
        "digest": digest.hexdigest(),
        "report": {
            "found": len(pairs),
            "left out": left_out,
            "kept": dict(statistics(kept)),
            "training pairs": len(division.train),
            "held-out pairs": len(division.held_out),
            "not trained on, too like held-out ones": division.leaking,
        },
    }
    (folder / "about.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
    seal(folder)


def _tokens(vocabulary: Vocabulary, pairs: Iterable[Pair], dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
    sequences = [[*vocabulary.encode(text), END] for p in pairs for text in (p.source, p.target)]
    starts = np.zeros(len(sequences) + 1, np.int64)
    np.cumsum([len(s) for s in sequences], out=starts[1:])
    return np.array([t for s in sequences for t in s], dtype), starts


def _load(folder: Path) -> TranslationData:
    """Reads what `prepare` wrote; DataError where a file is missing or damaged."""
    sealed = Sealed(folder)
    about, state, sentences = (json.loads(sealed.read(f"{name}.json")) for name in ("about", "vocabulary", "sentences"))
    train, held_out = (
        TokenPairs(sealed.array(f"{name}.bin", about["dtype"]), sealed.array(f"{name}.starts", "int64")[:])
        for name in ("train", "held_out")
    )
    return TranslationData(
        restore_vocabulary(state), train, held_out, [(a, b) for a, b in sentences], about["digest"], about["report"]
    )
