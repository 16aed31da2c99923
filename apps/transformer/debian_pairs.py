"""English-German and English-French pairs out of Debian packages.

Two sources: LibreOffice's help, whose pages have the same ids in every language; and descriptions
of packages, which apt offers translated, joined on the checksum of the English text.  Both are
fetched by apt-get, which checks their signatures; nothing is installed and no list of the system is
touched.  Knows nothing of cleaning.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path

from apps.fetching.debian import debian_files
from meshmpi.errors import DataError
from meshmpi.transformer.translation.pairs import Pair

LANGUAGES = ("de", "fr")
"""Languages that English is paired with."""
_OTHERWISE = "give files of your own: translation.source and translation.target"
_HELP_PACKAGES = {"en": "libreoffice-help-en-us", **{n: f"libreoffice-help-{n}" for n in LANGUAGES}}


def debian_pairs(name: str) -> list[Pair]:
    """All pairs of a named collection, not yet cleaned.

    Args:
        name: One of `COLLECTIONS`, as ``debian-en-de``: from English to German.

    Raises:
        DataError: apt-get is missing, fails, or its files have changed their form.
    """
    _, source, target = name.split("-")
    pairs = [*_help_pairs(source, target), *_description_pairs(source, target)]
    if not pairs:
        raise DataError(f"'{name}' came out empty.", f"The packages may have changed; {_OTHERWISE}.")
    return pairs


# ---- sentences -------------------------------------------------------------------------------

_END = re.compile(r"(?<=[.!?])\s+(?=[A-ZÄÖÜÀÂÇÉÈÊÎÔ«„\"(])")


def sentence_pairs(document: str, source: str, target: str) -> Iterator[Pair]:
    """The sentences of two texts, pairwise where both have as many, else the texts as they are."""
    a, b = (_END.split(" ".join(text.split())) for text in (source, target))
    if len(a) != len(b):
        a, b = [" ".join(a)], [" ".join(b)]
    for x, y in zip(a, b, strict=True):
        if x and y:
            yield Pair(document, x, y)


# ---- LibreOffice's help ----------------------------------------------------------------------


class _Paragraphs(HTMLParser):
    """Texts of the paragraphs and headings of a help page by their ids; code is left out."""

    _TAGS = ("p", "h1", "h2", "h3", "h4", "h5", "h6")

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self._id = self._tag = ""
        self._text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        about = dict(attrs)
        identity = about.get("id") or ""
        if tag in self._TAGS and identity.startswith(("par_", "hd_")):
            self._keep()
            if "code" not in (about.get("class") or ""):
                self._id, self._tag = identity, tag
        elif tag == "br" and self._id:
            self._text.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._tag:
            self._keep()

    def handle_data(self, data: str) -> None:
        if self._id:
            self._text.append(data)

    def _keep(self) -> None:
        text = " ".join("".join(self._text).split())
        if self._id and text:
            self.found.setdefault(self._id, text)
        self._id, self._tag, self._text = "", "", []


def paragraphs(page: bytes) -> dict[str, str]:
    """Id -> text of the paragraphs and headings of a page of LibreOffice's help."""
    parser = _Paragraphs()
    parser.feed(page.decode(errors="replace"))
    parser.close()
    return parser.found


def _help_pairs(source: str, target: str) -> Iterator[Pair]:
    pages = [_help_pages(language) for language in (source, target)]
    for name in sorted(pages[0].keys() & pages[1].keys()):
        a, b = (paragraphs(p[name]) for p in pages)
        for identity in a:
            if identity in b:
                yield from sentence_pairs(f"help/{name}", a[identity], b[identity])


def _help_pages(language: str) -> Mapping[str, bytes]:
    files = debian_files(_HELP_PACKAGES[language], r"/text/.*\.html$", "", _OTHERWISE)
    return {name.partition("/text/")[2]: data for name, data in files}


# ---- descriptions of packages ----------------------------------------------------------------


def _description_pairs(source: str, target: str) -> Iterator[Pair]:
    lists = _translation_lists((source, target))
    a, b = (descriptions(lists[language]) for language in (source, target))
    for checksum, (package, text) in a.items():
        if checksum in b:
            document = f"description/{family(package)}"
            yield from description_sentences(document, text, b[checksum][1])


def _translation_lists(languages: Sequence[str]) -> dict[str, str]:
    """The lists of translated descriptions by language, fetched into a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="meshmpi-") as folder:
        Path(folder, "lists", "partial").mkdir(parents=True)
        Path(folder, "cache", "archives", "partial").mkdir(parents=True)
        options = {
            "Dir::State": folder,
            "Dir::State::status": "/dev/null",
            "Dir::Cache": f"{folder}/cache",
            "APT::Sandbox::User": "",
            "Acquire::Retries": "2",
            "Acquire::Languages": ",".join(languages),
            "Acquire::GzipIndexes": "false",
        }
        _update(options)
        found = {n: sorted(Path(folder, "lists").glob(f"*_Translation-{n}")) for n in languages}
        missing = [n for n in languages if not found[n]]
        if missing:
            raise DataError(
                f"apt-get brought no list of descriptions in {' and '.join(missing)}.",
                f"Its sources must name a Debian mirror; otherwise {_OTHERWISE}.",
            )
        return {
            n: "\n".join(p.read_text(encoding="utf-8", errors="replace") for p in paths) for n, paths in found.items()
        }


def _update(options: Mapping[str, str]) -> None:
    command = ["apt-get", "update", "--quiet"]
    for key, value in options.items():
        command += ["-o", f"{key}={value}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    except FileNotFoundError as error:
        raise DataError(
            "translated descriptions are fetched with apt-get, which is not installed.",
            f"Run this on Debian, or {_OTHERWISE}.",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise DataError("apt-get update took more than 600 s.", "Is there a network?") from error
    if done.returncode:
        last = " / ".join(done.stderr.strip().splitlines()[-3:])
        raise DataError(
            f"apt-get update ended with status {done.returncode}: {last}",
            f"Is there a network? Otherwise {_OTHERWISE}.",
        )


def descriptions(text: str) -> dict[str, tuple[str, str]]:
    """Checksum -> (package, description) of a list of apt, whose records are divided by blanks."""
    found: dict[str, tuple[str, str]] = {}
    for record in text.split("\n\n"):
        match = re.match(r"Package: (\S+)\nDescription-md5: (\w+)\nDescription-\w+: (.*)", record, re.DOTALL)
        if match:
            found.setdefault(match[2], (match[1], match[3]))
    return found


def description_sentences(document: str, source: str, target: str) -> Iterator[Pair]:
    """Sentences of two descriptions: titles, then paragraph by paragraph where these agree."""
    titles, bodies = zip(*(text.partition("\n")[::2] for text in (source, target)), strict=True)
    yield Pair(document, *(" ".join(t.split()) for t in titles))
    a, b = (_blocks(body) for body in bodies)
    if len(a) == len(b):
        for x, y in zip(a, b, strict=True):
            yield from sentence_pairs(document, x, y)


def _blocks(body: str) -> list[str]:
    """Paragraphs and items of lists: a line of a dot divides, and so does an item's sign."""
    blocks: list[str] = [""]
    for line in body.split("\n"):
        item = re.match(r"\s+[-*+o]\s+(?=\S)", line)
        if line.strip() == "." or item:
            blocks.append("")
        blocks[-1] += f" {line[item.end() if item else 0 :] if line.strip() != '.' else ''}"
    return [" ".join(b.split()) for b in blocks if b.strip()]


_GENERAL = (
    "fonts",
    "gir1.2",
    "golang",
    "haskell",
    "kde",
    "gnome",
    "node",
    "ocaml",
    "perl",
    "php",
    "python",
    "r",
    "ruby",
    "rust",
    "ghc",
    "texlive",
    "xfce",
    "hunspell",
    "aspell",
    "task",
)


def family(package: str) -> str:
    """Packages of one origin, whose descriptions repeat each other: ``libfoo2-dev`` -> ``foo``.

    The part of the name before the first hyphen, without ``lib`` and numbers at the end; two parts
    where the first says the language or kind only.
    """
    parts = package.split("-")
    first = parts[0].removeprefix("lib").rstrip("0123456789.")
    if first in _GENERAL and len(parts) > 1:
        return f"{first}-{parts[1]}"
    return first or package
