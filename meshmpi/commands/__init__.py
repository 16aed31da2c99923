"""Commands of the command line: one file per family, each with its `command.Command` objects in ``COMMANDS``."""
