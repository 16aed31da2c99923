"""The flags of shared memory under a litmus test: every number that a rank reads is looked at, with pauses anywhere.

Here, with more ranks than cores, and where a cross compiler and qemu are installed as a program for AArch64.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from meshmpi.runtime.shared import SOURCE

LITMUS = Path(__file__).with_name("litmus") / "litmus.c"
CROSS, QEMU = "aarch64-linux-gnu-gcc", ("qemu-aarch64-static", "qemu-aarch64")
MISTAKES = {
    "a rank does not wait for those before it": ("if (r != g->me) wait_for", "if (r > g->me) wait_for"),
    "a rank waits for the barrier before": ("- epoch) < 0;", "- epoch) < -1;"),
    "small reductions have one slot": ("(g->calls++ & 1) * g->slot_bytes", "(g->calls++ & 0) * g->slot_bytes"),
    "nobody waits until all have read": ("barrier(c->group);  // all have read", "// all have read"),
}
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def built(folder: Path, compiler: str = "cc", mistake: str = "", *flags: str) -> Path:
    """The program, from a shared.c with a mistake."""
    text = SOURCE.read_text()
    if mistake:
        right, wrong = MISTAKES[mistake]
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    (folder / "shared.c").write_text(text)
    program = folder / "litmus"
    subprocess.run([compiler, "-O2", "-std=gnu11", f"-I{folder}", *flags, str(LITMUS), "-o", str(program)], check=True)
    return program


def ended(*command: object) -> tuple[int, str]:
    # A session of its own: ranks that are left end with it.
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, start_new_session=True)
    return done.returncode, done.stdout


@needs_compiler
@pytest.mark.parametrize("ranks, rounds, spins", [(2, 500, 20000), (2, 300, 0), (3, 200, 50), (8, 40, 50)])
def test_every_number_is_the_right_one(ranks: int, rounds: int, spins: int, tmp_path: Path):
    assert ended(built(tmp_path), ranks, rounds, spins) == (0, "")


@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake: str, tmp_path: Path):
    program = built(tmp_path, "cc", mistake)
    found = [ended(program, ranks, 2000, 50) for ranks in (2, 3)]
    assert any(status != 0 and " is " in said for status, said in found), found


@pytest.mark.matrix
@pytest.mark.parametrize("ranks, rounds, spins", [(2, 1000, 20000), (2, 500, 0), (4, 200, 50), (8, 40, 50)])
def test_on_another_architecture(ranks: int, rounds: int, spins: int, tmp_path: Path):
    qemu = next((path for name in QEMU if (path := shutil.which(name))), None)
    if qemu is None or shutil.which(CROSS) is None or platform.machine() == "aarch64":
        pytest.skip("needs qemu and a compiler for AArch64")
    assert ended(qemu, built(tmp_path, CROSS, "", "-static"), ranks, rounds, spins) == (0, "")
