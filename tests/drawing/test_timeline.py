"""The time line of a step: lengths, names, what is folded, and where traces fit."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.dims import MeshShape
from meshmpi.drawing.timeline import draw_timeline, stages
from meshmpi.ir.kinds import Collective
from meshmpi.ir.program import Program
from meshmpi.planner.machine_file import load_machine
from meshmpi.planner.step_time import OTHER, WAITING, Spent, Timed, predicted, recorded
from meshmpi.runtime.trace import Call, Trace, write_trace
from tests.drawing.seen import assert_legible, boxes, words
from tests.drawing.test_program_pictures import ROOT, deep_program, two_layers


@pytest.mark.parametrize("make", [lambda: two_layers().program, deep_program])
def test_lengths_are_the_predicted_time(make):
    program = make()
    prediction = mm.predict_time(program, load_machine("tpuv2"))
    timed = predicted(program, prediction)
    found = stages(program, timed.parts)
    assert sum(s.seconds for s in found) == pytest.approx(prediction.seconds)
    by_row = {row: sum(s.rows.get(row, 0.0) for s in found) for row in ("rows", "cols")}
    assert by_row == pytest.approx(prediction.by_axes())
    drawn = [b for b in boxes(draw_timeline(program, timed)) if "drawn as one" not in b.note]
    assert sum(b.w for b in drawn) == pytest.approx(900 - 130 - 16)
    assert drawn == sorted(drawn, key=lambda b: b.x)  # one after the other
    assert_legible(draw_timeline(program, timed, "a title"))


def test_every_instruction_appears_once_and_layers_are_folded():
    program = deep_program()
    found = stages(program, predicted(program).parts)
    seen = [n for s in found for n in s.group.numbers]
    assert sorted(seen) == [n for n, i in enumerate(program.instructions) if not i.traits.given]
    repeated = [s.group for s in found if s.group.repeats > 1]
    assert {g.repeats for g in repeated} == {11, 12}  # the gradient of the first layer ends without a collective
    assert {g.name for g in repeated} == {"layer_#", "layer_# (gradient)"}
    picture = draw_timeline(program, predicted(program), "deep")
    said = [w.text for w in words(picture)]
    assert {"layer_# x 12", "layer_# (gradient) x 11", "compute", "rows", "cols"} <= {*said}
    assert not re.search(
        r"(einsum|tanh|square|add|multiply|reduce_\w+)_\d", " ".join(said) + picture.text
    )  # no einsum_3


def test_time_in_no_instruction_comes_last():
    program = two_layers().program
    timed = Timed("by hand", (Spent(5, "compute", 1e-3), Spent(-1, OTHER, 3e-3)))
    last = stages(program, timed.parts)[-1]
    assert last.rows == {OTHER: 3e-3} and not last.group.numbers
    assert draw_timeline(program, timed).text.splitlines()[-1].strip() == f"75.0% the rest of the step: {OTHER} 3 ms"


def traced(program: Program, path) -> None:
    """Two steps on 4 ranks as a tracer writes them: each call takes 1 ms, rank 3 comes 0.5 ms late to the first."""
    called = [i for i in program.instructions if not i.traits.free]
    calls = []
    for i in called:
        axes = i.attrs.axes if isinstance(i.attrs, Collective) else ()
        calls += [Call(i.kind, axes, i.source.name, "model.py:1", 8, 0)]
    calls.insert(1, Call("advance", (), "", "", 0, 0))
    times = np.tile(np.arange(len(calls) + 1) * 1e-3, (4, 2, 1))
    first = next(k for k, c in enumerate(calls) if c.axes)
    times[3, :, first] += 0.5e-3
    write_trace(Trace(MeshShape("rows:2;cols:2"), tuple(calls), times, 0), path)


def test_a_trace_is_drawn_with_its_waits(tmp_path):
    program, path = two_layers().program, tmp_path / "trace.json.gz"
    traced(program, path)
    timed = recorded(program, path)
    assert timed.about.endswith("the mean of 2 steps on 4 ranks")
    calls = sum(not i.traits.free for i in program.instructions) + 1
    assert sum(s.seconds for s in timed.parts) == pytest.approx(calls * 1e-3)
    (waited,) = (s for s in timed.parts if s.row == WAITING)
    assert isinstance(program.instructions[waited.instruction].attrs, Collective) and 0 < waited.seconds < 0.5e-3
    (other,) = (s for s in timed.parts if s.row == OTHER)
    assert other.seconds == pytest.approx(1e-3)
    assert_legible(draw_timeline(program, timed, "recorded"))
    with pytest.raises(mm.ConfigError, match=r"is not one of this program: its call \d+"):
        recorded(deep_program(2), path)


@pytest.mark.parametrize(
    "content, problem",
    [
        (b"no json", "is not a trace"),
        (gzip.compress(b"{}", mtime=0)[:-9], "is not a trace"),
        (b'{"traceEvents": []}', "has no steps"),
        (b'{"traceEvents": [{"ph": "X"}]}', "is not a trace"),
        (json.dumps({"traceEvents": 3}).encode(), "is not a trace"),
    ],
)
def test_what_is_not_a_trace_is_refused(content: bytes, problem: str, tmp_path):
    (tmp_path / "t.json.gz").write_bytes(content)
    with pytest.raises(mm.ConfigError, match=problem):
        recorded(two_layers().program, tmp_path / "t.json.gz")


@pytest.mark.matrix
def test_the_picture_does_not_depend_on_hashing():
    code = (
        "from tests.drawing.test_program_pictures import *; from meshmpi.drawing import *;"
        "p = deep_program(); import hashlib;"
        "print(hashlib.sha256(draw_timeline(p, predicted(p)).svg().encode()).hexdigest())"
    )
    found = {
        subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1
