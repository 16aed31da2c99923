"""Machine descriptions as TOML files, and those that come with meshmpi.

A file written by hand may be short; `meshmpi calibrate` writes tables.  Units are seconds, bytes
and FLOP, all per rank.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshmpi.errors import ConfigError, suggest
from meshmpi.planner.machine import (
    KINDS,
    RELATIVE_COSTS,
    Curve,
    Machine,
    Network,
    ProductRates,
    operations_from,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

BUILT_IN = {
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
    "products": None, "memory": ("bandwidth", "table"), "operations": tuple(RELATIVE_COSTS),
    "calls": ("instruction", "step"), "waits": ("table",), "network": None,
}  # fmt: skip
_TOP = ("name", "origin", "memory_bytes", *_SECTIONS)


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
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"there is no machine '{name}': {error.strerror}.",
            f"Give the file that `meshmpi calibrate` wrote, or one of: {', '.join(BUILT_IN)}.",
        ) from None
    return parse_machine(text, str(name))


def parse_machine(text: str, place: str) -> Machine:
    """The machine that a TOML text describes.

    Raises:
        ConfigError: Of what is missing, unknown or no positive number.
    """
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{place} is not valid TOML: {error}.", "Correct the line named."
        ) from error
    _known(given, _TOP, place)
    for section, keys in _SECTIONS.items():
        if section not in given and section in ("products", "memory"):
            raise ConfigError(f"{place} has no [{section}].", "Add it; docs/planning.md shows one.")
        if keys:
            _known(given.get(section, {}), keys, f"{place} [{section}]")
    products = {
        dtype: _rates(value, f"{place} products.{dtype}")
        for dtype, value in given["products"].items()
    }
    if "float32" not in products:
        raise ConfigError(f"{place}: [products] has no float32.", "Give FLOP per second.")
    operations = given.get("operations", {})
    simple = _number(operations.get("simple", 1e-10), f"{place} operations.simple")
    calls = given.get("calls", {})
    return Machine(
        str(given.get("name", place)), products, _memory(given["memory"], place),
        operations_from(simple, {k: float(v) for k, v in operations.items()}),
        float(calls.get("instruction", 2e-6)), float(calls.get("step", 0.0)),
        _networks(given.get("network", {}), place), int(given.get("memory_bytes", 0)),
        str(given.get("origin", "stated")),
        _curve(given["waits"], f"{place} waits") if "waits" in given else None,
    )  # fmt: skip


def _known(values: Mapping[str, Any], keys: Sequence[str], place: str) -> None:
    for key in values:
        if key not in keys:
            raise ConfigError(f"{place}: there is no '{key}'.", suggest(key, keys))


def _number(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ConfigError(f"{place} is {value!r}.", "Give a positive number.")
    return float(value)


def _rates(value: Any, place: str) -> ProductRates:
    if not isinstance(value, list):
        return ProductRates.constant(_number(value, place))
    table = {}
    for row in value:
        if not isinstance(row, list) or len(row) != 4:
            raise ConfigError(f"{place}: {row!r} is no row.", "Write [m, n, k, FLOP per second].")
        table[tuple(int(x) for x in row[:3])] = _number(row[3], place)
    sizes = tuple(sorted({m for m, _, _ in table}))
    missing = [(m, n, k) for m in sizes for n in sizes for k in sizes if (m, n, k) not in table]
    if missing or not sizes:
        raise ConfigError(
            f"{place} has no rate of m, n, k = {missing[0] if missing else '...'}.",
            "Give every combination of the sizes.",
        )
    return ProductRates(sizes, table)


def _memory(section: Mapping[str, Any], place: str) -> Curve:
    if "table" in section:
        return _curve(section, f"{place} memory")
    return Curve(((1.0, _number(section.get("bandwidth"), f"{place} memory.bandwidth")),))


def _curve(section: Mapping[str, Any], place: str) -> Curve:
    rows = section.get("table", ())
    if not rows:
        raise ConfigError(f"{place} has no table.", "Give rows of two numbers.")
    return Curve(tuple(sorted((float(at), _number(y, f"{place}.table")) for at, y in rows)))


def _networks(section: Mapping[str, Any], place: str) -> dict[str, Network]:
    own = {k: v for k, v in section.items() if not isinstance(v, dict) or k in KINDS}
    tables = {k: v for k, v in section.items() if k not in own}
    out = {} if not own else {"": _network(own, f"{place} network")}
    for axes, values in tables.items():
        out[axes] = _network(values, f"{place} network.{axes}")
    return out


def _network(values: Mapping[str, Any], place: str) -> Network:
    _known(values, ("latency", "bandwidth", *KINDS), place)
    measured = {}
    for kind in KINDS:
        rows = [(int(r), int(b), _number(s, f"{place}.{kind}")) for r, b, s in values.get(kind, ())]
        if rows:
            measured[kind] = sorted(rows)
    latency = _number(values.get("latency"), f"{place}.latency")
    return Network(latency, _number(values.get("bandwidth"), f"{place}.bandwidth"), measured)


def machine_text(machine: Machine) -> str:
    """The file of a machine; `parse_machine` reads it back."""
    lines = [
        f'name = "{machine.name}"', f'origin = "{machine.origin}"',
        f"memory_bytes = {machine.memory_bytes}", "", "[products]",
        "# rows of m, n, k, FLOP per second",
    ]  # fmt: skip
    for dtype, rates in machine.products.items():
        if len(rates.rates) == 1:
            lines.append(f"{dtype} = {next(iter(rates.rates.values())):.4g}")
        else:
            lines += _table(dtype, [[*size, rate] for size, rate in rates.rates.items()])
    lines += ["", "[memory]", "# rows of bytes touched, bytes per second"]
    lines += _table("table", machine.memory.points)
    lines += ["", "[operations]", "# seconds for one float32 element"]
    lines += [f"{name} = {seconds:.4g}" for name, seconds in machine.operations.items()]
    lines += ["", "[calls]", "# seconds"]
    lines += [f"instruction = {machine.call:.4g}", f"step = {machine.step:.4g}"]
    if machine.waits is not None:
        lines += ["", "[waits]", "# rows of seconds computed since the last collective, waited"]
        lines += _table("table", machine.waits.points)
    for axes, network in machine.networks.items():
        lines += ["", f'[network."{axes}"]' if axes else "[network]"]
        lines += [f"latency = {network.latency:.4g}", f"bandwidth = {network.bandwidth:.4g}"]
        for kind, rows in network.measured.items():
            lines += ["# rows of ranks, bytes handed, seconds", *_table(kind, rows)]
    return "\n".join(lines) + "\n"


def _table(name: str, rows: Sequence[Sequence[float]]) -> list[str]:
    def text(x: float) -> str:
        return str(int(x)) if float(x).is_integer() else f"{x:.4g}"

    return [f"{name} = [", *(f"  [{', '.join(map(text, row))}]," for row in rows), "]"]
