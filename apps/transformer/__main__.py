r"""``meshmpi`` with the corpora and translation pairs of this folder.

python -m apps.transformer CONFIG ...         meshmpi train CONFIG ..., which fetches the data it names; see configs/
python -m apps.transformer COMMAND ...        any other command of meshmpi, likewise: plan, verify ...
python -m apps.transformer fetch NAME ...     fetch corpora or pairs into the cache and print their paths
python -m apps.transformer translate ...      see `apps.transformer.translate`
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def main(given: Sequence[str]) -> int:
    """Runs one command; returns the exit status."""
    if not given or given[0].startswith("-") or Path(given[0]).suffix == ".toml" or given[0] == "quickstart":
        given = ["train", *given]
    if given[0] == "train" and "--help" not in given:  # before the imports: a signal may come while they run
        from meshmpi.training.signals import listen_for_life

        listen_for_life()
    from apps.transformer import corpora, translate
    from meshmpi.cli import main as command_line
    from meshmpi.commands.starting import fail
    from meshmpi.errors import MeshmpiError

    if given[0] == "translate":
        return translate.main(given[1:])
    if given[0] != "fetch":
        return command_line(given, module="apps.transformer")
    try:
        for name in given[1:]:
            print(corpora.fetch(name))
    except MeshmpiError as error:
        fail(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
