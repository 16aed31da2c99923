"""What comes from outside of the program: settings, text, checkpoints, models, the launcher."""

from tests.errors.catalogue.mistake import Mistake

_CONFIG = """
from pathlib import Path

from meshmpi.transformer.training.config import load
from meshmpi.transformer.training.settings import Settings

"""
_SAVED = """
from meshmpi import checkpoint

w = mm.get_variable("w", "d_model:4")
step = mm.compile(graph, mesh, fetches=[w])
"""

OUTSIDE = [
    Mistake(
        "A misspelt key in a configuration",
        _CONFIG
        + r"""
Path("run.toml").write_text("[model]\nlayers = 2\nd_modell = 64\n")
settings = load(Settings, "run.toml")  # here
""",
        "ConfigError: 'd_modell' | [model] | run.toml:3 | Did you mean 'd_model'?",
        (("d_modell", "d_model"),),
    ),
    Mistake(
        "A value of the wrong type in a configuration",
        _CONFIG
        + r"""
Path("run.toml").write_text("[train]\nsteps = 'many'\n")
settings = load(Settings, "run.toml")  # here
""",
        "ConfigError: 'train.steps' | run.toml:2 | 'many' | It must be a valid integer",
        (("'many'", "100"),),
        "100",
    ),
    Mistake(
        "A value out of range in a configuration",
        _CONFIG
        + r"""
Path("run.toml").write_text("[train]\nsteps = -5\n")
settings = load(Settings, "run.toml")  # here
""",
        "ConfigError: 'train.steps' | run.toml:2 | -5 | at least 0",
        (("-5", "0"),),
    ),
    Mistake(
        "A configuration that is not TOML",
        _CONFIG
        + r"""
Path("run.toml").write_text("[model]\nlayers 2\n")
settings = load(Settings, "run.toml")  # here
""",
        "ConfigError: run.toml | not valid TOML | line 2 | key = value",
        (("layers 2", "layers = 2"),),
        "=",
    ),
    Mistake(
        "A configuration that does not exist",
        _CONFIG
        + r"""
Path("run.toml").write_text("[model]\nlayers = 2\n")
settings = load(Settings, "ran.toml")  # here
""",
        "ConfigError: ran.toml | does not exist | ran.toml | Did you mean 'run.toml'?",
        (('"ran.toml"', '"run.toml"'),),
    ),
    Mistake(
        "An override without a value",
        _CONFIG
        + r"""
settings = load(Settings, None, ["train.steps"])  # here
""",
        "ConfigError: --set train.steps | no key and value | train.steps | section.key=value",
        (('"train.steps"', '"train.steps=10"'),),
        "steps",
    ),
    Mistake(
        "A corpus that does not exist",
        """
from meshmpi.transformer.training.corpora import open_corpus

corpus = open_corpus("tinyshakespear")  # here
""",
        "DataError: 'tinyshakespear' | named corpus | does not exist | Did you mean 'tinyshakespeare'?",
        (('"tinyshakespear"', '"tinyshakespeare"'),),
    ),
    Mistake(
        "An empty text",
        """
from pathlib import Path

from meshmpi.transformer.training.corpora import open_corpus

Path("text.txt").write_text("")
corpus = open_corpus("text.txt")  # here
""",
        "DataError: 'text.txt' | empty | 0 bytes | with text in it",
        (('write_text("")', 'write_text("To be, or not to be. " * 100)'),),
        "write_text",
    ),
    Mistake(
        "A vocabulary that does not exist",
        """
from meshmpi.transformer.text.vocabulary import build_vocabulary

vocabulary = build_vocabulary("byte", [b"abc"], [b"abc"])  # here
""",
        "DataError: 'byte' | no vocabulary | 'byte' | Did you mean 'bytes'?",
        (('"byte"', '"bytes"'),),
    ),
    Mistake(
        "A character that the vocabulary does not have",
        """
from meshmpi.transformer.text.vocabulary import build_vocabulary

vocabulary = build_vocabulary("characters", [b"abc"], [b"abc"])
ids = vocabulary.encode("abz")  # here
""",
        "DataError: 'z' | vocabulary | 3 characters | 'bytes'",
        (('"characters"', '"bytes"'),),
    ),
    Mistake(
        "A checkpoint of another model",
        _SAVED
        + """
saved = checkpoint.save("run", step.variables, 1, {})
with mm.Graph() as other:
    v = mm.get_variable("v", "d_model:4")
    second = mm.compile(other, mesh, fetches=[v])
checkpoint.load(saved, second.variables)  # here
""",
        "CheckpointError: the checkpoint run/step- | another model | it has no 'v'"
        " | configuration that it was made with",
        (('mm.get_variable("v"', 'mm.get_variable("w"'),),
        hint="w",
    ),
    Mistake(
        "A checkpoint of another size",
        _SAVED
        + """
saved = checkpoint.save("run", step.variables, 1, {})
with mm.Graph() as other:
    v = mm.get_variable("w", "d_model:5")
    second = mm.compile(other, mesh, fetches=[v])
checkpoint.load(saved, second.variables)  # here
""",
        "CheckpointError: the checkpoint run/step- | another model | 'w' is float32[4] there and float32[5] here"
        " | configuration that it was made with",
        (('"d_model:5"', '"d_model:4"'),),
        hint="d_model",
    ),
    Mistake(
        "A folder without a checkpoint",
        _SAVED
        + """
saved = checkpoint.save("run", step.variables, 1, {})
checkpoint.load("runs", step.variables)  # here
""",
        "CheckpointError: runs | no checkpoint | manifest.json is missing | Give a folder such as",
        (('load("runs"', "load(saved"),),
        hint="saved",
    ),
    Mistake(
        "A temperature below zero",
        """
from meshmpi.transformer.decoding.decoding import Sampling

how = Sampling(temperature=-1.0)  # here
""",
        "ConfigError: sampling | temperature | -1.0 | temperature and top_k from 0",
        (("-1.0", "0.0"),),
    ),
    Mistake(
        "Memory heads that do not divide the heads",
        """
from meshmpi.transformer.models import TransformerConfig

sizes = {"vocab": 10, "length": 8, "d_model": 32, "d_ff": 64, "d_kv": 8, "layers": 2}
config = TransformerConfig(**sizes, heads=4, memory_heads=3)  # here
""",
        "ShapeError: attention | memory heads | 3 memory heads do not divide heads=4 | Give one of [1, 2, 4], or 0",
        (("memory_heads=3", "memory_heads=2"),),
    ),
    Mistake(
        "A pretrained model of an unknown kind",
        """
from meshmpi.transformer.pretrained import architecture

found = architecture({"model_type": "gpt3", "n_layer": 2})  # here
""",
        "ConfigError: the config | model_type | 'gpt3' | Did you mean 'gpt2'?",
        (("gpt3", "gpt2"),),
    ),
    Mistake(
        "Less than one process",
        """
from meshmpi.launch.launch import launch

done = launch(0, ["-c", "print(1)"], timeout_seconds=20, capture_output=True)  # here
""",
        "MeshError: 0 ranks | cannot start | 0 | Ask for at least 1",
        (("launch(0,", "launch(1,"),),
    ),
]
