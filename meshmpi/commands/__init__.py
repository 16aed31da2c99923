"""Commands of the command line: a family a file, each with its `command.Command` objects in ``COMMANDS``."""
