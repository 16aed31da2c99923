"""Settings: defaults, files, overrides, and what each mistake is told."""

import json
import re
from dataclasses import asdict
from typing import Literal

import pytest

from meshmpi.errors import ConfigError
from meshmpi.transformer.training.config import SAVED, _sections, describe, from_dict, load, written
from meshmpi.transformer.training.settings import Settings
from meshmpi.validated import OrNone, section, setting, settings


@settings
class Optimizer:
    rate: float = setting(1e-3, "learning rate", minimum=0)
    kind: Literal["adam", "sgd"] = setting("adam", "which optimizer")


@settings
class Train:
    steps: int = setting(2000, "length of the training", "steps", minimum=0)
    layout: str = setting("", "computation layout")
    resume: bool = setting(True, "go on from the newest checkpoint")
    seed: OrNone[int] = setting(None, "seed of all random numbers")
    share: float = setting(0.5, "of the text", below=1.0)
    known: dict[str, float] = setting({}, "losses by label")
    first: int = setting(0, "first step")
    last: int = setting(9, "last step")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "of activations")
    optimizer: Optimizer = section(Optimizer)

    def check(self):
        if self.first > self.last:
            raise ConfigError(f"first is {self.first}, last is {self.last}.", "Exchange them.")


@settings
class Config:
    corpus: str = setting("", "name or path")
    train: Train = section(Train)


FILE = """
corpus = "sotu"   # public domain
[train]
steps = 10
known = {a = 1}
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
    assert config.train.known == {"a": 1.0}
    assert config.train.optimizer == Optimizer(1.0, "sgd")
    assert isinstance(config.train.optimizer.rate, float)


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
        ("known={a = 1}", {"a": 1.0}),
        ("known.a=1", {"a": 1.0}),
        ("dtype=bfloat16", "bfloat16"),
    ],
)
def test_override_values(item, expected):
    config = load(Train, overrides=[item])
    found = getattr(config, re.split("[.=]", item)[0])
    assert found == expected
    assert type(found) is type(expected)


ERRORS = [
    ("corpus = 'x'\n[train]\nstep = 3", [], ["no key 'step'", "[train]", "c.toml:3", "'steps'?"]),
    ("corpus = 'x'\n[trian]\nsteps = 3", [], ["no key 'trian'", "the top level", "c.toml:2"]),
    ("corpus = 'x'\n[train]\nzzz = 3", [], ["'zzz'", "Its keys are: steps, layout, resume"]),
    ("corpus = 'x'\n\n[train]\nsteps = 'many'", [], ["'train.steps' is 'many'", "c.toml:4", "valid integer"]),
    ("corpus = 'x'\n[train]\nsteps = 1.5", [], ["'train.steps' is 1.5", "valid integer"]),
    ("corpus = 'x'\n[train]\nsteps = true", [], ["'train.steps' is True", "valid integer"]),
    ("corpus = 'x'\n[train]\nresume = 1", [], ["'train.resume' is 1", "valid boolean"]),
    ("corpus = 'x'\n[train]\nsteps = -1", [], ["'train.steps' is -1", "at least 0"]),
    ("corpus = 'x'\n[train]\ndtype = 'float16'", [], ["Did you mean 'bfloat16'?", "'float32' or 'bfloat16'"]),
    ("corpus = 'x'\ntrain = 3", [], ["'train' is 3", "section"]),
    ("corpus = 'x'\ntrain.optimizer.rte = 3", [], ["'rte'", "c.toml:2", "'rate'?"]),
    ("[train]\nshare = 1.0", [], ["'train.share' is 1.0", "c.toml:2", "less than 1"]),
    ("[train]\nknown = {a = 'x'}", [], ["'train.known.a' is 'x'", "c.toml:2", "valid number"]),
    ("[train]\nfirst = 3\nlast = 2", [], ["[train]", "c.toml:1", "first is 3, last is 2", "Exchange them"]),
    ("corpus = 'x'\nsteps = = 3", [], ["not valid TOML", "line 2"]),
    (FILE, ["train.stepz=3"], ["'stepz'", "--set train.stepz=3", "'steps'?"]),
    (FILE, ["train.steps=abc"], ["'train.steps' is 'abc'", "--set train.steps=abc", "valid integer"]),
    (FILE, ["train.optimizer.kind=adamw"], ["'adamw'", "Did you mean 'adam'?"]),
    (FILE, ["train.known.b=x"], ["'train.known.b' is 'x'", "--set train.known.b=x"]),
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
    values = json.loads(json.dumps(asdict(config)))
    assert from_dict(Config, values) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": "3"}, "Train: steps is '3'. It must be a valid integer"),
        ({"stepz": 3}, "Train: stepz is not a setting. Did you mean 'steps'"),
        ({"dtype": "float23"}, "Train: dtype is 'float23'. Did you mean 'float32'"),
    ],
)
def test_the_constructor_checks_too(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Train(**values)
    assert "steps: length of the training." in Train.__doc__


def test_mutable_defaults_are_not_shared():
    assert load(Train).known is not load(Train).known


def test_describe_lists_every_setting():
    lines = [" ".join(line.split()) for line in describe(Config).splitlines()]
    assert lines[0] == 'corpus = "" name or path'
    assert "[train.optimizer]" in lines
    assert "steps = 2000 steps length of the training" in lines
    assert 'seed = "none" seed of all random numbers; int or none' in lines
    assert "resume = true go on from the newest checkpoint" in lines
    assert "known = {} losses by label; dict[str, float]" in lines
    assert 'one of "float32", "bfloat16"' in " ".join(lines)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_describe_fits_its_width_and_tells_every_default(width):
    text = describe(Settings, width)
    assert max(map(len, text.splitlines())) <= width
    sections = [""] + [line[1:-1] for line in text.splitlines() if line.startswith("[")]
    assert sections[1:] == [k for k, v in asdict(Settings()).items() if isinstance(v, dict) and v]
    overrides, section_name = [], ""
    for line in text.splitlines():
        if line.startswith("["):
            section_name = line[1:-1] + "."
        elif found := re.match(r"  (\w+) = (\"[^\"]*\"|\S+)", line):
            overrides.append(f"{section_name}{found[1]}={found[2]}")
    flat = [k for v in asdict(Settings()).values() for k in (v if isinstance(v, dict) and v else [v])]
    assert len(overrides) == len(flat)
    assert load(Settings, None, overrides) == Settings()  # what is told as default is the default


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [
            "optimizer.clip_norm=1.5",
            'data.corpus="a \\"quoted\\" n\u00e4me"',
            "train.plot=false",
            "optimizer.epsilon=1e-9",
        ],
        ['baselines={"nanoGPT, 2022" = 1.4697, b = 2}', "task=translation", "mesh.shape=rows:2;cols:2"],
    ],
)
def test_the_settings_of_a_run_are_read_from_its_folder(tmp_path, overrides):
    given = load(Settings, None, overrides)
    (tmp_path / SAVED).write_text(written(given), encoding="utf-8")
    assert load(Settings, tmp_path) == given
    assert load(Settings, tmp_path, ["train.steps=7"]).train.steps == 7


def test_every_setting_of_a_training_says_what_it_does():
    for _, fields in _sections(Settings, ()):
        assert [f.name for f, _ in fields if not f.metadata["description"]] == []
