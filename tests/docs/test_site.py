"""The site is built without a warning, and its reference has every public name once."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

import meshmpi as mm
from meshmpi import checkpoint
from tests.docs.pages import DOCS, PAGES, ROOT, blocks_of

pytest.importorskip("sphinx", reason="the extra docs is not installed")
pytest.importorskip("myst_parser", reason="the extra docs is not installed")
pytest.importorskip("furo", reason="the extra docs is not installed")


def build(source: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-n",
        "-d",
        str(out / "doctrees"),
        *options,
        str(source),
        str(out / "site"),
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def public_names() -> list[str]:
    """What `mm` offers; modules are what stands in them."""
    values = {n: getattr(mm, n) for n in dir(mm) if not n.startswith("_")}
    own = [
        n
        for n, v in values.items()
        if not isinstance(v, (ModuleType, bool)) and getattr(v, "__module__", "") != "typing"
    ]
    schedules = [
        n
        for n, f in vars(mm.schedules).items()
        if inspect.isfunction(f) and f.__module__ == mm.schedules.__name__ and n[0] != "_"
    ]
    parts: dict[str, Sequence[str]] = {
        "optimize": mm.optimize.__all__,
        "transformer": mm.transformer.__all__,
        "schedules": schedules,
        "checkpoint": checkpoint.__all__,
        "pretrained": mm.pretrained.__all__,
    }
    return [*own, *(f"{part}.{n}" for part, names in parts.items() for n in names)]


def check_every_public_name_is_in_the_reference(site: Path) -> None:
    from sphinx.util.inventory import InventoryFile

    with (site / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, path: path)
    # A name with two entries is a warning of the build, so that one is enough to look for.
    known = {n for role, names in inventory.items() if role.startswith("py:") for n in names}
    names = public_names()
    assert len(names) > 250
    missing = [n for n in names if f"meshmpi.{n}" not in known]
    assert not missing, f"docs/api lacks {missing}"


def check_operations_say_what_they_send(site: Path) -> None:
    text = (site / "api" / "functions.html").read_text()
    part = text[text.index('id="meshmpi.einsum"') :]
    part = part[: part.index("</dd></dl>")]
    assert "all_reduce 128" in part and "[a=8, c=16]" in part, part


def check_names_on_pages_lead_to_the_reference(site: Path) -> None:
    text = (site / "ops.html").read_text()
    assert 'href="api/functions.html#meshmpi.einsum"' in text
    assert text.index("Functions made of one primitive") < text.index('id="primitives"')


def check_meshes_show_no_internals(site: Path) -> None:
    text = (site / "api" / "running.html").read_text()
    assert 'id="meshmpi.Mesh.communicator"' in text and 'id="meshmpi.Mesh.bind"' not in text


def check_notebooks_are_pages_with_their_pictures(site: Path) -> None:
    text = (site / "notebooks" / "named_dimensions.html").read_text()
    assert "<h1>Named dimensions on a simulated mesh" in text
    assert text.count('<div class="picture">') == 2 and "sum pending over cols" in text


def check_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text()
        for kind in ('src="http', 'rel="stylesheet" href="http', "@import"):
            assert kind not in text, f"{page.name} has {kind}"


@pytest.mark.matrix
def test_site(tmp_path: Path):
    """One test, so that the site is built once, however many processes run the tests."""
    done = build(DOCS, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    check_every_public_name_is_in_the_reference(site)
    check_operations_say_what_they_send(site)
    check_names_on_pages_lead_to_the_reference(site)
    check_meshes_show_no_internals(site)
    check_notebooks_are_pages_with_their_pictures(site)
    check_pages_load_nothing_from_elsewhere(site)


@pytest.mark.matrix
def test_a_fault_of_a_page_is_found(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "conf.py").write_text(
        (DOCS / "conf.py")
        .read_text()
        .replace("Path(__file__).resolve().parent.parent", f"Path({str(ROOT)!r})")
        .replace('html_static_path = ["_static"]', "")
    )
    (source / "index.md").write_text("# Page\n\n[nowhere](missing.md)\n")
    done = build(source, tmp_path)
    assert done.returncode != 0 and "missing" in done.stderr, done.stderr


def test_no_two_pages_have_the_same_title():
    titles = Counter(page.read_text().splitlines()[0] for page in PAGES if page.is_relative_to(DOCS))
    assert max(titles.values()) == 1, titles.most_common(3)


def test_pages_of_the_tutorial_have_the_same_model():
    pages = sorted((DOCS / "tutorial").glob("*.md"))
    assert len(pages) == 6
    first = {next(b.text for b in blocks_of(p) if b.info[0] == "python") for p in pages}
    assert len(first) == 1
    (model,) = first
    entry = "\n".join(b.text for b in blocks_of(DOCS / "tutorial.md") if b.info[0] == "python")
    for line in model.split("def train")[0].splitlines():
        assert line in entry, f"docs/tutorial.md has another model: {line}"
