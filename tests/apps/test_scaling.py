"""apps.scaling: the paper's claim of half of the peak, and a weak-scaling curve that runs."""

import pytest

from apps.scaling import paper
from apps.scaling.__main__ import main
from meshmpi.planner.machine_file import load_machine


def test_half_of_the_peak_is_what_the_papers_hours_mean():
    """13 hours for 136,000 steps on 512 cores of 22.5 TFLOP/s (section 9), by our FLOP."""
    machine = load_machine("tpuv2")
    row = paper.predict("language", 6, machine)
    assert row.parameters == 4_899_222_528 and row.ranks == 512
    seconds = paper.PAPER_SECONDS["language", 6]
    assert row.efficiency * row.seconds / seconds == pytest.approx(0.50, abs=0.01)
    assert row.seconds < seconds, "a prediction without losses cannot be slower than the run"
    assert row.memory < machine.memory_bytes


def test_memory_of_a_rank_stays_while_model_and_mesh_grow_together():
    """The two largest models differ by a factor of two on the same mesh, and fit both."""
    small, large = (paper.predict("language", k, load_machine("tpuv2")) for k in (3, 5))
    assert large.parameters > 3.5 * small.parameters and large.ranks > small.ranks
    assert large.memory < small.memory


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["data", "model"])
def test_a_curve_on_one_and_two_ranks(capsys, kind):
    assert main(["weak", "--tiny", "--ranks", "1", "2", "--steps", "2", "--kind", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[2].split()[0] == "1" and lines[3].split()[0] == "2"


def test_an_unknown_machine_ends_with_a_message(capsys):
    assert main(["paper", "--machine", "mars"]) == 1
    assert "no machine 'mars'" in capsys.readouterr().err
