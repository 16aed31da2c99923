"""Descriptions of machines: interpolation, networks, files."""

import ast
import math

import pytest

from meshmpi.amounts import bytes_of
from meshmpi.dims import MeshShape
from meshmpi.errors import ConfigError
from meshmpi.ir.kinds import COLLECTIVES, bytes_sent
from meshmpi.planner.machine import Curve, Network, ProductRates, rounds
from meshmpi.planner.machine_file import BUILT_IN, load_machine, machine_text, parse_machine
from tests.planner.build import machine

MESH = MeshShape("a:4;rows:2;cols:2")
SHORT = """
[products]
float32 = 1e11
[memory]
bandwidth = 1e10
[network]
latency = 1e-6
bandwidth = 1e9
"""


def test_a_curve_is_straight_between_logarithms_and_flat_beyond():
    curve = Curve(((10.0, 100.0), (1000.0, 1.0)))
    assert curve(10) == 100 and curve(1000) == 1
    assert curve(100) == pytest.approx(10)
    assert curve(1) == 100 and curve(1e9) == 1


def test_rates_of_products_meet_the_table_at_its_points():
    sizes = (8, 64, 512)
    table = {(m, n, k): 1e9 * m * n**0.5 * k**0.25 for m in sizes for n in sizes for k in sizes}
    rates = ProductRates(sizes, table)
    for key, rate in table.items():
        assert rates(*key) == pytest.approx(rate)
    # powers are straight lines between logarithms
    assert rates(20, 100, 300) == pytest.approx(1e9 * 20 * 100**0.5 * 300**0.25)
    assert rates(1, 1e6, 64) == pytest.approx(table[8, 512, 64])


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_network_by_latency_and_bandwidth(kind):
    network = Network(2e-6, 1e9)
    assert network.seconds(kind, 4096, 1) == 0.0
    for n in (2, 3, 8, 512):
        wanted = rounds(kind, n) * 2e-6 + bytes_sent(kind, 4096, 1, n) / 1e9
        assert network.seconds(kind, 4096, n) == pytest.approx(wanted)


def test_a_measured_network_gives_back_what_was_measured():
    rows = [(4, 64, 1e-6), (4, 4096, 2e-6), (4, 1 << 20, 1e-3)]
    network = Network(1e-6, 1e9, {"all_reduce": rows})
    for _, handed, seconds in rows:
        assert network.seconds("all_reduce", handed, 4) == pytest.approx(seconds, rel=1e-6)
    # beyond the longest message in proportion; kinds without rows by the formula
    assert network.seconds("all_reduce", 1 << 22, 4) == pytest.approx(4e-3, rel=1e-6)
    assert network.seconds("all_gather", 1000, 4) == pytest.approx(2e-6 + 3000 / 1e9)
    # more ranks send more and take more rounds
    assert network.seconds("all_reduce", 1 << 20, 64) > network.seconds("all_reduce", 1 << 20, 4)


def test_the_network_of_several_axes_is_its_own_or_the_slowest():
    fast, slow, both = Network(1e-6, 1e10), Network(1e-6, 1e9), Network(1e-6, 5e8)
    networks = {"rows": fast, "cols": slow}
    assert machine(networks=networks).network(MESH, ("rows", "cols")) is slow
    assert machine(networks={**networks, "rows+cols": both}).network(MESH, ("rows", "cols")) is both
    with pytest.raises(ConfigError, match="no network for mesh axis 'rows'"):
        machine(networks={"cols": slow}).network(MESH, ("rows",))


LEVELS = (
    SHORT
    + """
[between]
latency = 1e-4
bandwidth = 1e7
"""
)


def test_axes_between_hosts_are_priced_by_their_own_level():
    """Hosts of two ranks: ``cols`` is inside of one, ``rows`` and ``a`` are not."""
    machine = parse_machine("ranks_per_host = 2\n" + LEVELS, "levels")
    again = parse_machine(machine_text(machine), "again")
    for m in (machine, again):
        inside = m.network(MESH, ("cols",))
        assert inside.bandwidth == 1e9 and m.network(MESH, ("rows",)).bandwidth == 1e7
        assert m.network(MESH, ("rows", "cols")) is m.between is m.network(MESH, ("a",))
        assert m.network(MeshShape("rows:2"), ("rows",)) is inside
    four = parse_machine("ranks_per_host = 4\n" + LEVELS, "levels")
    assert four.network(MESH, ("rows", "cols")).bandwidth == 1e9 and four.network(MESH, ("a",)).bandwidth == 1e7
    uneven = parse_machine("ranks_per_host = 3\n" + LEVELS, "levels")
    assert uneven.network(MESH, ("cols",)).bandwidth == 1e7  # ranks 2 and 3


def test_collectives_between_hosts_are_priced_by_lanes():
    machine = parse_machine("ranks_per_host = 2\n" + LEVELS, "levels")
    inside, between = machine.networks[""], machine.between
    assert between is not None
    here = inside.seconds("reduce_scatter", 8000, 2) + inside.seconds("all_gather", 8000, 2)
    by_lanes = here + between.seconds("all_reduce", 4000, 2)
    assert machine.collective(MESH, ("rows", "cols"), "all_reduce", 8000) == pytest.approx(by_lanes)
    by_lanes = between.seconds("all_gather", 8000, 2) + inside.seconds("all_gather", 16000, 2)
    assert machine.collective(MESH, ("rows", "cols"), "all_gather", 8000) == pytest.approx(by_lanes)
    by_lanes = inside.seconds("reduce_scatter", 8000, 2) + between.seconds("reduce_scatter", 4000, 2)
    assert machine.collective(MESH, ("rows", "cols"), "reduce_scatter", 8000) == pytest.approx(by_lanes)
    assert machine.collective(MESH, ("rows",), "all_reduce", 8000) == between.seconds("all_reduce", 8000, 2)
    assert machine.collective(MESH, ("cols",), "all_reduce", 8000) == inside.seconds("all_reduce", 8000, 2)
    assert machine.collective(MESH, ("rows", "cols"), "all_to_all", 8000) == between.seconds("all_to_all", 8000, 4)


def test_a_single_host_does_not_price_a_mesh_of_many():
    machine = parse_machine("ranks_per_host = 4\n" + SHORT, "one host")
    assert machine.network(MeshShape("rows:2;cols:2"), ("rows", "cols")).bandwidth == 1e9
    with pytest.raises(ConfigError, match=r"no network between hosts, which mesh .* needs over a.*\[between\]"):
        machine.network(MESH, ("a",))


@pytest.mark.parametrize("name", [*BUILT_IN, "short"])
def test_a_file_is_read_back(name):
    machine = parse_machine(SHORT, "short") if name == "short" else load_machine(name)
    again = parse_machine(machine_text(machine), "again")
    assert again.name == machine.name and again.peak == machine.peak
    assert again.operations == pytest.approx(machine.operations, rel=1e-3)
    for size in (64, 1 << 20):
        assert again.memory(size) == pytest.approx(machine.memory(size), rel=1e-3)
        assert again.network(MESH, ("a",)).seconds("all_reduce", size, 8) == pytest.approx(
            machine.network(MESH, ("a",)).seconds("all_reduce", size, 8), rel=1e-3
        )


MISTAKES = [
    # a place @ in a file, what a message begins with; what stands there -> how the message goes on
    (
        f"@\n{SHORT[SHORT.index('[memory]') :]}",
        "",
        {
            "products = 5": " products is 5, which is not a section. Write a line [products] and its",
            "[[products]]": " products is [{}], which is not a section.",
        },
    ),
    (
        f"@\n{SHORT.replace('[memory]', '').replace('bandwidth = 1e10', '')}",
        "",
        {"memory = 3": " memory is 3, which is not a section. Write a line [memory] and its keys below"},
    ),
    (f"@\n{SHORT[: SHORT.index('[network]')]}", "", {"network = 3": " network is 3, which is not a section."}),
    (
        f"@\n{SHORT}",
        " ",
        {
            "operations = 3": "operations is 3, which is not a section.",
            "calls = []": "calls is [], which is not a section.",
            "waits = 'long'": "waits is 'long', which is not a section.",
            "name = 5": "name is 5, not text. Put it in quotes.",
            "origin = []": "origin is [], not text.",
        },
    ),
    (
        f"memory_bytes = @\n{SHORT}",
        " memory_bytes is ",
        {
            "-1": "-1, which is not a finite number of 0 or more. Give a finite number of 0 or more.",
            "inf": "inf, which is not a finite number",
            "true": "True, which is not a finite number",
            "'64 XB'": "'64 XB', which is not a number of bytes. Write 2e9, '800 MB' or '1.5 GB'.",
            "'GB'": "'GB', which is not a number of bytes.",
            "'-1 GB'": "'-1 GB', which is not a number of bytes.",
        },
    ),
    (
        SHORT.replace("1e11", "1e11\n@ = 1e11"),
        " [products]: there is no ",
        {"float33": "'float33'. Did you mean 'float32'?"},
    ),
    (
        SHORT.replace("1e11", "@"),
        " products.float32",
        {
            "0": " is 0, which is not a finite positive number. Give a finite positive number.",
            "nan": " is nan, which is not a finite positive number.",
            "inf": " is inf, which is not a finite positive number.",
            "1e400": " is inf, which is not a finite positive number.",
            "1" + "0" * 400: " is 1000",
            "true": " is True, which is not a finite positive number.",
            "2020-01-01": " is datetime.date(2020, 1, 1), which is not a finite positive number.",
            "{}": " is {}, which is not a finite positive number.",
            "[]": " is [], which is not a table. Give rows [m, n, k, FLOP per second].",
            "[5]": " row 1: 5 is not a row. Write [m, n, k, FLOP per second].",
            "[['a', 1, 1, 1e9]]": " row 1: m is 'a', which is not a whole number of 1 or more.",
            "[[1, [1], 1, 1e9]]": " row 1: n is [1], which is not a whole number",
            "[[0, 1, 1, 1e9]]": " row 1: m is 0, which is not a whole number of 1 or more.",
            "[[1, 1, 1, -1]]": " row 1: FLOP per second is -1, which is not a finite positive number.",
            "[[1, 1, 1, 1], [1, 1, 1, 2]]": " row 2: m, n, k do not ascend: those of row 1 are not",
            "[[8, 8, 8, 1], [8, 16, 8, 1]]": " has no rate of m, n, k = 8, 8, 16. Give every comb",
        },
    ),
    (
        SHORT.replace("bandwidth = 1e10", "@"),
        " memory.",
        {
            "": "bandwidth is missing. Give a finite positive number.",
            "bandwidth = [1]": "bandwidth is [1], which is not a finite positive number.",
            "table = 5": "table is 5, which is not a table. Give rows [bytes, bytes per second].",
            "table = [[1, 2, 3]]": "table row 1: [1, 2, 3] is not a row. Write [bytes, bytes per second].",
            "table = [[0, 1e9], [8, 1e9]]": "table row 1: bytes is 0, which is not a finite positive",
            "table = [[nan, 1e9]]": "table row 1: bytes is nan, which is not a finite positive number.",
            "table = [[8, 'x']]": "table row 1: bytes per second is 'x', which is not a finite positive",
            "table = [[8, 1], [4, 1]]": "table row 2: bytes do not ascend: those of row 1 are not",
        },
    ),
    (f"{SHORT}[operations]\n@", " operations.", {"exp = 0": "exp is 0, which is not a finite positive number."}),
    (
        f"{SHORT}[calls]\n@",
        " calls.",
        {
            "instruction = -1": "instruction is -1, which is not a finite number of 0 or more.",
            "step = nan": "step is nan, which is not a finite number of 0 or more.",
        },
    ),
    (
        f"{SHORT}[waits]\n@",
        " waits.table ",
        {
            "": "is missing. Give rows [seconds computed, seconds waited].",
            "table = [[0, 1]]": "row 1: seconds computed is 0, which is not a finite positive number.",
            "table = [[1, -1]]": "row 1: seconds waited is -1, which is not a finite number of 0 or more.",
            "table = [[1, 1], [1, 1]]": "row 2: seconds computed do not ascend",
        },
    ),
    (
        f"{SHORT}@",
        " network",
        {
            "cols = 5": ": there is no 'cols'. Known names: latency",
            "[network.cols]\nlatency = 1": ".cols.bandwidth is missing. Give a finite positive",
            "[network.shift]": ".shift is {}, which is not a table.",
            "shift = [[2, 64]]": ".shift row 1: [2, 64] is not a row. Write [ranks, bytes, seconds].",
            "shift = [[1, 64, 1]]": ".shift row 1: ranks is 1, which is not a whole number of 2 or more.",
            "shift = [[2, 0, 1]]": ".shift row 1: bytes is 0, which is not a whole number of 1 or more.",
            "shift = [[2, 64, 0]]": ".shift row 1: seconds is 0, which is not a finite positive number.",
            "shift = [[4, 1, 1], [2, 2, 1]]": ".shift row 2: ranks, bytes do not ascend",
        },
    ),
]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(file.replace("@", value), place + message, id=f"{place}{value}".strip())
        for file, place, cases in MISTAKES
        for value, message in cases.items()
    ],
)
def test_a_mistake_is_told_with_its_file_and_its_key(text, message):
    with pytest.raises(ConfigError) as told:
        parse_machine(text, "file.toml")
    assert str(told.value).startswith(f"file.toml{message}")
    assert told.value.remedy


def test_what_is_no_text_or_no_path_is_no_machine(tmp_path):
    (tmp_path / "file.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match="file.toml is not text"):
        load_machine(tmp_path / "file.toml")
    with pytest.raises(ConfigError, match="there is no machine"):
        load_machine("a\0b")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("0", 0),
        ("64e9", 64 * 10**9),
        ("'64 GB'", 64 << 30),
        ("'800 mb'", 800 << 20),
        ("'1.5 GB'", 3 << 29),
        ("'2e9'", 2 * 10**9),
        ("'7 B'", 7),
        ("'1tb'", 1 << 40),
    ],
)
def test_bytes_are_written_as_for_a_memory_limit(written, read):
    assert parse_machine(f"memory_bytes = {written}\n{SHORT}", "short").memory_bytes == read
    if read:
        assert bytes_of(ast.literal_eval(written)) == read


def test_nothing_may_take_no_time_where_that_has_a_meaning():
    text = "[calls]\ninstruction = 0\nstep = 0\n[waits]\ntable = [[1e-4, 0], [1e-2, 1e-3]]"
    machine = parse_machine(f"{SHORT}{text}", "short")
    assert machine.call == machine.step == 0.0
    assert 0.0 < machine.wait(1e-4) < 1e-8 and 0.0 < machine.wait(1e-3) < machine.wait(1e-2)


@pytest.mark.parametrize("name", ['a "quoted" name', "a\\b", "two\nlines", "\t\x00\x7f\x85", "Kühlschrank 🧊"])
def test_awkward_names_are_read_back(name):
    awkward = machine(name=name, origin=f"{name}!", networks={name: Network(1e-6, 1e9)})
    again = parse_machine(machine_text(awkward), "again")
    assert (again.name, again.origin, list(again.networks)) == (name, f"{name}!", [name])


def test_rows_are_written_in_order_once_and_apart():
    """As reading asks for: of large meshes calibration finds the same short message twice."""
    rows = [(2048, 8192, 1e-5), (2048, 8192, 2e-5), (2, 64, 1e-6)]
    waits = Curve(((1.00001e-4, 1e-6), (1.00002e-4, 2e-6)))
    products = ProductRates((1, 2), {(m, n, k): 1e9 for m in (2, 1) for n in (1, 2) for k in (1, 2)})
    networks = {"": Network(1e-6, 1e9, {"shift": rows})}
    measured = machine(products={"float32": products}, networks=networks, waits=waits)
    again = parse_machine(machine_text(measured), "again")
    assert again.networks[""].measured["shift"] == [rows[2], rows[0]]
    assert again.waits == waits and again.products == measured.products


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SHORT.replace("[memory]\nbandwidth = 1e10\n", ""), r"no \[memory"),
        (SHORT.replace("latency", "latenzy"), "Did you mean 'latency'"),
        (SHORT.replace("float32", "float64"), "no float32"),
        ("[products", "not valid TOML"),
        (f"memory_bytes = {'9' * 5000}", "not valid TOML"),  # an integer that Python refuses
        (f"name = {'[' * 100_000}", "not valid TOML"),
    ],
    ids=["no section", "unknown key", "no float32", "no toml", "digits", "arrays in arrays"],
)
def test_a_broken_file_says_what_is_wrong(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_machine(text, "file.toml")


def test_a_machine_of_one_rank_has_no_network():
    alone = parse_machine(SHORT[: SHORT.index("[network]")], "alone")
    assert parse_machine(machine_text(alone), "again").networks == {}
    with pytest.raises(ConfigError, match="no network for mesh axis 'rows'"):
        alone.network(MESH, ("rows",))


def test_a_missing_file_names_the_built_in_machines(tmp_path):
    with pytest.raises(ConfigError, match="tpuv2"):
        load_machine(tmp_path / "none.toml")


def test_rounds_grow_with_the_logarithm():
    assert [rounds("all_gather", n) for n in (2, 4, 512)] == [1, 2, 9]
    assert rounds("all_reduce", 512) == 2 * math.ceil(math.log2(512))
