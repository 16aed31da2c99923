"""Sentence pairs: reads the user's files, cleans them, and splits them without leakage."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from meshmpi.errors import DataError
from meshmpi.files import plain

BLOCK_LINES = 50
"""Lines of a user's file that are held out together, because neighbours often belong to one text."""
_STRANGE_SHARE = 0.1
"""Largest share of lines in another script than the rest that a file may have; assumption."""


class Pair(NamedTuple):
    """A sentence, its translation, and the document that both come from."""

    document: str
    source: str
    target: str


# ---- files of the user -----------------------------------------------------------------------


def read_tsv(path: str | Path) -> list[Pair]:
    """Pairs from lines ``source TAB target``; empty lines are skipped.  A DataError names file and line."""
    found = []
    for number, line in enumerate(file_lines(Path(path)), start=1):
        if not line.strip():
            continue
        sides = line.split("\t")
        if len(sides) != 2:
            raise DataError(
                f"{path}:{number} has {len(sides) - 1} tabs: {_short(line)}.", "Write source TAB target on each line."
            )
        found.append(_pair(path, path, number, *sides))
    return _checked([path], found)


def read_parallel(source: str | Path, target: str | Path) -> list[Pair]:
    """Pairs from two files of which line k of one translates line k of the other.

    Lines that are empty in both are skipped; one that is empty in one of them is a DataError, which names it.
    """
    sources, targets = file_lines(Path(source)), file_lines(Path(target))
    if len(sources) != len(targets):
        raise DataError(
            f"{source} has {len(sources):,} lines and {target} has {len(targets):,}.",
            "Line k of one file must be the translation of line k of the other.",
        )
    pairs = [
        _pair(source, target, k, a, b)
        for k, (a, b) in enumerate(zip(sources, targets, strict=True), start=1)
        if a.strip() or b.strip()
    ]
    return _checked([source, target], pairs)


def _pair(source: str | Path, target: str | Path, number: int, a: str, b: str) -> Pair:
    a, b = " ".join(a.split()), " ".join(b.split())
    for name, side, other in ((source, a, b), (target, b, a)):
        if not side:
            what = "the source" if name == source and side is a else "the target"
            raise DataError(
                f"{name}:{number}: {what} is empty, the other side is {_short(other)}.",
                "Fill it in, or delete the line on both sides.",
            )
    return Pair(f"{Path(source).name}/{(number - 1) // BLOCK_LINES}", a, b)


def file_lines(path: Path) -> list[str]:
    """The lines of a file; see `text_lines`."""
    path = path.expanduser()
    try:
        data = plain.contents(path, None)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Give the path of a text file.") from error
    return text_lines(str(path), data)


def text_lines(name: str, data: bytes) -> list[str]:
    """The lines of the content of a file; DataError, which names the line, where it is not UTF-8."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{name}:{number} is not UTF-8: byte {data[error.start]:#04x}.", "Convert the file, as with iconv -t UTF-8."
        ) from error
    # Only line ends divide lines: str.splitlines would also split at form feeds and U+2028.
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def _checked(paths: Sequence[str | Path], pairs: list[Pair]) -> list[Pair]:
    """The pairs, checked: there are some, in two languages, each side in one script."""
    names = " and ".join(map(str, paths))
    if not pairs:
        raise DataError(f"{names}: there is no pair of sentences.", "Give files with text in them.")
    same = sum(p.source == p.target for p in pairs)
    if same * 2 > len(pairs):
        raise DataError(
            f"{names}: source and target are equal in {same:,} of {len(pairs):,} lines.",
            "Give the translation as target.",
        )
    for what, texts in (("source", [p.source for p in pairs]), ("target", [p.target for p in pairs])):
        scripts = [main_script(t) for t in texts]
        if not any(scripts):
            raise DataError(f"{names}: no {what} has a letter in it.", "Are these the right files?")
        usual, _ = Counter(filter(None, scripts)).most_common(1)[0]
        strange = [text for text, s in zip(texts, scripts, strict=True) if s not in ("", usual)]
        if len(strange) > _STRANGE_SHARE * len(texts):
            raise DataError(
                f"{names}: of {len(texts):,} {what} sentences {len(strange):,} are not written in"
                f" {usual.lower()} letters as the others are; the first is {_short(strange[0])}.",
                "Two alphabets on one side mean that files or columns were mixed up.",
            )
    return pairs


@lru_cache(maxsize=1 << 16)
def _script(character: str) -> str:
    return unicodedata.name(character, "").split(" ")[0] if character.isalpha() else ""


def main_script(text: str) -> str:
    """The script of most letters of a text, by Unicode's name ("LATIN"); empty without letters."""
    counts = Counter(s for s in map(_script, text) if s)
    return counts.most_common(1)[0][0] if counts else ""


# ---- cleaning and dividing -------------------------------------------------------------------


@dataclass(frozen=True)
class Cleaning:
    """Which pairs are kept."""

    least_words: int = 2  # fewest words of each side
    most_words: int = 60  # most words of each side
    ratio: float = 2.0  # most words of one side for each word of the other; two words are free


_FREE_WORDS = 2  # short sentences differ by a word or two without being wrong; assumption


def clean(pairs: Iterable[Pair], rules: Cleaning) -> tuple[list[Pair], dict[str, int]]:
    """The pairs that are kept, and how many were left out for each reason.

    Reasons in order of their test: repeated (both sides equal an earlier pair's), untranslated
    (both sides equal each other), length, ratio, letters (a side without any).
    """
    reasons = ("repeated", "untranslated", "length", "ratio", "letters")
    counts: dict[str, int] = dict.fromkeys(reasons, 0)
    seen: dict[tuple[str, str], None] = {}
    kept: list[Pair] = []
    for pair in pairs:
        both = (pair.source, pair.target)
        reason = "repeated" if both in seen else _objection(*both, rules)
        seen[both] = None
        if reason:
            counts[reason] += 1
        else:
            kept.append(pair)
    return kept, counts


def _objection(source: str, target: str, rules: Cleaning) -> str:
    if source == target:
        return "untranslated"
    a, b = sorted((len(source.split()), len(target.split())))
    if a < rules.least_words or b > rules.most_words:
        return "length"
    if b > rules.ratio * a + _FREE_WORDS:
        return "ratio"
    return "" if main_script(source) and main_script(target) else "letters"


class Division(NamedTuple):
    """Pairs to learn from, and pairs to test with."""

    train: list[Pair]  # in the order of the documents
    held_out: list[Pair]  # in an order of their own, in which any first part is a fair sample
    leaking: int  # pairs left out of training because a side is almost that of a held-out pair


def divide(pairs: Sequence[Pair], fraction: float, seed: str = "held out") -> Division:
    """Holds out whole documents, in the order of a checksum of their names.

    A pair of another document is left out of training where its source or target is that of a
    held-out pair but for case, digits and punctuation.

    Args:
        pairs: Pairs of all documents.
        fraction: Share of the pairs, as nearly as whole documents allow; at least one document.
        seed: Changes the choice.
    """
    counts = Counter(p.document for p in pairs)
    chosen: dict[str, int] = {}
    for document in sorted(counts, key=lambda d: _number(seed, d)):
        if not chosen or sum(chosen.values()) + counts[document] / 2 < fraction * len(pairs):
            chosen[document] = counts[document]
    held = [p for p in pairs if p.document in chosen]
    held.sort(key=lambda p: _number(seed, f"{p.document}\n{p.source}\n{p.target}"))
    sources, targets = {_bare(p.source): None for p in held}, {_bare(p.target): None for p in held}
    rest = [p for p in pairs if p.document not in chosen]
    train = [p for p in rest if _bare(p.source) not in sources and _bare(p.target) not in targets]
    if not train or not held:
        raise DataError(
            f"of {len(pairs):,} pairs in {len(counts):,} documents, holding out {fraction:g} of"
            f" them leaves {len(train):,} to train with and {len(held):,} held out.",
            "Give more text or another data.held_out_fraction.",
        )
    return Division(train, held, len(rest) - len(train))


def _number(seed: str, text: str) -> float:
    digest = hashlib.sha256(f"{seed}\n{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _bare(text: str) -> str:
    """A text without case, punctuation and the values of numbers."""
    return re.sub(r"\W+", " ", re.sub(r"\d+", "0", text.casefold())).strip()


def statistics(pairs: Sequence[Pair]) -> Mapping[str, float]:
    """Pairs, documents, and the median number of words of each side."""

    def median(texts: Iterable[str]) -> float:
        counts = sorted(len(t.split()) for t in texts)
        return float(counts[len(counts) // 2]) if counts else 0.0

    return {
        "pairs": len(pairs),
        "documents": len(dict.fromkeys(p.document for p in pairs)),
        "source words (median)": median(p.source for p in pairs),
        "target words (median)": median(p.target for p in pairs),
    }
