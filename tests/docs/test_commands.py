"""Shell blocks of the documents name commands, options and files that exist."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from meshmpi import cli
from tests.docs.pages import PAGES, ROOT, Block, name_of, shell_blocks

WITH_SHELL = [page for page in PAGES if shell_blocks(page)]
OURS = r"(?:meshmpi|apps|docs|tests)"


def commands(block: Block) -> Iterator[list[str]]:
    """Words of each command, without comments, redirections, variables in front, and pipes."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        command: list[str] = []
        skip = False
        for word in [*words, ";"]:
            if word in ("|", "&&", "||", ";", "&"):
                if command:
                    yield command
                command = []
            elif skip:
                skip = False
            elif word in (">", "<", ">>", "2>"):
                skip = True
            elif command or not re.match(r"[A-Z_]+=", word):
                command.append(word)


def ours(words: list[str]) -> list[str]:
    """From the first program or module of ours on: ``["meshmpi", "train", ...]``."""
    for k, word in enumerate(words):
        started = k == 0 or words[0] in ("mpirun", "srun") or words[k - 1] in ("--", "-m")
        if started and Path(word).name == "meshmpi":
            rest = words[k + 1 :]
            return ["meshmpi.launch", *rest[1:]] if rest[:1] == ["run"] else ["meshmpi", *rest]
        if words[k - 1] == "-m" and re.match(rf"{OURS}\b", word) and k:
            return words[k:]
    return []


@cache
def help_of(module: str, *sub: str) -> str:
    """What ``python -m module sub --help`` prints."""
    printed, before = io.StringIO(), sys.argv
    sys.argv = [module, *sub, "--help"]
    try:
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # runpy: the module was imported before
            runpy.run_module(module, run_name="__main__", alter_sys=False)
    except SystemExit as end:
        assert not end.code, f"python -m {module} {' '.join(sub)} --help ends with {end.code}"
    finally:
        sys.argv = before
    return printed.getvalue()


def check_options(words: list[str], place: str) -> None:
    """The options of a module's command stand in its help, or in that of its part."""
    module, rest = words[0], words[1:]
    if module == "meshmpi.launch":  # what follows its own options is another command
        own = list(rest)
        for k, word in enumerate(rest):
            if word in ("--", "-m") or (not word.startswith("-") and rest[k - 1] not in VALUED):
                own = rest[:k]
                break
        rest = own
    options = [w.split("=")[0] for w in rest if re.match(r"--?[a-z]", w)]
    known = help_of(module) if options else ""
    parts = [w for w in rest if re.fullmatch(r"[a-z_]+", w)]
    for n in (1, 2):
        if not all(has(known, o) for o in options) and len(parts) >= n:
            known += help_of(module, *parts[:n])
    for option in options:
        assert has(known, option), f"{place}: python -m {module} has no option {option}"


VALUED = ("-n", "--timeout", "--mpi", "--hosts", "--option")
"""Options of the launcher that a value follows."""


def has(known: str, option: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", known) is not None


@pytest.mark.parametrize("page", WITH_SHELL, ids=name_of)
def test_shell_blocks_parse(page: Path):
    for block in shell_blocks(page):
        done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, f"{name_of(page)}:{block.line}: {done.stderr}"


@pytest.mark.parametrize("page", WITH_SHELL, ids=name_of)
def test_files_and_targets_exist(page: Path):
    """Make targets, modules and repository files that shell blocks name."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for block in shell_blocks(page):
        place = f"{name_of(page)}:{block.line}"
        for target in re.findall(r"^make ([a-z-]+)", block.text, re.MULTILINE):
            assert target in targets, f"{place}: make {target}"
        for module in re.findall(rf"-m ({OURS}[\w.]*)", block.text):
            path = ROOT / module.replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").exists(), f"{place}: {module}"
        for file in re.findall(r"(?:apps|slurm|docs)/[\w./-]+\.(?:toml|sbatch|py|sh)", block.text):
            assert (ROOT / file).exists(), f"{place}: {file}"


@pytest.mark.parametrize("page", WITH_SHELL, ids=name_of)
def test_commands_take_their_arguments(page: Path):
    """The command line parses what the pages write; modules know the options."""
    for block in shell_blocks(page):
        place = f"{name_of(page)}:{block.line}"
        for words in commands(block):
            found = ours(words)
            if found[:1] == ["meshmpi"]:
                check_parses(found[1:], place)
            elif found:
                check_options(found, place)


def check_parses(arguments: list[str], place: str) -> None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            cli._parser().parse_args(arguments)
    except SystemExit:
        pytest.fail(f"{place}: meshmpi {' '.join(arguments)}\n{said.getvalue()}")


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("meshmpi train x.toml --rank 2 --nodes 3", "--nodes"),
        ("meshmpi plam x.toml", "plam"),
        ("python -m apps.bench --roundz 3", "--roundz"),
        ("A=1 mpirun -n 2 python -m meshmpi.launch --timeuot 3 -n 2 x.py", "--timeuot"),
    ],
)
def test_mistakes_are_found(line: str, wrong: str, tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(f"```sh\n{line}\n```\n")
    with pytest.raises((AssertionError, pytest.fail.Exception), match=wrong):
        test_commands_take_their_arguments(page)
