"""Machine descriptions as TOML files, and the built-in ones.

Units are seconds, bytes and FLOP, all per rank. Every number is checked when a file is read, because predictions
divide by them and take their logarithms.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshmpi.amounts import bytes_of
from meshmpi.dims import MeshShape
from meshmpi.errors import ConfigError, suggest
from meshmpi.files import cache, plain
from meshmpi.graph.arguments import checked
from meshmpi.ir.kinds import COLLECTIVES
from meshmpi.ir.scalar import DTYPES
from meshmpi.planner.machine import RELATIVE_COSTS, Curve, Machine, Network, ProductRates, operations_from

BUILT_IN = {
    # Assumptions: one core of a server of these years, its share of the memory's bandwidth, ranks in one host.
    "core": """
name = "an assumed core"
[products]
float32 = 50e9
[memory]
bandwidth = 8e9
[operations]
simple = 5e-10
[calls]
instruction = 2e-6
[network]
latency = 3e-6
bandwidth = 3e9
""",
    # 22.5 TFLOP/s a core and 300 GB/s are the paper's time's published figures of a TPUv2 core
    # (45 TFLOP/s and 600 GB/s a chip); links of a 2-D torus of 496 Gbit/s, four a chip.
    "tpuv2": """
name = "TPUv2 core"
memory_bytes = 8589934592
[products]
bfloat16 = 22.5e12
float32 = 22.5e12
[memory]
bandwidth = 300e9
[operations]
simple = 1e-12
[calls]
instruction = 2e-6
[network]
latency = 2e-6
bandwidth = 62e9
""",
}
"""Names that `load_machine` knows."""
_SECTIONS = {
    "products": DTYPES,
    "memory": ("bandwidth", "table"),
    "operations": tuple(RELATIVE_COSTS),
    "calls": ("instruction", "step"),
    "waits": ("table",),
    "network": None,
    "between": None,
}
_NEEDED = ("products", "memory")
_TOP = ("name", "origin", "disturbed", "memory_bytes", "ranks_per_host", *_SECTIONS)
_KEPT = "machines"
"""Folder of the cache.  A description is of a host and a mesh: what a rank can do depends on how many there are."""
_SHORTEST_WAIT = 1e-9
"""What a wait of 0 counts as: between the points of a curve are logarithms."""


@checked
def load_machine(name: str | Path) -> Machine:
    """A machine by the name of a built-in description or the path of a file.

    Raises:
        ConfigError: There is neither, or the file says something else than a machine.

    Example:
        >>> load_machine("tpuv2").peak
        22500000000000.0
    """
    if str(name) in BUILT_IN:
        return parse_machine(BUILT_IN[str(name)], str(name))
    try:
        text = plain.text(name)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not text: {error}.", "Give the file that `meshmpi calibrate` wrote.") from None
    except (OSError, ValueError) as error:  # the latter of a path that no file can have
        raise ConfigError(
            f"there is no machine '{name}': {getattr(error, 'strerror', None) or error}.",
            f"Give the file that `meshmpi calibrate` wrote, or one of: {', '.join(BUILT_IN)}.",
        ) from None
    return parse_machine(text, str(name))


def parse_machine(text: str, place: str) -> Machine:
    """The machine that a TOML text describes.

    Raises:
        ConfigError: Something is missing, unknown, out of range or of the wrong form.
    """
    try:
        given = plain.parse_toml(text)
    except ValueError as error:  # not only of the syntax: of huge integers
        raise ConfigError(f"{place} is not valid TOML: {error}.", "Correct the line named.") from error
    _known(given, _TOP, place)
    sections = {name: _section(given, name, place) for name in _SECTIONS}
    products = {dtype: _rates(value, f"{place} products.{dtype}") for dtype, value in sections["products"].items()}
    if "float32" not in products:
        raise ConfigError(f"{place}: [products] has no float32.", "Give FLOP per second.")
    costs = sections["operations"]
    operations = {kind: _number(v, f"{place} operations.{kind}") for kind, v in costs.items()}
    calls = {k: _number(v, f"{place} calls.{k}", True) for k, v in sections["calls"].items()}
    return Machine(
        _text(given, "name", place, place),
        products,
        _memory(sections["memory"], place),
        operations_from(operations.get("simple", 1e-10), operations),
        calls.get("instruction", 2e-6),
        calls.get("step", 0.0),
        _networks(sections["network"], place),
        _bytes(given.get("memory_bytes", 0), f"{place} memory_bytes"),
        _text(given, "origin", "stated", place),
        _waits(sections["waits"], place) if "waits" in given else None,
        _text(given, "disturbed", "", place),
        _whole(given.get("ranks_per_host", 0), f"{place} ranks_per_host"),
        _network(sections["between"], f"{place} between") if "between" in given else None,
    )


# ---- reading -----------------------------------------------------------------------------------


def _known(values: Mapping[str, Any], keys: Sequence[str], place: str) -> None:
    for key in values:
        if key not in keys:
            raise ConfigError(f"{place}: there is no '{key}'.", suggest(key, keys))


def _section(given: Mapping[str, Any], name: str, place: str) -> Mapping[str, Any]:
    """A section by its name, empty where the file may leave it out; its keys are known ones."""
    if name not in given and name in _NEEDED:
        raise ConfigError(f"{place} has no [{name}].", "Add it; docs/planning.md shows one.")
    section, keys = given.get(name, {}), _SECTIONS[name]
    if not isinstance(section, dict):
        raise ConfigError(
            f"{place} {name} is {reprlib.repr(section)}, which is not a section.",
            f"Write a line [{name}] and its keys below it.",
        )
    if keys:
        _known(section, keys, f"{place} [{name}]")
    return section


def _text(given: Mapping[str, Any], key: str, default: str, place: str) -> str:
    value = given.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{place} {key} is {reprlib.repr(value)}, not text.", "Put it in quotes.")
    return value


def _number(value: Any, place: str, or_zero: bool = False) -> float:
    """A finite number above 0, or 0 where that has a meaning too."""
    kind = "finite number of 0 or more" if or_zero else "finite positive number"
    if value is None:
        raise ConfigError(f"{place} is missing.", f"Give a {kind}.")
    number = -1.0
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf:
        number = float(value) if abs(value) <= sys.float_info.max else -1.0
    if number < 0.0 or (number == 0.0 and not or_zero):
        raise ConfigError(f"{place} is {reprlib.repr(value)}, which is not a {kind}.", f"Give a {kind}.")
    return number


def _whole(value: Any, place: str, least: int = 0) -> int:
    """A whole number, which may be written as 1e6."""
    number = -1.0 if isinstance(value, (str, list, dict)) else _number(value, place, True)
    if number < least or not number.is_integer():
        raise ConfigError(
            f"{place} is {reprlib.repr(value)}, which is not a whole number of {least} or more.",
            f"Give a whole number of {least} or more.",
        )
    return int(number)


def _bytes(value: Any, place: str) -> int:
    """Bytes as a number, 0 where they are not known, or as a text such as ``"1.5 GB"``."""
    return bytes_of(value, place) if isinstance(value, str) else int(_number(value, place, True))


Reader = Callable[[Any, str], Any]
"""Reads an entry of a table; the text is its place, for errors."""
_SIZE: Reader = functools.partial(_whole, least=1)
_OR_ZERO: Reader = functools.partial(_number, or_zero=True)
_RATES = {"m": _SIZE, "n": _SIZE, "k": _SIZE, "FLOP per second": _number}
_BANDWIDTHS = {"bytes": _number, "bytes per second": _number}
_WAITS = {"seconds computed": _number, "seconds waited": _OR_ZERO}
_MESSAGES = {"ranks": functools.partial(_whole, least=2), "bytes": _SIZE, "seconds": _number}


def _rows(value: Any, columns: Mapping[str, Reader], place: str) -> list[tuple[Any, ...]]:
    """The rows of a table as its columns read them; all columns but the last are keys, which ascend."""
    title, keys = ", ".join(columns), ", ".join([*columns][:-1])
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{place} is {reprlib.repr(value)}, which is not a table.", f"Give rows [{title}].")
    rows = list[tuple[Any, ...]]()
    for i, row in enumerate(value, 1):
        if not isinstance(row, list) or len(row) != len(columns):
            raise ConfigError(f"{place} row {i}: {reprlib.repr(row)} is not a row.", f"Write [{title}].")
        entries = zip(row, columns.items(), strict=True)
        rows.append(tuple(read(entry, f"{place} row {i}: {name}") for entry, (name, read) in entries))
    for i, (before, row) in enumerate(itertools.pairwise(rows), 2):
        if row[:-1] <= before[:-1]:
            raise ConfigError(
                f"{place} row {i}: {keys} do not ascend: those of row {i - 1} are not smaller.",
                "Sort the rows, smallest first, and give each once.",
            )
    return rows


def _rates(value: Any, place: str) -> ProductRates:
    if not isinstance(value, list):
        return ProductRates.constant(_number(value, place))
    table = {(m, n, k): rate for m, n, k, rate in _rows(value, _RATES, place)}
    sizes = tuple(sorted({x for key in table for x in key}))
    missing = next((key for key in itertools.product(sizes, repeat=3) if key not in table), None)
    if missing is not None:
        raise ConfigError(
            f"{place} has no rate of m, n, k = {', '.join(map(str, missing))}.", "Give every combination of the sizes."
        )
    return ProductRates(sizes, table)


def _memory(section: Mapping[str, Any], place: str) -> Curve:
    if "table" in section:
        return Curve(tuple(_rows(section["table"], _BANDWIDTHS, f"{place} memory.table")))
    return Curve(((1.0, _number(section.get("bandwidth"), f"{place} memory.bandwidth")),))


def _waits(section: Mapping[str, Any], place: str) -> Curve:
    if "table" not in section:
        raise ConfigError(f"{place} waits.table is missing.", f"Give rows [{', '.join(_WAITS)}].")
    rows = _rows(section["table"], _WAITS, f"{place} waits.table")
    return Curve(tuple((at, max(_SHORTEST_WAIT, y)) for at, y in rows))


def _networks(section: Mapping[str, Any], place: str) -> dict[str, Network]:
    own = {k: v for k, v in section.items() if not isinstance(v, dict) or k in COLLECTIVES}
    tables = {k: v for k, v in section.items() if k not in own}
    out = {} if not own else {"": _network(own, f"{place} network")}
    for axes, values in tables.items():
        out[axes] = _network(values, f"{place} network.{axes}")
    return out


def _network(values: Mapping[str, Any], place: str) -> Network:
    _known(values, ("latency", "bandwidth", *COLLECTIVES), place)
    given = [kind for kind in COLLECTIVES if kind in values]
    measured = {kind: _rows(values[kind], _MESSAGES, f"{place}.{kind}") for kind in given}
    latency = _number(values.get("latency"), f"{place}.latency")
    return Network(latency, _number(values.get("bandwidth"), f"{place}.bandwidth"), measured)


# ---- writing -----------------------------------------------------------------------------------


def machine_text(machine: Machine) -> str:
    """The file of a machine; `parse_machine` reads it back."""
    lines = [
        f"name = {_quoted(machine.name)}",
        f"origin = {_quoted(machine.origin)}",
        *([f"disturbed = {_quoted(machine.disturbed)}"] if machine.disturbed else []),
        f"memory_bytes = {machine.memory_bytes}",
        *([f"ranks_per_host = {machine.ranks_per_host}"] if machine.ranks_per_host else []),
    ]
    products = list[str]()
    for dtype, rates in machine.products.items():
        if len(rates.rates) == 1:
            products.append(f"{dtype} = {next(iter(rates.rates.values())):.4g}")
        else:
            products += _table(dtype, [[*size, rate] for size, rate in sorted(rates.rates.items())])
    calls = {"instruction": machine.call, "step": machine.step}
    sections = {
        "products": ["# rows of m, n, k, FLOP per second", *products],
        "memory": ["# rows of bytes touched, bytes per second", *_table("table", machine.memory.points)],
        "operations": ["# seconds for one float32 element", *_numbers(machine.operations)],
        "calls": ["# seconds", *_numbers(calls)],
    }
    if machine.waits is not None:
        waits = "# rows of seconds computed since the last collective, waited"
        sections["waits"] = [waits, *_table("table", machine.waits.points)]
    networks = {f"network.{_quoted(axes)}" if axes else "network": n for axes, n in machine.networks.items()}
    for section, network in (networks | ({"between": machine.between} if machine.between else {})).items():
        sections[section] = _numbers({"latency": network.latency, "bandwidth": network.bandwidth})
        for kind, rows in network.measured.items():
            # short messages are rounded up to the ranks: of large meshes several are the same
            once = {row[:2]: row for row in reversed(rows)}
            table = _table(kind, [once[key] for key in sorted(once)])
            sections[section] += ["# rows of ranks, bytes handed, seconds", *table]
    for section, body in sections.items():
        lines += ["", f"[{section}]", *body]
    return "\n".join(lines) + "\n"


def _numbers(values: Mapping[str, float]) -> list[str]:
    return [f"{name} = {value:.4g}" for name, value in values.items()]


def _quoted(text: str) -> str:
    """A TOML string: those of JSON, but for one character that JSON leaves as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _table(name: str, rows: Sequence[Sequence[float]]) -> list[str]:
    """Rows, of whose last column four digits are enough; those before tell rows apart."""

    def text(row: Sequence[float]) -> str:
        *keys, last = [int(x) if float(x).is_integer() else float(x) for x in row]
        return ", ".join([*map(repr, keys), str(last) if isinstance(last, int) else f"{last:.4g}"])

    return [f"{name} = [", *(f"  [{text(row)}]," for row in rows), "]"]


# ---- keeping ------------------------------------------------------------------------------------


def keep_machine(machine: Machine, mesh: MeshShape) -> Path:
    """Keeps what `meshmpi calibrate` measured on this host with a mesh; returns its file, in the cache.

    Raises:
        DataError, OSError: The cache has no folder, or no room.
    """
    with cache.opened(_KEPT) as folder:
        cache.write_sealed(folder, _kept_name(mesh), machine_text(machine).encode())
        return folder.path / _kept_name(mesh)


def find_machine(name: str, mesh: MeshShape) -> Machine | None:
    """A machine by name or path; without one that of this host and mesh, if it was measured.

    One of the cache that is damaged, or was changed by hand, is not used, and a line says so.

    Raises:
        ConfigError: The name or file is not a machine.
    """
    if name:
        return load_machine(name)
    with cache.opened(_KEPT) as folder:
        path, data = folder.path / _kept_name(mesh), cache.read_sealed(folder, _kept_name(mesh))
        if data is None and folder.has(_kept_name(mesh)):
            cache.tell(
                f"{path} is not as `meshmpi calibrate` wrote it, and is not used: calibrate again,"
                " or name the file in the option for the machine"
            )
    return None if data is None else parse_machine(data.decode(), str(path))


def _kept_name(mesh: MeshShape) -> str:
    axes = "-".join(f"{a}{n}" for a, n in mesh.axes) or "one"
    return f"{os.uname().nodename}-{axes}.toml"
