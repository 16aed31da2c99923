"""The parser of commands: its errors show the usage of the command at hand, and the nearest name.

Imports nothing outside the standard library: `meshmpi doctor` uses it where the rest of meshmpi cannot run.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from meshmpi.errors import suggest

_NO_CHOICE = re.compile(r"argument (\S+): invalid choice: '([^']*)'.* \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """A parser whose errors show the usage of the command at hand, and the nearest name."""

    def error(self, message: str) -> NoReturn:
        """Prints the error and ends the process with status 2."""
        if wrong := _NO_CHOICE.search(message):
            what, word, known = wrong.groups()
            message = f"{what} cannot be '{word}'." if what.startswith("-") else f"there is no {what} '{word}'."
            message += f" {suggest(word, [name.strip(chr(39)) for name in known.split(', ')])}"
        self.exit(2, f"{self.format_usage()}{self.prog}: error: {message}\n")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """As that of argparse, but an unknown argument is refused with the nearest name."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            self.refuse(rest)
        return found

    def refuse(self, rest: Sequence[str]) -> NoReturn:
        """The error about arguments that nobody knows."""
        word = rest[0].partition("=")[0]
        known = [name for name in self._option_string_actions if name.startswith("--")]
        near = f" {suggest(word, known)}" if word.startswith("-") else ""
        more = f" (nor {' '.join(rest[1:])})" if len(rest) > 1 else ""
        self.error(f"there is no argument '{rest[0]}'{more}.{near}")
