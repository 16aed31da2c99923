"""Leaves out what an MPI launcher says of MPI_Abort, up to 14 lines, where a rank has already told why.

Only these lines, word for word, and only about a rank that has reported: a launcher's words about a process that was
killed, or left without a report, are the first cause.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator, Sequence

_DRAIN_SECONDS = 5.0
"""How long the last lines of a job that has ended are waited for: a process that outlives the job
may hold its stderr open."""
_RULE = rb"-{74}\n"
_ABORTED = rb"MPI_ABORT was invoked on rank (\d+) in communicator MPI_COMM_WORLD\n"
_NOTE = (
    rb"\n",
    rb"NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes\.\n",
    rb"You may or may not see output from other processes, depending on\n",
    rb"exactly when Open MPI kills them\.\n",
    _RULE,
)
_NOTICES: Sequence[Sequence[bytes]] = (
    # Open MPI 5
    (_RULE, _ABORTED, rb"  Proc: \[\[\d+,\d+\],\d+\]\n", rb"  Errorcode: -?\d+\n", *_NOTE),
    (
        _RULE,
        rb"\w+ has exited due to process rank (\d+) with PID \d+ on node \S+ calling\n",
        rb'"abort"\. This may have caused other processes in the application to be\n',
        rb"terminated by signals sent by \w+ \(as reported here\)\.\n",
        _RULE,
    ),
    # Open MPI 4
    (_RULE, _ABORTED, rb"with errorcode -?\d+\.\n", *_NOTE),
    # MPICH, Intel MPI
    (
        rb"Abort\(-?\d+\) on node (\d+) \(rank \d+ in comm 0\): application called"
        rb" MPI_Abort\(MPI_COMM_WORLD, -?\d+\) - process \d+\n",
    ),
)
"""For each notice the patterns of its lines; one of them names the rank."""
_NOT_STARTED = (b"The PMIx server's listener thread failed to start.",)
"""What launchers say that failed by chance before any rank began: here a network interface came or went just then."""
_BEGINNINGS = (b"-" * 74 + b"\n", b"Abort(")


class Notices:
    """A filter for what a launcher and its ranks write to stderr."""

    def __init__(self, ranks: int):
        self._report = re.compile(rb"(?:.*\r)?\[rank (\d+) of %d\b" % ranks)
        self._reported: list[bytes] = []
        self._held: list[bytes] = []
        self._line = b""  # the beginning of a line, not shown yet
        self._shown = b""  # the beginning of a line, shown already
        self._dropped = False
        self._before = b""  # the last bytes, for words that come in two pieces
        self.said = False
        """Whether anything but blanks was to be shown."""
        self.not_started = False
        """Whether the launcher said that it could not start, for a reason that passes."""

    def feed(self, data: bytes) -> bytes:
        """What of ``data``, and of lines held back before, is to be shown now."""
        shown = bytearray()
        seen = self._before + data
        self.not_started = self.not_started or any(words in seen for words in _NOT_STARTED)
        self._before = seen[-80:]
        for piece in re.findall(rb"[^\n]*\n|[^\n]+", self._line + data):
            self._line = b""
            if piece.endswith(b"\n"):
                if found := self._report.match(self._shown + piece):
                    self._reported.append(found[1])
                shown += piece if self._shown or not self._reported else self._whole(piece)
                self._shown = b""
            elif self._held or (not self._shown and self._may_begin(piece)):
                self._line = piece
            else:
                self._shown += piece
                shown += piece
        self.said = self.said or bool(shown.strip())
        return bytes(shown)

    def end(self) -> bytes:
        """What is still held back, at the end of the stream."""
        rest = b"".join(self._held) + self._line
        self._held, self._line = [], b""
        self.said = self.said or bool(rest.strip(b"\0\n "))
        # Open MPI 5 ends its notices with a zero byte.
        return b"" if rest == b"\0" and self._dropped else rest

    def _may_begin(self, piece: bytes) -> bool:
        begins = piece == b"\0" or any(b.startswith(piece) or piece.startswith(b) for b in _BEGINNINGS)
        return bool(self._reported) and begins

    def _whole(self, line: bytes) -> bytes:
        """What is to be shown after a whole line came in, which may belong to a notice."""
        self._held.append(line)
        shown = b""
        while self._held:
            count, text = len(self._held), b"".join(self._held)
            fitting = [(n, m) for n in _NOTICES if (m := re.fullmatch(b"".join(n[:count]), text))]
            ranks = [match[1] for notice, match in fitting if len(notice) == count]
            if any(r in self._reported for r in ranks):
                self._held, self._dropped = [], True
            elif fitting and not ranks:
                break  # the next line will tell
            else:
                shown += self._held.pop(0)
        return shown


@contextlib.contextmanager
def filtered(notices: Notices) -> Iterator[int]:
    """A descriptor for the stderr of a job; what is written there comes out at our own stderr."""
    reading, writing = os.pipe()
    thread = threading.Thread(target=_pass_on, args=(reading, notices), daemon=True)
    thread.start()
    try:
        yield writing
    finally:
        os.close(writing)
        thread.join(_DRAIN_SECONDS)


def _pass_on(reading: int, notices: Notices) -> None:
    with open(reading, "rb", buffering=0) as source:
        while data := source.read(1 << 16):
            _show(notices.feed(data))
    _show(notices.end())


def _show(data: bytes) -> None:
    with contextlib.suppress(OSError):  # closed, or nobody reads it any more: the job goes on
        while data:
            data = data[os.write(2, data) :]
