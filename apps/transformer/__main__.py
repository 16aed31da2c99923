"""``python -m apps.transformer CONFIG ...`` is ``meshmpi train CONFIG ...``; see configs/."""

import sys

from meshmpi.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["train", *sys.argv[1:]]))
