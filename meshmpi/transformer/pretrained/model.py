"""Opens a model on disk: a Hugging Face checkpoint, or a run of the trainer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshmpi.checkpoint import Manifest
from meshmpi.checkpoint import load as load_run
from meshmpi.errors import CheckpointError, ConfigError
from meshmpi.files import plain
from meshmpi.runtime.compiled import CompiledStep
from meshmpi.runtime.variables import VariableStore
from meshmpi.transformer.models import TransformerConfig
from meshmpi.transformer.pretrained.architectures import Architecture, architecture
from meshmpi.transformer.pretrained.files import Checkpoint
from meshmpi.transformer.pretrained.load import load, matched, variables_of
from meshmpi.transformer.text.base import Tokens, Vocabulary
from meshmpi.transformer.text.characters import EndedVocabulary
from meshmpi.transformer.text.vocabulary import is_run, open_tokenizer, restore_vocabulary
from meshmpi.transformer.training.saved import open_run

_KINDS = {"lm": "lm", "translation": "encoder_decoder"}
"""Task of a run -> kind of its model."""


@dataclass(frozen=True)
class Model:
    """A model on disk.

    Attributes:
        generation: Content of generation_config.json, or of config.json in older checkpoints.
    """

    path: Path  # the path that was opened
    architecture: Architecture  # kind, config and entries; a run has no entries
    manifest: Manifest | None = None  # manifest of a run's checkpoint; None for a Hugging Face checkpoint
    generation: Mapping[str, Any] = field(default_factory=dict[str, Any])

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
        ids = {name: self.generation.get(f"{name}_token_id") for name in ("bos", "decoder_start")}
        return {**self.architecture.special, **{k: v for k, v in ids.items() if v is not None}}

    @property
    def ends(self) -> tuple[int, ...]:
        """All tokens that end a text, the usual one first."""
        found = self.generation.get("eos_token_id")
        if found is None:
            found = self.special.get("eos", ())
        return tuple(found) if isinstance(found, list | tuple) else (found,)

    def load(self, target: CompiledStep | VariableStore) -> None:
        """Fills the variables of a compiled step, or of ``step.variables``.  Collective."""
        if self.manifest is None:
            load(target, self.architecture, self.path)
        else:
            load_run(self.manifest, _trainable_part(variables_of(target)), extra=True)

    def tokenizer(self, path: str | os.PathLike[str] | None = None) -> Vocabulary:
        """The tokenizer that belongs to it, or that in the folder or file ``path``."""
        if path is None and self.manifest is not None:
            found = restore_vocabulary(self.manifest.about["vocabulary"])
            return found if isinstance(found, EndedVocabulary) else _TextOnly(found)
        folder = self.path if self.path.is_dir() else self.path.parent
        chosen = folder if path is None else path
        return open_tokenizer(chosen, self.architecture.name, self.special)


def _trainable_part(store: VariableStore) -> VariableStore:
    """The model's own variables: slots of optimizers and caches left out; the blocks are shared."""
    part = VariableStore(store.mesh, store.ranks)
    part.types = {name: v for name, v in store.types.items() if v.trainable}
    part.blocks = {name: store.blocks[name] for name in part.types}
    return part


def open_model(path: str | os.PathLike[str]) -> Model:
    """Opens the model at ``path``: reads configs and headers, no weights.

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
    if not os.path.lexists(folder / "config.json"):
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing.",
                "Give a folder with config.json and model.safetensors, or the folder of a run; a"
                " name on the Hugging Face hub has to be downloaded first.",
            )
        raise CheckpointError(
            f"there is no config.json next to the weights of {path}.", "Download it too, or give the folder of a run."
        )
    values = _table(folder / "config.json")
    # Whether an untied T5 has one embedding or two, only the names of its arrays say.
    with Checkpoint(path) as opened:
        found = architecture(values, keys=opened.places)
        matched(found, opened, ())  # sizes are those of the arrays, before memory is taken
    return Model(path, found, generation=_generation(folder, values))


def _generation(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """How the checkpoint wants texts to be generated; what we use of it is checked."""
    file = folder / "generation_config.json"
    found = _table(file) if os.path.lexists(file) else {}
    found = {**values, **{k: v for k, v in found.items() if v is not None}}
    for key in ("eos_token_id", "bos_token_id", "decoder_start_token_id"):
        value = found.get(key)
        several = value if isinstance(value, list) and key == "eos_token_id" else [value]
        if value is not None and not all(type(n) is int and n >= 0 for n in several):
            raise CheckpointError(f"{file}: {key} is {value!r}.", "Give the id of a token.")
    rule = found.get("length_penalty"), found.get("early_stopping")
    if not isinstance(rule[0], int | float | None) or rule[1] not in (None, False, True, "never"):
        raise CheckpointError(
            f"{file}: length_penalty and early_stopping are {rule}.",
            'Give a number, and one of true, false and "never".',
        )
    return found


def _table(file: Path) -> dict[str, Any]:
    try:
        return plain.json_table(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.", "Download it again.") from error


def _run(path: Path) -> Model:
    saved = open_run(path)
    task = saved.settings.task
    if task not in _KINDS:
        raise ConfigError(f"{path} is a run of the task '{task}'.", f"Give a run of {' or '.join(_KINDS)}.")
    special = EndedVocabulary.special if isinstance(saved.vocabulary, EndedVocabulary) else {}
    found = Architecture("run", _KINDS[task], saved.config, (), "", (), special, {})
    return Model(path, found, saved.manifest)


class _TextOnly(Vocabulary):
    """The vocabulary of a run of the task ``lm``, which sees no special tokens around its texts."""

    def __init__(self, inner: Vocabulary) -> None:
        self._inner, self.name, self.size, self.token_bytes = inner, inner.name, inner.size, inner.token_bytes

    def encode(self, text: str | bytes) -> Tokens:
        return self._inner.encode(text)

    def decode(self, tokens: Iterable[int]) -> str:
        return self._inner.decode(tokens)

    def state(self) -> dict[str, Any]:
        return self._inner.state()
