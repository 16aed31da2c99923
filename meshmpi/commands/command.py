"""A command of the command line, and the arguments that several commands share."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshmpi.commands.starting import on_ranks
from meshmpi.transformer.training.config import describe, load
from meshmpi.transformer.training.settings import Settings

Options = argparse.Namespace


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        name: What users type.
        run: Does it and returns the exit status.
        help: One line about it.
        add_arguments: Adds its own arguments to a parser.
        configured: Whether it takes a configuration and ``--set``.
        on_mesh: Whether it takes ``--mesh`` and ``--layout``.
        starts_ranks: Whether it takes ``--ranks N``.
        start: Does it with ``--ranks`` and returns the exit status.  It is given the arguments of the process too;
            ``options.module`` has the command, see `on_ranks`.
    """

    name: str
    run: Callable[[Options], int]
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    configured: bool = False
    on_mesh: bool = True
    starts_ranks: bool = True
    start: Callable[[Options, Sequence[str]], int] = lambda options, given: on_ranks(
        options.ranks, given, options.module
    )

    def add_to(self, commands: Any) -> None:
        """Adds the command to the subparsers of the command line."""
        made = commands.add_parser(
            self.name,
            help=self.help,
            description=f"{self.help[0].upper()}{self.help[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=f"settings:\n\n{describe(Settings, _width())}" if self.configured else None,
        )
        made.set_defaults(command=self, ranks=None)
        if self.configured:
            made.add_argument("config", type=Path, help="a TOML file with settings, or: quickstart")
            add_settings(made)
        if self.on_mesh:
            made.add_argument("--mesh", help="axes and sizes, as rows:2;cols:2: mesh.shape")
            made.add_argument("--layout", help="dimensions and their axes, as batch:rows;heads:cols: mesh.layout")
        if self.starts_ranks:
            made.add_argument("--ranks", type=int, metavar="N", help="start the command on N MPI ranks")
        self.add_arguments(made)


def _width() -> int:
    """Columns of a line of help."""
    return max(80, min(100, shutil.get_terminal_size().columns))


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that change settings."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one setting, as train.steps=100; may be repeated",
    )
    parser.add_argument("--storage", help="layout of stored variables: mesh.storage")


def settings_of(options: Options, config: Path | str, *more: str) -> Settings:
    """The settings of a command that has `add_settings`.

    Args:
        options: Options of the command.
        config: The configuration.
        more: Further overrides, see `load`.
    """
    overrides = list(options.set)
    for key, value in (("shape", options.mesh), ("layout", options.layout), ("storage", options.storage)):
        if value is not None:
            overrides.append(f"mesh.{key}={value}")
    return load(Settings, config, [*overrides, *more])
