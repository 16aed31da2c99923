r"""Protein language models of the class of ESM2, split over a mesh.

python -m apps.esm2 score proteins.fasta --model esm2_t12_35M             score every protein
python -m apps.esm2 embed proteins.fasta --model esm2_t33_650M --ranks 4 \
    --layout 2d --out vectors.npz                                         a vector for each
python -m apps.esm2 train apps/esm2/configs/proteins.toml --ranks 2       train a small one
python -m apps.esm2 plan --size 15B --ranks 8 --layout 2d                 what 15 B would take
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from apps.esm2 import commands
from apps.esm2.layouts import NAMES
from apps.esm2.models import SIZES
from meshmpi.commands.starting import fail, on_ranks
from meshmpi.errors import MeshmpiError


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    made = argparse.ArgumentParser(prog="python -m apps.esm2", description=__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    kinds = made.add_subparsers(title="commands", required=True, metavar="command")

    score = kinds.add_parser("score", help="pseudo-log-likelihood of proteins in a FASTA file")
    score.set_defaults(command=commands.score)
    _inference(score)
    text = "hide this share of the residues at once (default: one residue)"
    score.add_argument("--masked-share", type=float, metavar="SHARE", help=text)
    score.add_argument("--per-residue", action="store_true", help="a line for every residue too")

    embed = kinds.add_parser("embed", help="vectors of proteins in a FASTA file, to a .npz file")
    embed.set_defaults(command=commands.embed)
    _inference(embed)
    embed.add_argument("--per-residue", action="store_true", help="a vector for every residue")
    embed.add_argument("--out", type=Path, required=True, help="the .npz file to write")

    _plan(kinds.add_parser("plan", help="weights, FLOP, traffic and memory of a rank"))
    _train(kinds.add_parser("train", help="train on proteins, with settings of a TOML file"))
    return made


def _inference(made: argparse.ArgumentParser) -> None:
    add, at_model = made.add_argument, "folder of a Hugging Face checkpoint of ESM2, or of a run"
    add("fasta", type=Path, help="the proteins; .gz is unpacked")
    add("--model", type=Path, required=True, help=at_model)
    add("--layout", default="2d", choices=NAMES)
    add("--mesh", default="", help="as rows:2;cols:2 (default: by the layout)")
    add("--tokens", type=int, default=4096, help="of a batch (default 4096)")
    add("--longest", type=int, default=0, help="tokens of a row (default: the model's)")
    text = "cut longer sequences into windows that overlap by half"
    add("--window", type=int, default=0, metavar="RESIDUES", help=text)
    text = "read letters that are no residue as X instead of refusing them"
    add("--unknown-as-x", action="store_true", help=text)
    _started(made)


def _started(made: argparse.ArgumentParser) -> None:
    text = "start this on N MPI ranks"
    made.add_argument("--ranks", dest="on", type=int, metavar="N", help=text)


def _plan(made: argparse.ArgumentParser) -> None:
    made.set_defaults(command=commands.plan, on=None)
    add = made.add_argument
    add("--size", default="15B", choices=list(SIZES))
    add("--ranks", type=int, default=8)
    add("--batch", type=int, default=8, help="rows of all ranks together")
    add("--length", type=int, default=1024, help="tokens of a row")
    add("--for", dest="what", default="score", choices=("score", "embed"))
    add("--layout", default="2d", choices=NAMES)
    add("--mesh", default="", help="as rows:2;cols:4")


def _train(made: argparse.ArgumentParser) -> None:
    made.set_defaults(command=commands.train)
    add = made.add_argument
    add("config", type=Path)
    text = "change one setting, such as train.steps=100; may be repeated"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    add("--out", type=Path, help="folder of the run (default runs/<config>)")
    add("--resume", nargs="?", const=True, default=False, metavar="CHECKPOINT")
    add("--mesh", help="mesh.shape")
    add("--layout", help="2d, megatron or replicated; or as mesh.layout")
    _started(made)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    from meshmpi.guard import abort

    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    abort.install_hooks()
    try:
        if options.on is not None:
            return on_ranks(options.on, given, "apps.esm2")
        return options.command(options)
    except MeshmpiError as error:
        fail(f"{type(error).__name__}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
