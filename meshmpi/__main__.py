"""``python -m meshmpi`` and the command ``meshmpi``."""

import sys


def main() -> int:
    """The command line; returns the exit status."""
    if sys.argv[1:2] == ["train"]:  # before the imports: a signal may come while they run
        from meshmpi.training.signals import listen_for_life

        listen_for_life()
    if sys.argv[1:2] == ["doctor"]:  # before the imports: they may be what is broken
        from meshmpi.commands.doctor import main as doctor

        return doctor(sys.argv[2:])
    from meshmpi.cli import main as command_line

    return command_line()


if __name__ == "__main__":
    raise SystemExit(main())
