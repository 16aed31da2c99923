"""Archives of packages: fetched by their ordinary clients, compared with a checksum, read in memory.

Nothing that an archive holds is run or written to disk.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import re
import subprocess
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Sequence
from pathlib import Path

from meshmpi.errors import DataError
from meshmpi.files import plain

MOST_ARCHIVE_BYTES, MOST_UNPACKED_BYTES = 1 << 30, 4 << 30
"""Largest archive that is fetched, and most that one may hold; those named here have 5 to 40 MB."""


def downloaded(what: str, address: str, sha256: str) -> bytes:
    """The file at an address, by Python's own client: nothing that it holds is run.

    Args:
        what: What is fetched, for messages.
        address: Its URL.

    Raises:
        DataError: It cannot be fetched, or is another than was expected.
    """
    try:
        with urllib.request.urlopen(address, timeout=60) as reply:
            data = reply.read(MOST_ARCHIVE_BYTES)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{what} could not be fetched from {address}: {error}.",
            "Is there a network? Otherwise give the path of a text file.",
        ) from error
    return expected(what, data, sha256)


def npm_archive(what: str, package: str, sha256: str, otherwise: str = "give the path of a text file") -> bytes:
    """The archive of a package of npm; none of its scripts is run.  Arguments and errors: below."""
    command = ["npm", "pack", "--silent", "--ignore-scripts", package]
    return package_archive(what, command, "npm", sha256, otherwise)


def expected(what: str, archive: bytes, sha256: str) -> bytes:
    """``archive``, if its checksum is ``sha256`` (or that is not known: empty)."""
    digest = hashlib.sha256(archive).hexdigest()
    if sha256 and digest != sha256:
        raise DataError(
            f"the archive of {what} is damaged or has changed: checksum {digest[:12]}.. of"
            f" {len(archive):,} bytes, expected {sha256[:12]}..",
            "Fetch it again, or give the path of a file instead.",
        )
    return archive


def package_archive(
    what: str, command: Sequence[str], client: str, sha256: str, otherwise: str = "give the path of a text file"
) -> bytes:
    """Runs a package client in an empty folder; returns the one archive it leaves there.

    Args:
        what: What is fetched, for messages.
        command: Runs the client, which leaves an archive in the working folder.
        client: Name of the client, for messages.
        sha256: Checksum of the archive; empty: not checked.
        otherwise: What to do where it cannot be fetched.

    Raises:
        DataError: The client is missing, fails, leaves no archive, or another than was expected.
    """
    with tempfile.TemporaryDirectory(prefix="meshmpi-") as folder:
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
        except FileNotFoundError as error:
            raise DataError(
                f"{what} is fetched with {client}, which is not installed.",
                f"Install it (Debian: apt-get install {client}), or {otherwise}.",
            ) from error
        except subprocess.TimeoutExpired as error:
            raise DataError(f"{what}: {client} took more than 600 s.", "Is there a network?") from error
        archives = sorted(Path(folder).iterdir())
        if done.returncode or len(archives) != 1:
            last = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
            raise DataError(
                f"{what} could not be fetched: {client} ended with status {done.returncode}: {last}",
                f"Is there a network? Otherwise {otherwise}.",
            )
        try:
            archive = plain.contents(archives[0], MOST_ARCHIVE_BYTES, links=False)
        except OSError as error:
            raise DataError(f"{what}: {client} left {error.strerror}.", "Fetch it again.") from error
        return expected(what, archive, sha256)


def archive_members(archive: bytes, pattern: str) -> list[tuple[str, bytes]]:
    """Files of a compressed tar archive whose names match, sorted by name.

    They are read into memory: no name in the archive is a place on disk, links are left out.

    Raises:
        DataError: It is damaged, or holds more than MOST_UNPACKED_BYTES.
    """
    found: list[tuple[str, bytes]] = []
    left = MOST_UNPACKED_BYTES
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:*") as tar:
            for member in tar:  # one after the other: a bomb ends here, not in a list of names
                left -= member.size + tarfile.BLOCKSIZE
                if left < 0:
                    raise DataError(
                        f"the fetched archive holds more than {MOST_UNPACKED_BYTES:,} bytes.",
                        "Give the path of a file instead.",
                    )
                file = tar.extractfile(member) if member.isfile() else None
                if file is not None and re.search(pattern, member.name):
                    found.append((member.name, file.read()))
    except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, OSError, ValueError) as error:
        raise DataError(f"the fetched archive is damaged: {error}.", "Fetch it again.") from error
    return sorted(found)
