"""Files of Debian packages, fetched by apt-get and read without being installed.

A package is an ``ar`` archive with a compressed tar archive inside.  Knows nothing of what the
files hold.
"""

from __future__ import annotations

from apps.fetching.archives import archive_members, package_archive
from meshmpi.errors import DataError

_MAGIC, _HEADER = b"!<arch>\n", 60


def debian_files(
    package: str, pattern: str, sha256: str = "", otherwise: str = "give the path of a file"
) -> list[tuple[str, bytes]]:
    """Files of a Debian package whose names match, sorted by name.

    Args:
        package: Name, or name=version, as apt-get takes it.
        pattern: Regular expression that is searched in the names of files.
        sha256: Checksum of the package; empty: not checked.
        otherwise: What to do where it cannot be fetched, for messages.

    Raises:
        DataError: It cannot be fetched, is damaged, or is another than was expected.
    """
    command = ["apt-get", "download", "--quiet", package]
    archive = package_archive(f"Debian package '{package}'", command, "apt-get", sha256, otherwise)
    return archive_members(_data_archive(package, archive), pattern)


def _data_archive(package: str, archive: bytes) -> bytes:
    """The tar archive of the files that a package installs."""
    if archive.startswith(_MAGIC):
        at = len(_MAGIC)
        while at + _HEADER <= len(archive):
            name, size = archive[at : at + 16].strip(), archive[at + 48 : at + 58].strip()
            if not size.isdigit():
                break
            start, stop = at + _HEADER, at + _HEADER + int(size)
            if name.startswith(b"data.tar") and stop <= len(archive):
                return archive[start:stop]
            at = stop + stop % 2  # members begin at even places
    raise DataError(
        f"Debian package '{package}' came as {len(archive):,} bytes that are not a whole package.", "Fetch it again."
    )
