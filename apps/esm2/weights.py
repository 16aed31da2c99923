"""Models by the path of their weights: a Hugging Face checkpoint of ESM2, or a run of this app."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from apps.esm2.alphabet import MASK, PAD, TOKENS
from meshmpi import checkpoint
from meshmpi.errors import CheckpointError
from meshmpi.files import plain
from meshmpi.transformer.models import TransformerConfig
from meshmpi.transformer.training.config import from_dict
from meshmpi.transformer.training.settings import Settings, transformer_config


class Model(NamedTuple):
    """A model whose weights are still in their files.

    Attributes:
        config: The Transformer.
        fill: Gives the variables of a compiled step their values; collective.  Every rank reads the
            bytes of its own blocks.
        longest: The most tokens of a row that it was made for.
    """

    config: TransformerConfig
    fill: Callable[[Any], Any]
    longest: int


def open_model(path: str | Path) -> Model:
    """The model of a folder.

    Args:
        path: Folder with config.json and model.safetensors (or its shards), or the folder of a run
            of `apps.esm2 train`, or one of its checkpoints.

    Raises:
        CheckpointError: There is neither, or it is no ESM2 of 33 tokens.
    """
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return _hugging_face(folder)
    there = [folder] if (folder / "manifest.json").is_file() else checkpoint.find(folder / "checkpoints")
    if there:
        return _own(there[0])
    raise CheckpointError(
        f"{folder} has neither a config.json nor checkpoints.",
        "Give the folder of a Hugging Face checkpoint of ESM2, or of a run of `python -m apps.esm2 train`.",
    )


def _hugging_face(folder: Path) -> Model:
    from meshmpi.transformer.pretrained import architecture, load

    try:
        values = plain.json_table(folder / "config.json")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / 'config.json'} cannot be read: {error}.", "Download it again.") from error
    kind = values.get("model_type")
    if kind != "esm":
        raise CheckpointError(
            f"{folder / 'config.json'} is of a model of type {kind!r}.",
            "Give a checkpoint of ESM2, whose model_type is 'esm'; `meshmpi score` takes others.",
        )
    found = architecture(values)
    _check_alphabet(folder / "config.json", found.config)
    # Two of the positions that a config counts are not those of tokens.
    longest = max(3, found.config.length - 2)
    return Model(found.config, lambda variables: load(variables, found, folder), longest)


def _own(folder: Path) -> Model:
    manifest = checkpoint.read_manifest(folder)
    kind = manifest.about.get("vocabulary", {}).get("kind")
    if kind != "proteins":
        raise CheckpointError(
            f"the run of {folder} was not trained on proteins but on tokens of kind '{kind}'.",
            "Give a run of `python -m apps.esm2 train`.",
        )
    settings = from_dict(Settings, manifest.about["settings"])
    config = transformer_config(settings.model, len(TOKENS))
    _check_alphabet(folder, config)
    return Model(config, lambda variables: checkpoint.load(manifest, variables, extra=True), config.length)


def _check_alphabet(where: Path, config: TransformerConfig) -> None:
    """CheckpointError unless tokens mean what they mean here."""
    found = {"vocab": config.vocab, "padding_id": config.padding_id, "mask_id": config.mask_id}
    wanted = {"vocab": len(TOKENS), "padding_id": PAD, "mask_id": MASK}
    if found != wanted:
        raise CheckpointError(
            f"{where} describes a model with {found}, but ESM2 has {wanted}.", "Give a checkpoint of ESM2."
        )
