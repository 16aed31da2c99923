r"""Translation as in the paper: prepare pairs, train, measure BLEU, translate lines.

python -m apps.transformer translate prepare apps/transformer/configs/translate_ende.toml
python -m apps.transformer translate train apps/transformer/configs/translate_ende.toml --ranks 2
python -m apps.transformer translate evaluate runs/translate_ende --ranks 2
python -m apps.transformer translate translate runs/translate_ende < english.txt > german.txt
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshmpi import cli
from meshmpi.commands.starting import fail
from meshmpi.errors import ConfigError, DataError, MeshmpiError
from meshmpi.runtime.agreement import from_first
from meshmpi.transformer.training.config import from_dict, load
from meshmpi.transformer.training.settings import MeshSettings, Settings
from meshmpi.transformer.training.setup import chosen_layout, make_mesh

_SEARCH = ("beams", "alpha", "sentence_batch")


def parser() -> argparse.ArgumentParser:
    """The commands and their options; ``train`` has those of ``meshmpi train``."""
    made = argparse.ArgumentParser(
        prog="python -m apps.transformer translate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(required=True, metavar="command")
    prepare = commands.add_parser("prepare", help="fetch, clean and divide pairs; print statistics")
    prepare.set_defaults(command=_prepare, ranks=None)
    prepare.add_argument("config", type=Path, help="a TOML file with settings")
    prepare.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    commands.add_parser("train", help="as meshmpi train CONFIG ...", add_help=False)
    evaluate = commands.add_parser("evaluate", help="held-out loss and BLEU of a run")
    evaluate.set_defaults(command=_evaluate)
    evaluate.add_argument("--sentences", type=int, help="held-out sentences for BLEU; 0: none")
    translate = commands.add_parser("translate", help="translate the lines of the standard input")
    translate.set_defaults(command=_translate)
    translate.add_argument("--input", type=Path, help="a file of sentences instead")
    for command in (evaluate, translate):
        command.add_argument("run", type=Path, help="folder of a run, or a checkpoint")
        command.add_argument("--beams", type=int, help="translations kept at each step")
        command.add_argument("--alpha", type=float, help="of the length penalty")
        command.add_argument("--sentence-batch", type=int, help="sentences translated together")
        command.add_argument("--mesh", default="", help="as rows:2;cols:2")
        command.add_argument("--layout", default="", help="as batch:rows;heads:cols")
        command.add_argument("--ranks", type=int, metavar="N", help="start this on N MPI ranks")
    return made


def main(given: Sequence[str]) -> int:
    """Runs one command; returns the exit status."""
    from meshmpi.guard import abort

    if given[:1] == ["train"]:
        return cli.main(given, module="apps.transformer")
    options = parser().parse_args(given)
    abort.install_hooks()
    try:
        if options.ranks is not None:
            return _on_ranks(options.ranks, list(given))
        return options.command(options)
    except MeshmpiError as error:
        fail(f"{type(error).__name__}: {error}\n")
        return 1


def _on_ranks(ranks: int, given: list[str]) -> int:
    """Starts the same command again on several ranks."""
    from meshmpi.launch.launch import launch

    at = next(k for k, word in enumerate(given) if word.startswith("--ranks"))
    rest = given[:at] + given[at + (1 if "=" in given[at] else 2) :]
    with tempfile.TemporaryDirectory(prefix="meshmpi-") as folder:
        if rest[0] == "translate" and not any(word.startswith("--input") for word in rest):
            # Launchers do not all pass on the end of the standard input: ranks read a file.
            path = Path(folder, "standard-input.txt")
            path.write_bytes(sys.stdin.buffer.read())
            rest += ["--input", str(path)]
        status = launch(ranks, ["-m", "apps.transformer", "translate", *rest]).returncode
    return status if status >= 0 else 128 - status


# ---- commands --------------------------------------------------------------------------------


def _prepare(options: argparse.Namespace) -> int:
    from meshmpi.transformer.translation.data import prepare

    settings = load(Settings, options.config, options.set)
    if settings.task != "translation":
        raise ConfigError(
            f"the task of {options.config} is '{settings.task}'.",
            'Give a file with task = "translation", as configs/translate_ende.toml.',
        )
    data = prepare(settings)
    for name, value in data.report.items():
        numbers = value.items() if isinstance(value, dict) else [("", value)]
        print(f"{name}: " + ", ".join(f"{key} {n:,g}".strip() for key, n in numbers))
    tokens = (int(part.lengths.sum()) for part in (data.train, data.held_out))
    print("{:,} training and {:,} held-out tokens".format(*tokens), end=" ")
    print(f"of a vocabulary of {data.vocabulary.size:,}")
    return 0


def _opened(options: argparse.Namespace) -> tuple[Any, Settings, Any, str]:
    """The run, its settings as the options change them, the mesh and the layout."""
    from meshmpi.transformer.training.saved import open_run

    saved = open_run(options.run)
    if saved.settings.task != "translation":
        raise ConfigError(
            f"{options.run} is a run of task '{saved.settings.task}'.",
            "Give the folder of a run of task 'translation'.",
        )
    wanted = {key: getattr(options, key) for key in (*_SEARCH, "sentences") if key in options}
    changed = {key: value for key, value in wanted.items() if value is not None}
    old = {f: getattr(saved.settings.translation, f) for f in _names(saved.settings.translation)}
    translation = from_dict(type(saved.settings.translation), old | changed)
    asked = MeshSettings(shape=options.mesh, layout=options.layout)
    settings = replace(saved.settings, translation=translation, mesh=asked)
    mesh = make_mesh(asked)
    return saved, settings, mesh, chosen_layout(asked, mesh.shape)


def _names(settings: Any) -> list[str]:
    return list(settings.__dataclass_fields__)


def _evaluate(options: argparse.Namespace) -> int:
    from meshmpi.transformer.training.saved import evaluate_run

    saved, settings, mesh, layout = _opened(options)

    def say(line: str) -> None:
        if mesh.rank == 0:
            print(line)

    evaluation, sample = evaluate_run(saved, settings, mesh, layout, say)
    say(f"held-out loss: {evaluation}")
    if sample.text:
        say(f"---- {sample.heading} ----\n{sample.text}\n----")
    say(", ".join(f"{name} {value:.4g}" for name, value in sample.measures.items()))
    return 0


def _translate(options: argparse.Namespace) -> int:
    from meshmpi import checkpoint
    from meshmpi.transformer.translation.pairs import file_lines, text_lines
    from meshmpi.transformer.translation.translator import Translator

    saved, settings, mesh, layout = _opened(options)
    name = str(options.input or "standard input")

    def read() -> list[str]:
        if options.input is not None:
            return file_lines(options.input)
        return text_lines(name, sys.stdin.buffer.read())

    lines = from_first(mesh, read)
    if not any(line.strip() for line in lines):
        raise DataError(f"{name} holds no text.", "Give sentences, one on a line.")
    translator = Translator(settings, saved.config, saved.vocabulary, mesh, layout)
    checkpoint.load(saved.manifest, translator.variables, extra=True)
    translator.check(lines, name)
    batch = 4 * settings.translation.sentence_batch
    for first in range(0, len(lines), batch):
        for text in translator.translate(lines[first : first + batch]):
            if mesh.rank == 0:
                print(text, flush=True)
    return 0
