"""The building itself: who may import whom, sizes, and what the source must not contain."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.house import LONGEST_FILE, LONGEST_FUNCTION, functions

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "meshmpi"
FILES = sorted(PACKAGE.rglob("*.py"))

_GRAPH = ["errors", "hashes", "amounts", "dims", "ir", "values", "graph"]
_RUN = ["version", *_GRAPH, "job", "files", "compiler", "kernels", "nn", "runtime", "api"]
MAY_IMPORT = {
    # core: what is computed, and how
    "errors": [],
    "version": [],
    "amounts": ["errors"],
    "hashes": [],
    "job": [],
    "dims": ["errors"],
    "files": ["errors", "hashes", "job"],
    "ir": ["errors", "hashes", "dims"],
    "values": ["errors", "dims", "ir"],
    "validated": ["errors"],
    "graph": ["errors", "dims", "ir", "values"],
    "compiler": _GRAPH,
    "kernels": ["errors", "hashes", "dims", "ir", "files"],
    "nn": _GRAPH,
    "runtime": [*_GRAPH, "job", "files", "compiler", "kernels", "nn"],
    "api": [*_GRAPH, "compiler", "runtime"],
    # services: what one wants of a program besides running it
    "guard": ["errors", "hashes", "job", "dims", "files", "runtime"],
    "launch": ["errors", "job", "files", "runtime", "guard"],
    "planner": _RUN,
    "checking": _RUN,
    "extend": [*_RUN, "checking"],
    "drawing": [*_RUN, "planner"],
    "checkpoint": _RUN,
    "data": [*_RUN],
    "training": [*_RUN, "validated", "guard", "planner", "checking", "checkpoint"],
    "doctor": ["errors", "amounts", "version", "job", "dims", "files", "kernels", "runtime", "guard", "launch"],
    # product: Transformers
    "transformer": [*_RUN, "validated", "guard", "launch", "planner", "checking", "checkpoint", "training"],
}
"""Room -> rooms it may import besides itself, inside functions and for type checking too."""
FRONT = ("__init__", "__main__", "cli", "commands")
"""These see all floors, and nobody sees them."""
FINER = {
    "meshmpi.compiler.passes": ("meshmpi.graph", "meshmpi.compiler.lowering"),
    "meshmpi.ir": ("numpy",),
    "meshmpi.graph": ("numpy",),
    "meshmpi.compiler": ("numpy",),
    "meshmpi.nn": ("numpy",),
    "meshmpi.transformer.text": tuple(
        f"meshmpi.transformer.{room}"
        for room in ("decoding", "models", "pretrained", "tasks", "training", "translation")
    ),
}
"""Where there are only names, nobody imports arrays; a pass sees programs, not where they come from."""
STANDING: dict[str, list[str]] = {}
"""What still climbs; nothing may be added."""


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


MODULES = {_module(path): path for path in FILES}


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, wherever in the file."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (whole if whole in MODULES else str(node.module)), node.lineno


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _climbs() -> Iterator[str]:
    for path in FILES:
        room, module = _room(path), _module(path)
        for name, line in _imports(path):
            parts = name.split(".")
            where = f"{_name(path)}:{line} imports {name}"
            if parts[0] == "tests" or (parts[0] == "mpi4py" and room != "runtime"):
                yield where
            elif parts[0] == "meshmpi" and room not in FRONT:
                other = parts[1] if len(parts) > 1 else "__init__"
                if other != room and other not in MAY_IMPORT[room]:
                    yield where
            for inside, forbidden in FINER.items():
                if f"{module}.".startswith(f"{inside}.") and f"{name}.".startswith(tuple(f"{f}." for f in forbidden)):
                    yield where


def test_every_room_has_a_rule():
    assert {_room(path) for path in FILES} - set(FRONT) == set(MAY_IMPORT)


def test_imports_go_one_way():
    allowed = {f"{file} imports {name}" for file, names in STANDING.items() for name in names}
    found = {re.sub(r":\d+ ", " ", line): line for line in _climbs()}
    assert sorted(line for key, line in found.items() if key not in allowed) == []
    assert sorted(allowed - set(found)) == [], "no longer climbs: take it from STANDING"


def test_rooms_have_an_order():
    """No room sees, by whatever way, a room that sees it."""
    sees = {room: {*names} for room, names in MAY_IMPORT.items()}
    for _ in sees:
        sees = {room: names.union(*(sees[n] for n in names)) for room, names in sees.items()}
    assert [room for room, names in sees.items() if room in names] == []


def _reached(edges: dict[str, set[str]], start: str) -> set[str]:
    reached, waiting = set[str](), [start]
    while waiting:
        fresh = edges[waiting.pop()] - reached
        reached |= fresh
        waiting.extend(fresh)
    return reached


def test_no_two_files_import_each_other():
    edges = {m: {n for n, _ in _imports(path) if n in MODULES and n != m} for m, path in MODULES.items()}
    found = sorted(m for m in edges if m in _reached(edges, m))
    assert found == []


def test_sizes():
    large = []
    for path in FILES:
        name = str(path.relative_to(PACKAGE))
        lines = path.read_text().count("\n")
        large += [f"{name} has {lines} lines"] if lines > LONGEST_FILE else []
        for function, n in functions(_tree(path)):
            if n > LONGEST_FUNCTION:
                large.append(f"{name}: {function}() has {n} lines")
    assert large == []


def test_modules_say_what_they_are():
    assert [_name(path) for path in FILES if not ast.get_docstring(_tree(path))] == []
    assert [_name(path) for path in FILES if path.name == "utils.py"] == []


# -- no order that depends on hashing --------------------------------------------------------------

_ORDERLESS = {"any", "all", "sorted", "sum", "min", "max", "len", "set", "frozenset", "bool"}


def _is_set(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, (ast.Set, ast.SetComp)):
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("set", "frozenset")
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.Sub, ast.BitXor)):
        return _is_set(node.left, names) or _is_set(node.right, names)
    return isinstance(node, ast.Name) and node.id in names


def _set_names(scope: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and _is_set(node.value, names):
            names.update(t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and len(target.elts) == len(node.value.elts):
                    for t, v in zip(target.elts, node.value.elts, strict=True):
                        if isinstance(t, ast.Name) and _is_set(v, names):
                            names.add(t.id)
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("set["):
            names.update(n.id for n in [node.target] if isinstance(n, ast.Name))
    return names


def _iterations_over_sets(tree: ast.Module) -> Iterator[int]:
    for scope in ast.walk(tree):
        if not isinstance(scope, (ast.FunctionDef, ast.Module)):
            continue
        names = _set_names(scope) if isinstance(scope, ast.FunctionDef) else set()
        harmless = {
            a
            for node in ast.walk(scope)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ORDERLESS
            for a in node.args
        }
        for node in ast.walk(scope):
            if isinstance(node, ast.For) and _is_set(node.iter, names):
                yield node.lineno
            elif isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.DictComp)) and node not in harmless:
                if any(_is_set(g.iter, names) for g in node.generators):
                    yield node.lineno
            elif isinstance(node, ast.Call) and node not in harmless:
                ordering = isinstance(node.func, ast.Name) and node.func.id in ("list", "tuple", "enumerate")
                joining = isinstance(node.func, ast.Attribute) and node.func.attr in ("join", "extend", "fromkeys")
                if (ordering or joining) and any(_is_set(a, names) for a in node.args):
                    yield node.lineno
            elif isinstance(node, ast.Starred) and _is_set(node.value, names):
                yield node.value.lineno


def test_the_check_for_sets_finds_what_it_looks_for():
    source = (
        "def f(xs):\n    s = set(xs)\n    for x in s:\n        pass\n    a = [x for x in {1, 2}]\n"
        "    b = list(s | {3})\n    c = [*s]\n    ok = sorted(s) + [any(x for x in s)]\n"
        "    return {x for x in s}\n"
    )
    assert sorted(dict.fromkeys(_iterations_over_sets(ast.parse(source)))) == [3, 5, 6, 7]


def _uses_of_addresses(path: Path) -> Iterator[int]:
    if _room(path) in ("kernels", "runtime"):
        return  # behind the program: an address may be a key, nothing is ordered any more
    tree = _tree(path)
    hashes = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name == "__hash__" for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node not in hashes and ast.unparse(node.func) in ("id", "hash"):
            yield node.lineno


def test_nothing_is_ordered_by_a_set_or_by_addresses():
    sets = {_name(p): sorted(dict.fromkeys(_iterations_over_sets(_tree(p)))) for p in FILES}
    assert {name: lines for name, lines in sets.items() if lines} == {}, "iterates over a set"
    assert {_name(p): lines for p in FILES if (lines := [*_uses_of_addresses(p)])} == {}, "calls id() or hash()"


def test_no_error_is_swallowed():
    swallowed = []
    for path in FILES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ExceptHandler):
                silent = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
                if node.type is None or silent:
                    swallowed.append(f"{_name(path)}:{node.lineno}")
    assert swallowed == []


# -- what a fresh interpreter shows ----------------------------------------------------------------


def _python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_meshmpi_starts_nothing():
    code = (
        "import sys, meshmpi\n"
        "late = ('mpi4py', 'opt_einsum', 'matplotlib', 'sentencepiece')\n"
        "print([m for m in late if m in sys.modules])"
    )
    assert _python(code).strip() == "[]"


def test_a_rank_reads_what_its_program_needs():
    code = (
        "import sys, meshmpi as mm\n"
        "with mm.Graph() as graph:\n"
        "    y = mm.relu(mm.einsum([mm.ones('a:2;b:2'), mm.ones('b:2;c:2')], 'a:2;c:2'))\n"
        "mm.compile(graph, mm.SimulatedMesh('rows:2'), 'a:rows', fetches=[y])()\n"
        "late = ('nn.attention', 'nn.experts', 'nn.layers', 'kernels.patches', 'kernels.tiled', 'kernels.ranking')\n"
        "print([m for m in sys.modules if m.removeprefix('meshmpi.') in late or m == 'concurrent.futures'])"
    )
    assert _python(code).strip() == "[]"


def test_the_table_of_late_layers_is_what_type_checkers_read():
    from meshmpi import nn

    tree = _tree(PACKAGE / "nn/__init__.py")
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module.startswith("meshmpi.nn.")]
    read = {n.module.removeprefix("meshmpi.nn."): [a.name for a in n.names] for n in imports}
    assert {home: names.split() for home, names in nn._HOMES.items()} == read
    assert all(hasattr(nn, name) for name in nn.__all__)
    assert not any(hasattr(nn, name) for name in ("denser", "_HOME"))
    names: dict[str, object] = {}
    exec("from meshmpi import *", names)
    assert {*nn.__all__, "einsum", "Graph", "nn"} <= set(names)


def test_planning_needs_neither_mpi_nor_arrays():
    code = (
        "import sys, meshmpi as mm\n"
        "with mm.Graph() as g:\n"
        "    x = mm.placeholder('x', 'a:1000000;b:1000000')\n"
        "    w = mm.get_variable('w', 'b:1000000;c:1000000')\n"
        "    y = mm.reduce_sum(mm.einsum([x, w], 'a:1000000;c:1000000'))\n"
        "print(mm.plan(g, 'rows:64;cols:64', 'a:rows;c:cols', fetches=[y]).cost.bytes_sent > 0)\n"
        "print('mpi4py' in sys.modules)"
    )
    assert _python(code).split() == ["True", "False"]


_DIGESTS = """
import meshmpi as mm
from tests.layouts import legal_layouts
from tests.ops.build import UNEVEN, build
from tests.ops.cases import CASES
from tests.ops.run import fetched
shape = mm.MeshShape("rows:2;cols:3")
for case in CASES[::5] + [c for c in CASES if c.name == "attention_by_hand"]:
    built = build(case, UNEVEN)
    for layout in legal_layouts(built.graph, shape, 3):
        try:
            wanted = {"fetches": fetched(built, False), "updates": built.updates}
            p = mm.plan(built.graph, shape, layout, **wanted)
        except mm.LayoutError:
            continue
        print(case.name, layout, p.program.digest(), p.cost.peak_memory)
"""


def test_programs_do_not_depend_on_hash_seeds():
    texts = [_python(_DIGESTS, PYTHONHASHSEED=seed) for seed in ("0", "1", "17", "4242")]
    assert texts[0].count("\n") > 40
    assert texts[1:] == texts[:1] * 3
