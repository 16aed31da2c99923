"""Settings: defaults, files, overrides, and what each mistake is told."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from meshmpi.errors import ConfigError
from meshmpi.train.config import _sections, as_dict, describe, from_dict, load, section, setting
from meshmpi.train.settings import Settings


@dataclass(frozen=True)
class Optimizer:
    rate: float = setting(1e-3, "learning rate", minimum=0)
    kind: Literal["adam", "sgd"] = setting("adam", "which optimizer")
    betas: tuple[float, float] = setting((0.9, 0.999), "decay of the means")


@dataclass(frozen=True)
class Train:
    steps: int = setting(2000, "length of the training", "steps", minimum=0)
    layout: str = setting("", "computation layout")
    resume: bool = setting(True, "go on from the newest checkpoint")
    seed: int | None = setting(None, "seed of all random numbers")
    folder: Path = setting(Path("runs"), "where to write")
    tags: list[str] = setting([], "free words")
    dtype: str = setting("float32", "of activations", choices=("float32", "bfloat16"))
    optimizer: Optimizer = section(Optimizer, "the optimizer")


@dataclass(frozen=True)
class Config:
    corpus: str = setting(help="name or path")
    train: Train = section(Train)


FILE = """
corpus = "sotu"   # public domain
[train]
steps = 10
tags = ["a", "b"]
[train.optimizer]
rate = 1
"""


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "c.toml"
        path.write_text(text)
        return path

    return write


def test_defaults_file_and_overrides_in_this_order(file):
    config = load(Config, file(FILE), ["train.steps=20", "train.optimizer.kind=sgd"])
    assert config.corpus == "sotu"
    assert config.train.steps == 20
    assert config.train.tags == ["a", "b"]
    assert config.train.optimizer == Optimizer(1.0, "sgd", (0.9, 0.999))
    assert isinstance(config.train.optimizer.rate, float)
    assert config.train.folder == Path("runs")


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("layout=batch:rows;d_ff:cols", "batch:rows;d_ff:cols"),
        ('layout="batch:rows"', "batch:rows"),
        ("layout=1e3", "1e3"),
        ("layout=2020-01-02", "2020-01-02"),
        ("layout=", ""),
        ("layout=a=b", "a=b"),
        ("resume=false", False),
        ("steps=1_000", 1000),
        ("seed=7", 7),
        ("seed=none", None),
        ("folder=runs/a", Path("runs/a")),
        ("tags=[a, b]", ["a", "b"]),
        ('tags=["a b"]', ["a b"]),
        ("tags=a,b", ["a", "b"]),
        ("optimizer.betas=[0, 1]", (0.0, 1.0)),
        ("dtype=bfloat16", "bfloat16"),
    ],
)
def test_override_values(item, expected):
    config = load(Train, overrides=[item])
    for part in item.partition("=")[0].split("."):
        config = getattr(config, part)
    assert config == expected
    assert type(config) is type(expected)


ERRORS = [
    ("corpus = 'x'\n[train]\nstep = 3", [], ["no key 'step'", "[train]", "c.toml:3", "'steps'?"]),
    ("corpus = 'x'\n[trian]\nsteps = 3", [], ["no key 'trian'", "the top level", "c.toml:2"]),
    ("corpus = 'x'\n[train]\nzzz = 3", [], ["'zzz'", "Its keys are: steps, layout, resume"]),
    ("corpus = 'x'\n\n[train]\nsteps = 'many'", [], ["'train.steps' is 'many'", "c.toml:4", "int"]),
    ("corpus = 'x'\n[train]\nsteps = 1.5", [], ["'train.steps' is 1.5", "not an int"]),
    ("corpus = 'x'\n[train]\nsteps = true", [], ["'train.steps' is True", "not an int"]),
    ("corpus = 'x'\n[train]\nresume = 1", [], ["'train.resume' is 1", "a bool"]),
    ("corpus = 'x'\n[train]\nsteps = -1", [], ["'train.steps' is -1", "at least 0"]),
    ("corpus = 'x'\n[train]\ndtype = 'float16'", [], ["'float16'", "float32, bfloat16"]),
    ("corpus = 'x'\ntrain = 3", [], ["'train' is 3", "section"]),
    ("corpus = 'x'\ntrain.optimizer.rte = 3", [], ["'rte'", "c.toml:2", "'rate'?"]),
    ("[train]\nsteps = 3", [], ["'corpus' is not given", "str"]),
    ("corpus = 'x'\nsteps = = 3", [], ["not valid TOML", "line 2"]),
    (FILE, ["train.stepz=3"], ["'stepz'", "--set train.stepz=3", "'steps'?"]),
    (FILE, ["train.steps=abc"], ["'train.steps' is 'abc'", "--set train.steps=abc", "an int"]),
    (FILE, ["train.optimizer.kind=adamw"], ["'adamw'", "'adam' | 'sgd'"]),
    (FILE, ["train.optimizer.betas=[1]"], ["[1]", "tuple[float, float]"]),
    (FILE, ["train.optimizer.rate=nan"], ["nan", "at least 0"]),
    (FILE, ["steps"], ["--set steps has no key and value"]),
    (FILE, ["corpus.name=x"], ["'corpus' is a value, 'sotu', not a section"]),
]


@pytest.mark.parametrize(("text", "overrides", "parts"), ERRORS)
def test_errors_name_key_value_and_place(file, text, overrides, parts):
    with pytest.raises(ConfigError) as caught:
        load(Config, file(text), overrides)
    for part in parts:
        assert part in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.toml does not exist"):
        load(Config, tmp_path / "nothing.toml")


def test_dictionary_and_back(file):
    config = load(Config, file(FILE))
    values = json.loads(json.dumps(as_dict(config)))
    assert values["train"]["folder"] == "runs"
    assert from_dict(Config, values) == config


def test_mutable_defaults_are_not_shared():
    assert load(Train).tags is not load(Train).tags


def test_describe_lists_every_setting():
    lines = [" ".join(line.split()) for line in describe(Config).splitlines()]
    assert lines[0] == "corpus (str, must be given)"
    assert lines[1] == "name or path"
    assert "[train.optimizer]" in lines
    assert "steps = 2000 steps length of the training" in lines
    assert 'seed = "none" seed of all random numbers; int or none' in lines
    assert "resume = true go on from the newest checkpoint" in lines
    assert "tags = [] free words; list[str]" in lines
    assert 'one of "float32", "bfloat16"' in " ".join(lines)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_describe_fits_its_width_and_tells_every_default(width):
    text = describe(Settings, width)
    assert max(map(len, text.splitlines())) <= width
    sections = [""] + [line[1:-1] for line in text.splitlines() if line.startswith("[")]
    assert sections[1:] == [k for k, v in as_dict(Settings()).items() if isinstance(v, dict) and v]
    overrides, section_name = [], ""
    for line in text.splitlines():
        if line.startswith("["):
            section_name = line[1:-1] + "."
        elif found := re.match(r"  (\w+) = (\"[^\"]*\"|\S+)", line):
            overrides.append(f"{section_name}{found[1]}={found[2]}")
    flat = [
        k for v in as_dict(Settings()).values() for k in (v if isinstance(v, dict) and v else [v])
    ]
    assert len(overrides) == len(flat)
    assert load(Settings, None, overrides) == Settings()  # what is told as default is the default


def test_every_setting_of_a_training_says_what_it_does():
    for _, fields in _sections(Settings, ()):
        assert [f.name for f, _ in fields if not f.metadata["help"]] == []
