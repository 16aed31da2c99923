"""A model on disk, whoever made it: a Hugging Face checkpoint, or a run of the trainer.

Says what the model is and fills variables from it; builds no graph and knows no layout.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshmpi.checkpoint import Manifest
from meshmpi.checkpoint import load as load_run
from meshmpi.errors import CheckpointError, ConfigError
from meshmpi.nn.transformer import TransformerConfig
from meshmpi.pretrained.architectures import Architecture, architecture
from meshmpi.pretrained.files import Checkpoint
from meshmpi.pretrained.load import load
from meshmpi.pretrained.tokenizer import Encoded, Tokenizer, open_tokenizer
from meshmpi.runtime.variables import VariableStore
from meshmpi.train.translation.vocabulary import END, PADDING, EndedVocabulary
from meshmpi.train.vocabulary import Vocabulary, restore_vocabulary

_KINDS = {"lm": "lm", "translation": "encoder_decoder"}
"""Task of a run -> kind of its model."""


@dataclass(frozen=True)
class Model:
    """A model on disk.

    Attributes:
        path: As given.
        architecture: What it is; that of a run has no entries.
        manifest: Of a run's checkpoint; None: a Hugging Face checkpoint.
    """

    path: Path
    architecture: Architecture
    manifest: Manifest | None = None

    @property
    def kind(self) -> str:
        """One of "lm", "encoder_decoder" and "encoder"."""
        return self.architecture.kind

    @property
    def config(self) -> TransformerConfig:
        return self.architecture.config

    @property
    def special(self) -> Mapping[str, int]:
        """Token ids by purpose ("bos", "eos", "pad", "mask", "decoder_start"), as known."""
        return self.architecture.special

    def load(self, target: Any) -> None:
        """Fills the variables of a compiled step, or of ``step.variables``.  Collective."""
        if self.manifest is None:
            load(target, self.architecture, self.path)
        else:
            store = getattr(target, "variables", target)
            load_run(self.manifest, trainable_part(store), extra=True)

    def tokenizer(self, path: str | os.PathLike[str] | None = None) -> Tokenizer:
        """The tokenizer that belongs to it.

        Args:
            path: A folder or file to use instead.

        Raises:
            DataError: There is none, or a package that reads it is not installed.
        """
        if path is None and self.manifest is not None:
            return VocabularyTokenizer(restore_vocabulary(self.manifest.about["vocabulary"]))
        folder = self.path if self.path.is_dir() else self.path.parent
        chosen = folder if path is None else path
        return open_tokenizer(chosen, self.architecture.name, self.special)


def vocabulary_at(path: str | os.PathLike[str]) -> Vocabulary:
    """The vocabulary of a run, or the tokenizer of a checkpoint, or in a file.

    Raises:
        DataError: There is none, or a package that reads it is not installed.
    """
    path = Path(path)
    if is_run(path):
        from meshmpi.train.saved import open_run

        return open_run(path).vocabulary
    folder, name, special = path if path.is_dir() else path.parent, "", {}
    if (folder / "config.json").is_file():
        found = architecture(_read_config(folder / "config.json", path))
        name, special = found.name, found.special
    weights = path.name.endswith((".safetensors", ".index.json"))
    return open_tokenizer(folder if weights else path, name, special)


def trainable_part(store: VariableStore) -> VariableStore:
    """The model's own variables: slots of optimizers and caches left out; the blocks are shared."""
    part = VariableStore(store.mesh, store.ranks)
    part.types = {name: v for name, v in store.types.items() if v.trainable}
    part.blocks = {name: store.blocks[name] for name in part.types}
    return part


def open_model(path: str | os.PathLike[str]) -> Model:
    """What stands at ``path``; reads configs and headers, no weights.

    Args:
        path: A folder with config.json and safetensors, one of its files; or the folder of a run,
            or of one of its checkpoints.

    Raises:
        CheckpointError: There is neither.
        ConfigError: The config describes a model that is not implemented.
    """
    path = Path(path)
    if is_run(path):
        return _run(path)
    folder = path if path.is_dir() else path.parent
    values = _read_config(folder / "config.json", path)
    # Whether an untied T5 has one embedding or two, only the names of its arrays say.
    with Checkpoint(path) as opened:
        found = architecture(values, keys=opened.keys())
    return Model(path, found)


def _read_config(file: Path, path: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing.",
                "Give a folder with config.json and model.safetensors, or the folder of a run; a"
                " name on the Hugging Face hub has to be downloaded first.",
            ) from error
        raise CheckpointError(
            f"there is no config.json beside the weights of {path}.",
            "Download it as well, or give the folder of a run.",
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.", "Download it again.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} is no table.", "Download it again.")
    return values


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run, or of one of its checkpoints."""
    return (path / "manifest.json").is_file() or (path / "checkpoints").is_dir()


def _run(path: Path) -> Model:
    from meshmpi.train.saved import open_run

    saved = open_run(path)
    task = saved.settings.task
    if task not in _KINDS:
        raise ConfigError(
            f"{path} is a run of the task '{task}'.", f"Give a run of {' or '.join(_KINDS)}."
        )
    special: dict[str, int] = {}
    if isinstance(saved.vocabulary, EndedVocabulary):
        special = {"pad": PADDING, "decoder_start": PADDING, "eos": END}
    found = Architecture("run", _KINDS[task], saved.config, (), "", (), special, {})
    return Model(path, found, saved.manifest)


class VocabularyTokenizer(Tokenizer):
    """The vocabulary of a run as a tokenizer; sequences that end get their end.

    Args:
        vocabulary: Of the run.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary, self.name, self.size = vocabulary, vocabulary.name, vocabulary.size
        self._after = [END] if isinstance(vocabulary, EndedVocabulary) else []

    def encoded(self, text: str, special: bool = True) -> Encoded:
        after = self._after if special else []
        ids = [int(t) for t in self.vocabulary.encode(text)]
        return Encoded([*ids, *after], [False] * len(ids) + [True] * len(after), [])

    def decode(self, tokens: Iterable[int]) -> str:
        return self.vocabulary.decode(tokens)

    def state(self) -> dict[str, Any]:
        return self.vocabulary.state()

    def measured(self) -> npt.NDArray[np.int32]:
        return self.vocabulary.token_bytes
