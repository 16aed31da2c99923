"""The list of attacks, and how one is put into it.

An attack sets a scene, lets meshmpi do its work in it, and returns what the attacker has gained:
an empty text where that is nothing.  Each takes at most a second or two.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

STRANGER = 65_533
"""Number of a user who is neither root nor the one that runs the tests."""


@dataclass
class Scene:
    """What an attack has to work with.

    Attributes:
        folder: An empty folder of the victim.
        patch: For environment variables.
        closing: For what is to be closed however the attack ends.
    """

    folder: Path
    patch: pytest.MonkeyPatch
    closing: contextlib.ExitStack


class Attack(NamedTuple):
    """One attack.

    Attributes:
        room: The file of this folder that it is in.
        attempt: Tries it; returns what was gained, or nothing.
        as_root: Whether it needs another user, and so root to become one.
    """

    room: str
    attempt: Callable[[Scene], str]
    as_root: bool


ATTACKS: dict[str, Attack] = {}
"""Name -> attack.  The name says what is tried; what would be success, the function's docstring."""


def attack(as_root: bool = False) -> Callable[[Callable[[Scene], str]], Callable[[Scene], str]]:
    """Adds the decorated function to the list.

    Args:
        as_root: Whether files of another user are needed.
    """

    def register(attempt: Callable[[Scene], str]) -> Callable[[Scene], str]:
        name = attempt.__name__
        assert name not in ATTACKS, name
        assert attempt.__doc__, f"{name}: say in a docstring what would be success"
        ATTACKS[name] = Attack(attempt.__module__.rsplit(".", 1)[-1], attempt, as_root)
        return attempt

    return register


def refused_to_strangers(folder: Path, work: Callable[[], object]) -> bool:
    """Whether permissions keep another user from something.

    Args:
        folder: Made open to all, and the current folder meanwhile, whatever lies above it.
        work: What the other user tries there, with relative paths.
    """
    folder.chmod(0o755)
    assert _as_stranger(folder, lambda: os.listdir(".")) == 0, "the stranger gets as far as this"
    return _as_stranger(folder, work) == errno.EACCES


def _as_stranger(folder: Path, work: Callable[[], object]) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        os.chdir(folder)
        os.setgroups([])
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        work()
        status = 0
    except PermissionError:
        status = errno.EACCES
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(status)
