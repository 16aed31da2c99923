"""The class of commands, their arguments as table rows, and what several commands share."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from meshmpi.commands.parser import Parser
from meshmpi.commands.starting import on_ranks
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.transformer.training.config import describe, load
from meshmpi.transformer.training.settings import Settings

Options = argparse.Namespace
Subparsers: TypeAlias = "argparse._SubParsersAction[Parser]"


class Argument(NamedTuple):
    """An argument: its name, and what `ArgumentParser.add_argument` takes."""

    name: str
    how: dict[str, object]


def argument(
    name: str, type: type, help: str, default: object = None, metavar: str | None = None, **more: object
) -> Argument:
    """A row of a table of arguments; ``more`` are further ones of `ArgumentParser.add_argument`.

    Args:
        name: "--name" for an option; a bare name for what must be given.
        type: Its type; bool: an option without a value; list: a text that may be given several times.
    """
    how: dict[str, object] = {"help": help, **more}
    if type is bool:
        return Argument(name, how | {"action": "store_true"})
    if type is list:
        how |= {"action": "append", "default": [], "help": f"{help}; may be repeated"}
    else:
        how |= {"type": type} | ({"default": default} if name.startswith("-") else {})
    return Argument(name, how if metavar is None else how | {"metavar": metavar})


def add_arguments(parser: argparse._ActionsContainer, arguments: Iterable[Argument]) -> None:
    """Adds rows to a parser, or to a group of one."""
    for name, how in arguments:
        parser.add_argument(name, **how)  # pyright: ignore[reportArgumentType]


SETTINGS = (
    argument("--set", list, "change one setting, such as train.steps=100", metavar="KEY=VALUE"),
    argument("--storage", str, "storage layout of the variables (mesh.storage)"),
)
"""Arguments that change settings."""
DRAWING = (
    argument("--top-k", int, "draw from the k most probable tokens", 0),
    argument("--top-p", float, "draw from the most probable tokens with this total probability", 1.0),
    argument("--beams", int, "beam search with this number of beams", 0),
)
"""Arguments of how the next token is chosen."""
MACHINE = argument(
    "--machine",
    str,
    "machine to predict times for: a file that `meshmpi calibrate` wrote, core or tpuv2; default: this host, if it"
    " was calibrated",
    "",
    "FILE",
)
_MODEL = "a TOML file with settings, quickstart, the folder of a run, or module:function that builds a graph"
MODEL = (argument("model", str, _MODEL), *SETTINGS)
"""Arguments of the commands that look at a graph; `meshmpi.commands.model` reads them."""
_GIVEN = {
    "config": (argument("config", Path, "a TOML file with settings, quickstart, or the folder of a run"), *SETTINGS),
    "mesh": (
        argument("--mesh", str, "axes and sizes, such as rows:2;cols:2 (mesh.shape)"),
        argument("--layout", str, "dimensions and their axes, such as batch:rows;heads:cols (mesh.layout)"),
    ),
    "ranks": (argument("--ranks", int, "start the command on N MPI ranks", metavar="N"),),
    "size": (argument("--ranks", int, "for N ranks, which are not started; without --mesh: on one axis", metavar="N"),),
    "json": (argument("--json", bool, "print one JSON object, for programs; all else goes to stderr"),),
}
"""Arguments that several commands take, by the name that `Command.takes` uses."""


def _on_ranks(options: Options, given: Sequence[str]) -> int:
    return on_ranks(options.ranks, given, options.module)


def here(options: Options, given: Sequence[str]) -> int:
    """Does a command with --ranks in this process, where they are only a number."""
    return options.command.run(options)


class _HelpSettings(argparse.Action):
    """Prints all settings and ends the process."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        width = max(80, min(100, shutil.get_terminal_size().columns))
        print(describe(Settings, width))
        parser.exit()


@dataclass(frozen=True)
class Command:
    """A command."""

    name: str  # what users type
    run: Callable[[Options], int]  # does it and returns the exit status
    help: str  # one line about it
    arguments: Sequence[Argument] = ()
    takes: Sequence[str] = ()  # which shared arguments it takes, by their names in `_GIVEN`
    start: Callable[[Options, Sequence[str]], int] = _on_ranks  # does it with --ranks; takes the process's arguments
    one_of: Sequence[Argument] = ()  # further arguments, of which exactly one must be given
    description: str = ""  # begins the help of the command; default: the line about it
    epilog: str = ""  # ends the help
    finish: Callable[[Parser], object] = lambda parser: None  # adds what rows cannot say

    def add_to(self, commands: Subparsers) -> None:
        """Adds the command to the subparsers of the command line."""
        made = commands.add_parser(
            self.name,
            help=self.help,
            description=self.description or f"{self.help[0].upper()}{self.help[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=self.epilog,
        )
        made.set_defaults(command=self, ranks=None, json=False, parser=made)
        for name in self.takes:
            add_arguments(made, _GIVEN[name])
        if self.one_of:
            add_arguments(made.add_mutually_exclusive_group(required=True), self.one_of)
        add_arguments(made, self.arguments)
        if "config" in self.takes or MODEL[0] in self.arguments:
            made.add_argument("--help-settings", nargs=0, action=_HelpSettings, help="list all settings for --set")
        self.finish(made)


def group(name: str, help: str, commands: Sequence[Command]) -> Command:
    """A command whose first argument chooses one of several."""

    def finish(parser: Parser) -> None:
        actions = parser.add_subparsers(required=True, metavar="action")
        for command in commands:
            command.add_to(actions)

    return Command(name, lambda options: 0, help, finish=finish)


def settings_of(options: Options, config: Path | str, *more: str) -> Settings:
    """The settings of a command that takes `SETTINGS`; ``more`` are further overrides, see `load`."""
    mesh = (("shape", options.mesh), ("layout", options.layout), ("storage", options.storage))
    overrides = [*options.set, *(f"mesh.{key}={value}" for key, value in mesh if value is not None)]
    return load(Settings, config, [*overrides, *more])


def answer(options: Options, text: str, data: object) -> None:
    """Prints the answer of a command: text for people, or with --json an object for programs."""
    if options.json:
        print(json.dumps(_finite(data), indent=1, ensure_ascii=False), file=options.stdout, flush=True)
    elif text:
        print(text, flush=True)


def answer_of(mesh: AnyMesh, options: Options, text: str, data: object) -> None:
    """Prints the answer of a command that runs on ranks, on rank 0."""
    if mesh.rank == 0:
        answer(options, text, data)


def _finite(data: object) -> object:
    """``data`` with None for numbers that JSON has not: NaN and infinities."""
    if isinstance(data, Mapping):
        return {str(k): _finite(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


@contextlib.contextmanager
def watched(what: str, shown: bool = True) -> Iterator[Callable[[int, int, str], None]]:
    """A function that draws how far a command is: (done, of how many, text), with times, on a terminal only."""
    from meshmpi.training.progress import LiveLine, clock

    line, began = LiveLine("auto" if shown else "off", print, sys.stderr), time.monotonic()
    lists = dict[int, tuple[int, float]]()  # how many there are of them -> how many were done first, and when

    def looked(done: int, total: int, text: str) -> None:
        now = time.monotonic()
        first, then = lists.setdefault(total, (done, now))
        left = f", {clock((total - done) * (now - then) / (done - first))} left" if done > first else ""
        line.show(done, total, f"{what}, {clock(now - began)}{left}, {text}")

    try:
        yield looked
    finally:
        line.clear()


def say(mesh: AnyMesh, text: str, end: str = "\n") -> None:
    """Prints at once, on rank 0."""
    if mesh.rank == 0:
        print(text, end=end, flush=True)
