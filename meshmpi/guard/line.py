"""A TCP connection between two hosts of a job: JSON documents, one per line, of bounded length.

Does not know the content of the documents or who may send them (`host_link`).
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from typing import Any

SILENT_SECONDS = 12.0
"""A host that has not answered for this long is lost.  Assumption: no switch takes longer to find
another way, and one in five packets may be lost."""
MOST_BYTES = 1 << 26
"""Longest document.  Assumption: 512 calls of 200 ranks of a host take less."""
_BYE = "bye"
_LINEAR_RETRIES = 16  # TCP_THIN_LINEAR_TIMEOUTS, which the module socket does not name


def _tuned(connection: socket.socket) -> None:
    """Has the kernel find a lost host, and not give up for some lost packets."""
    s, options = connection, socket.IPPROTO_TCP
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    s.setsockopt(options, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        s.setsockopt(options, socket.TCP_KEEPIDLE, 1)
        s.setsockopt(options, socket.TCP_KEEPINTVL, 1)
        s.setsockopt(options, socket.TCP_KEEPCNT, int(SILENT_SECONDS))
        s.setsockopt(options, socket.TCP_USER_TIMEOUT, int(1000 * SILENT_SECONDS))
        s.setsockopt(options, _LINEAR_RETRIES, 1)


class Line:
    """One connection: JSON documents, one a line."""

    def __init__(self, connection: socket.socket):
        self._socket, self._rest = connection, bytearray()
        self.closed = ""  # why nothing more comes, or empty
        self.left = False  # whether the other end said good-bye
        connection.settimeout(SILENT_SECONDS)
        _tuned(connection)

    def fileno(self) -> int:
        return self._socket.fileno()

    def ready(self, seconds: float = 0.0) -> bool:
        """Whether something has come, or the other end is lost, within this time."""
        poll = select.poll()  # `select` ends at descriptor 1024
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * max(0.0, seconds)))

    def say(self, document: Any) -> None:
        """Sends; notes in ``closed`` that the other end is lost."""
        try:
            self._socket.sendall(json.dumps(document).encode() + b"\n")
        except OSError as error:
            self.closed = error.strerror or str(error)

    def heard(self, seconds: float) -> Any:
        """The next document; None where none comes in this time or the other end is lost."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest and not self.closed:
            if len(self._rest) > MOST_BYTES:
                return self.refuse(f"more than {MOST_BYTES:,} bytes at once")
            if not self.ready(deadline - time.monotonic()):
                return None
            try:
                data = self._socket.recv(1 << 16)
            except OSError as error:
                self.closed = error.strerror or str(error)
                return None
            if not data:
                self.closed = "its end was closed"
            self._rest += data
        line, newline, rest = self._rest.partition(b"\n")
        if not newline:
            return None
        self._rest = rest
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            return self.refuse(f"no document ({error})")
        if document == _BYE:
            self.left, self.closed = True, "the job is over"
            return None
        return document

    def refuse(self, what: str) -> None:
        """Closes a connection that says what no host of the job says.  No rank is lost by that."""
        self.left, self.closed = True, "it said what cannot be understood"
        self._socket.close()
        sys.stderr.write(
            f"meshmpi: a connection between hosts was closed, as it brought {what[:200]!r}: hangs"
            " between these hosts are not found any more.\n"
        )

    def close(self) -> None:
        """Says good-bye, so that the other end does not take this one for lost."""
        if not self.closed:
            self.say(_BYE)
        self._socket.close()
