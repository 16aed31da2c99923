"""Commands of the command line, a family a file.

Each has ``add(commands, command)``, which is given the subparsers and the function that makes one
with the arguments that several share (`meshmpi.cli`).
"""
