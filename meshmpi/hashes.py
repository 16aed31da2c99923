"""SHA-256 and BLAKE2b for names and seals of small texts, without OpenSSL.

`hashlib` loads that library, which takes each rank 5 ms of its start.  `random` of the standard library does the same.
Where much is hashed, as in checkpoints, `hashlib` is faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import blake2b, sha256
else:
    try:
        from _blake2 import blake2b

        try:
            from _sha2 import sha256
        except ImportError:  # before Python 3.12
            from _sha256 import sha256
    except ImportError:
        from hashlib import blake2b, sha256

__all__ = ["blake2b", "sha256"]
