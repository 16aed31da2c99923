"""The command line.  A user's mistake ends in one message and exit status 1.

Finds the command and runs it, on ranks that it starts if ``--ranks`` is given; the commands are in
`meshmpi.commands`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Sequence

from meshmpi.commands import checkpoints, doctor, inspecting, planning, pretrained, runs, training
from meshmpi.commands.command import Command, Subparsers
from meshmpi.commands.parser import Parser
from meshmpi.commands.starting import fail
from meshmpi.errors import ConfigError, MeshmpiError
from meshmpi.guard import abort, exit_status
from meshmpi.version import VERSION


def main(arguments: Sequence[str] | None = None, module: str = "meshmpi") -> int:
    """Runs one command and returns its exit status, or that of SIGPIPE if nobody reads its output.

    Args:
        arguments: Default: those of this process.
        module: ``--ranks`` starts it on the ranks with the same arguments, as ``python -m module``; for a training
            it must first of all call `signals.listen_for_life`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            status = _run(given, module)
        except SystemExit as end:  # --help, or what argparse refuses
            exit_status.ended(end.code if isinstance(end.code, int) else int(end.code is not None))
            _flush()
            raise
        _flush()
        exit_status.ended(status)
        return status
    except BrokenPipeError:
        if not _readers_gone():  # a broken pipe elsewhere is an error
            raise
        return 128 + signal.SIGPIPE


def _flush() -> None:
    """Raises BrokenPipeError now if nobody reads the output, rather than while Python exits."""
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def _readers_gone() -> bool:
    """Whether the output goes into a pipe without a reader; further output is then discarded."""
    gone = False
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no file
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            if any(events & select.POLLERR for _, events in poll.poll(0)):
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), stream.fileno())
                gone = True
    return gone


def _check_text(given: Sequence[str]) -> None:
    """Raises ConfigError for an argument that is not UTF-8."""
    for number, argument in enumerate(given, start=1):
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(argument)
            raise ConfigError(
                f"argument {number} of the command is not UTF-8: {shown!r}.",
                "Write it in UTF-8; for other texts and names of files convert or rename them.",
            ) from None


def _run(given: Sequence[str], module: str) -> int:
    if given[:1] == ["run"]:  # what follows the program is for the program
        from meshmpi.launch.__main__ import main as launch

        return launch(given[1:], "meshmpi run", Parser)
    abort.begin()
    try:
        _check_text(given)
        parser = _parser()
        _complete(parser)
        options, rest = parser.parse_known_args(given)
        if rest:
            options.parser.refuse(rest)
        options.module, options.stdout = module, sys.stdout
        command: Command = options.command
        # What is printed on the way shall not get between the lines of the answer.
        with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
            return command.run(options) if options.ranks is None else command.start(options, given)
    except MeshmpiError as error:
        fail(f"{type(error).__name__}: {error}\n")
        return 1


def _complete(parser: Parser) -> None:
    """Answers a shell that asks for completions, if argcomplete is installed; then the process ends."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete  # pyright: ignore[reportMissingImports]  # the shell has it, perhaps elsewhere

        argcomplete.autocomplete(parser)


def _parser() -> Parser:
    parser = Parser(prog="meshmpi", description="Named-tensor programs on a mesh of MPI ranks.")
    parser.add_argument("--version", action="version", version=f"meshmpi {VERSION}")
    commands: Subparsers = parser.add_subparsers(required=True, metavar="command")
    commands.add_parser("run", help="start a script, a module or any command on MPI ranks", add_help=False)
    for family in (training, planning, inspecting, runs, checkpoints, pretrained):
        for command in family.COMMANDS:
            command.add_to(commands)
    # The doctor's file imports nothing that a broken machine may lack, and so makes no Command.
    Command("doctor", doctor.run, doctor.HELP, finish=doctor.add_arguments).add_to(commands)
    return parser
