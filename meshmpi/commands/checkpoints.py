"""`meshmpi checkpoint ls | verify | diff | convert | export`: checkpoints as files, without MPI."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from meshmpi.checkpoint import Manifest, read_manifest, tools
from meshmpi.checkpoint.manifest import size_problem
from meshmpi.commands.command import Command, Options, answer, argument, group
from meshmpi.dims import Layout, MeshShape
from meshmpi.errors import CheckpointError


def _newest(path: Path) -> Manifest:
    return read_manifest(tools.checkpoints_of(path)[0])


def _ls(options: Options) -> int:
    rows: list[tuple[str, ...]] = [("checkpoint", "written", "MB", "files", "mesh", "split", "state")]
    found: list[dict[str, Any]] = []
    for path in tools.checkpoints_of(options.run):
        data: dict[str, Any] = {"checkpoint": str(path)}
        try:
            m = read_manifest(path)
            problem = size_problem(m)
            written, size = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(m.time)), f"{m.data_bytes / 1e6:.3g}"
            known = (written, size, str(len(m.files)), str(m.mesh), m.split() or "-")
            data |= {"step": m.step, "written": m.time, "bytes": m.data_bytes, "files": len(m.files)}
            data |= {"mesh": str(m.mesh), "split": m.split()}
        except CheckpointError as error:
            problem, known = error.problem, ("",) * 5
        found.append(data | {"problem": problem})
        rows.append((path.name, *known, problem or "all files present"))
    widths = [max(len(r[k]) for r in rows) for k in range(6)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(r, widths, strict=False)), r[6]]) for r in rows]
    answer(options, "\n".join(lines), {"checkpoints": found})
    return int(any(data["problem"] for data in found))


def _verify(options: Options) -> int:
    checked: list[dict[str, Any]] = []
    for path in tools.checkpoints_of(options.checkpoint):
        began = time.perf_counter()
        try:
            manifest = read_manifest(path)
            found = list(tools.problems(manifest))
        except CheckpointError as error:
            manifest, found = None, [error.problem]
        checked.append({"checkpoint": str(path), "problems": found})
        if found or manifest is None:
            print("\n  ".join([f"{path}: DAMAGED", *found]))
            continue
        size, seconds = manifest.data_bytes / 1e6, time.perf_counter() - began
        print(f"{path}: whole, {len(manifest.tensors)} tensors, {size:.3g} MB in {seconds:.2f} s")
    answer(options, "", {"checkpoints": checked})
    return int(any(one["problems"] for one in checked))


def _diff(options: Options) -> int:
    a, b = _newest(options.a), _newest(options.b)
    found = list(tools.differences(a, b))
    both = a.tensors.keys() & b.tensors.keys()
    same = len(both) - sum(d.name in both for d in found)
    lines = [f"{a.folder} (step {a.step}) and {b.folder} (step {b.step}): {same} tensors bit-equal"]
    found.sort(key=lambda d: (not d.what, not math.isnan(d.largest), -d.largest))
    width = max((len(d.name) for d in found), default=0)
    for d in found[: options.rows]:
        what = d.what or (f"{d.different} of {d.elements} elements differ, by {d.largest:.3g} at most")
        lines.append(f"  {d.name:{width}}  {what}")
    if len(found) > options.rows:
        lines.append(f"  and {len(found) - options.rows} more (--rows)")
    answer(options, "\n".join(lines), {"equal": same, "differences": [d._asdict() for d in found]})
    return int(bool(found))


def _convert(options: Options) -> int:
    manifest, mesh = _newest(options.source), MeshShape(options.mesh)
    path = tools.convert(manifest, options.folder, mesh, Layout(options.layout), Layout(options.storage))
    count = len(manifest.tensors)
    answer(options, f"wrote {path}: {count} tensors for mesh {mesh}", {"wrote": str(path), "tensors": count})
    return 0


def _export(options: Options) -> int:
    count = tools.export(_newest(options.source), options.file, options.only, options.without)
    answer(options, f"wrote {options.file}: {count} tensors", {"wrote": str(options.file), "tensors": count})
    return 0


_ONE = "a checkpoint, or a run (its newest checkpoint is taken)"
_SOURCE = argument("source", Path, _ONE)
_LS = (argument("run", Path, "folder of a run, or of checkpoints"),)
_VERIFY = (argument("checkpoint", Path, "a checkpoint, or a run (all its checkpoints)"),)
_DIFF = (
    argument("a", Path, _ONE),
    argument("b", Path, _ONE),
    argument("--rows", int, "rows of the table, largest difference first", 20),
)
_CONVERT = (
    _SOURCE,
    argument("folder", Path, "folder for the new step-..."),
    argument("--mesh", str, "axes and sizes, such as rows:2;cols:2; default: one file", "all:1"),
    argument("--layout", str, "dimensions and their axes, such as d_ff:cols", ""),
    argument("--storage", str, "storage rules, which override those of the layout", ""),
)
_EXPORT = (
    _SOURCE,
    argument("file", Path, "the file to write"),
    argument("--only", list, "export only names that match, such as 'layer_*'", metavar="PATTERN"),
    argument("--without", list, "leave out names that match, such as '*adam*'", metavar="PATTERN"),
)
_EXPORTS = "write whole tensors into one safetensors file; for Hugging Face names see meshmpi export"
_JSON = ("json",)
_ACTIONS = (
    Command("ls", _ls, "list the checkpoints of a run, and whether all files are there", _LS, _JSON),
    Command("verify", _verify, "read every byte; exit status 1 on damage", _VERIFY, _JSON),
    Command("diff", _diff, "compare two checkpoints, tensor by tensor; status 1 if they differ", _DIFF, _JSON),
    Command("convert", _convert, "rewrite a checkpoint, split over another mesh", _CONVERT, _JSON),
    Command("export", _export, _EXPORTS, _EXPORT, _JSON),
)
COMMANDS = (group("checkpoint", "list, verify, compare, re-split and export checkpoints", _ACTIONS),)
