"""``python -m meshmpi``: the command line."""

from meshmpi.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
