"""Descriptions of machines: interpolation, networks, files."""

import math

import pytest

from meshmpi.collective_bytes import KINDS, bytes_sent
from meshmpi.errors import ConfigError
from meshmpi.planner.machine import Curve, Machine, Network, ProductRates, operations_from, rounds
from meshmpi.planner.machine_file import BUILT_IN, load_machine, machine_text, parse_machine

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


@pytest.mark.parametrize("kind", KINDS)
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
    def machine(**networks):
        return Machine("m", {"float32": ProductRates.constant(1e9)}, Curve(((1.0, 1e9),)),
                       operations_from(1e-9), 0.0, 0.0, networks)  # fmt: skip

    fast, slow, both = Network(1e-6, 1e10), Network(1e-6, 1e9), Network(1e-6, 5e8)
    assert machine(rows=fast, cols=slow).network(("rows", "cols")) is slow
    assert machine(rows=fast, cols=slow, **{"rows+cols": both}).network(("rows", "cols")) is both
    with pytest.raises(ConfigError, match="no network for mesh axis 'rows'"):
        machine(cols=slow).network(("rows",))


@pytest.mark.parametrize("name", [*BUILT_IN, "short"])
def test_a_file_is_read_back(name):
    machine = parse_machine(SHORT, "short") if name == "short" else load_machine(name)
    again = parse_machine(machine_text(machine), "again")
    assert again.name == machine.name and again.peak == machine.peak
    assert again.operations == pytest.approx(machine.operations, rel=1e-3)
    for size in (64, 1 << 20):
        assert again.memory(size) == pytest.approx(machine.memory(size), rel=1e-3)
        assert again.network(("a",)).seconds("all_reduce", size, 8) == pytest.approx(
            machine.network(("a",)).seconds("all_reduce", size, 8), rel=1e-3
        )


BROKEN = {
    "no section": (
        SHORT.replace("[memory]\nbandwidth = 1e10\n", ""),
        r"no \[memory",
    ),
    "unknown key": (SHORT.replace("latency", "latenzy"), "Did you mean 'latency'"),
    "no number": (SHORT.replace("1e11", '"fast"'), "positive number"),
    "negative": (SHORT.replace("bandwidth = 1e10", "bandwidth = -1"), "positive number"),
    "no float32": (SHORT.replace("float32", "float64"), "no float32"),
    "holes": (SHORT.replace("1e11", "[[8, 8, 8, 1e9], [16, 8, 8, 1e9]]"), "no rate of m, n, k"),
    "no row": (SHORT.replace("1e11", "[[8, 8, 1e9]]"), "no row"),
    "no toml": ("[products", "not valid TOML"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_says_what_is_wrong(case):
    text, message = BROKEN[case]
    with pytest.raises(ConfigError, match=message):
        parse_machine(text, "file.toml")


def test_a_machine_of_one_rank_has_no_network():
    alone = parse_machine(SHORT[: SHORT.index("[network]")], "alone")
    assert parse_machine(machine_text(alone), "again").networks == {}
    with pytest.raises(ConfigError, match="no network for mesh axis 'rows'"):
        alone.network(("rows",))


def test_a_missing_file_names_the_built_in_machines(tmp_path):
    with pytest.raises(ConfigError, match="tpuv2"):
        load_machine(tmp_path / "none.toml")


def test_rounds_grow_with_the_logarithm():
    assert [rounds("all_gather", n) for n in (2, 4, 512)] == [1, 2, 9]
    assert rounds("all_reduce", 512) == 2 * math.ceil(math.log2(512))
