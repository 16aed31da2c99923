"""All settings of a training run, each with meaning, unit and default.

Describes only: `meshmpi.transformer.training.config` reads files, `meshmpi.transformer.training.model` builds the
graph. Independent of MPI.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from meshmpi.errors import ConfigError
from meshmpi.training.settings import EvaluateSettings, LoopSettings, RunSettings
from meshmpi.transformer.models import TransformerConfig
from meshmpi.validated import OrNone, section, setting, settings


@settings
class DataSettings:
    """The text and how it is cut into tokens."""

    corpus: str = setting("tinyshakespeare", "tinyshakespeare, shakespeare, sotu, or the path of a text file")
    fallback: str = setting("", "corpus to use when a named `corpus` is not in the cache and cannot be fetched")
    vocabulary: str = setting("characters", "bytes, characters, bpe:<size> or tokenizer:<path>")
    held_out_fraction: float = setting(0.1, "share of the text, at its end, that is held out")


@settings
class TranslationSettings:
    """Pairs of sentences, for task translation; their vocabulary is data.vocabulary."""

    pairs: str = setting(
        "debian-en-de", "debian-<from>-<to> with en and one of de, fr; or a file of lines source TAB target"
    )
    source: str = setting("", "a file of sentences, in place of pairs; empty: none")
    target: str = setting("", "the file of their translations, line by line")
    least_words: int = setting(2, "shortest sentence, in either language", "words", minimum=0)
    most_words: int = setting(60, "longest sentence, in either language", "words", minimum=1)
    ratio: float = setting(2.0, "maximum ratio of the numbers of words in a sentence and its translation", minimum=1.0)
    source_length: int = setting(0, "length of a row of sources; 0: model.length", "tokens", minimum=0)
    packing: bool = setting(True, "whether several pairs share a row, which saves padding")
    beams: int = setting(4, "translations kept at each step of beam search", minimum=1)
    alpha: float = setting(0.6, "exponent of the length penalty of beam search", minimum=0.0)
    sentences: int = setting(200, "held-out sentences translated at the end for BLEU; 0: none", minimum=0)
    sentence_batch: int = setting(16, "sentences translated together", minimum=1)


@settings
class OptimizerSettings:
    """How gradients become steps."""

    name: Literal["sgd", "momentum", "adam", "adamw", "adafactor", "lamb"] = setting("adamw", "update rule")
    learning_rate: str = setting("0.001", "a number or a product, as 0.001*linear_warmup(100)*cosine_decay(2000, 0.1)")
    beta1: float = setting(0.9, "adam(w), lamb: decay of the mean gradient; momentum: the momentum")
    beta2: float = setting(0.999, "adam(w), lamb: decay of the mean square")
    epsilon: float = setting(1e-8, "adam(w), lamb: number added to the root")
    weight_decay: float = setting(0.01, "adamw, lamb: multiplied by the learning rate; biases and norms do not decay")
    decay_exponent: float = setting(0.8, "adafactor: second moments decay by 1 - t**-this")
    relative_step: bool = setting(True, "adafactor: steps are relative to the size of the weights")
    clip_norm: OrNone[float] = setting(None, "maximum global norm of the gradients; none: no clipping")
    microbatches: int = setting(
        1, "parts of a batch computed one after another to save memory; must divide batch", minimum=1
    )


@settings
class TrainSettings(RunSettings):
    """The length of the run and what one step takes."""

    batch: int = setting(16, "windows per step, all ranks together", "windows", minimum=1)


@settings
class HeldOutSettings(EvaluateSettings):
    """The held-out loss during training; at its end the whole held-out text is evaluated."""

    every: int = setting(200, "interval between evaluations; 0: only at the end", "steps", minimum=0)
    batch: int = setting(0, "windows evaluated together; 0: train.batch", "windows", minimum=0)
    windows: int = setting(
        0, "windows of each evaluation before the last; 0: the whole held-out text", "windows", minimum=0
    )
    final_windows: int = setting(0, "windows of the last evaluation; 0: the whole held-out text", "windows", minimum=0)


@settings
class SampleSettings:
    """The continuation written at the end."""

    prompt: str = setting("\n", "text to continue")
    tokens: int = setting(200, "length of the continuation; 0: none", "tokens", minimum=0)
    temperature: float = setting(0.8, "0 takes the most probable token", minimum=0.0)
    seed: int = setting(0, "seed of the sampling noise")


@settings
class MeshSettings:
    """The ranks and what is split over them; also given by --mesh, --layout, --storage."""

    shape: str = setting("", "axes and sizes, such as rows:2;cols:2; empty: one axis, all, with all ranks")
    layout: str = setting(
        "", "dimensions and their axes, such as batch:rows;heads:cols; empty without a shape: batch:all (data-parallel)"
    )
    storage: str = setting("", "layout of stored variables, such as d_model:rows; empty: same as the computation")
    optimizer_storage: str = setting("", "layout of stored optimizer slots; empty: same as the variable")
    overlap: Literal["auto", "on", "off"] = setting(
        "auto", "reduce gradients while others are computed; auto: between hosts"
    )
    memory_limit: str = setting(
        "", "memory of a rank for a step, such as 1.5 GB: values are recomputed until it fits; empty: no limit"
    )
    recover: bool = setting(
        False, "whether the remaining ranks continue on a smaller mesh when some are lost; also --recover"
    )
    machine: str = setting(
        "", "machine to predict times for, a name or file; empty: what `meshmpi calibrate` measured here"
    )


@settings
class Settings(LoopSettings):
    """A training run of a Transformer."""

    task: Literal["lm", "translation"] = setting(
        "lm", "what the model learns: lm: the next token of a text; translation: sentence pairs"
    )
    data: DataSettings = section(DataSettings)
    translation: TranslationSettings = section(TranslationSettings)
    model: TransformerConfig = section(TransformerConfig)
    optimizer: OptimizerSettings = section(OptimizerSettings)
    train: TrainSettings = section(TrainSettings)
    evaluate: HeldOutSettings = section(HeldOutSettings)
    sample: SampleSettings = section(SampleSettings)
    mesh: MeshSettings = section(MeshSettings)


def transformer_config(model: TransformerConfig, vocabulary_size: int) -> TransformerConfig:
    """The Transformer that the settings describe, for a vocabulary of this many tokens.

    Raises:
        ConfigError: The vocabulary does not fit.
    """
    if 0 < model.vocab < vocabulary_size:
        raise ConfigError(
            f"'model.vocab' is {model.vocab}, but the vocabulary has {vocabulary_size} tokens.",
            "Give 0, or at least that number.",
        )
    return replace(model, vocab=model.vocab or vocabulary_size)
