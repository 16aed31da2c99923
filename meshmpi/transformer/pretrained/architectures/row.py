"""Describes an architecture as data, and reads its options from a config.json.

A field of `TransformerConfig` is given as its value, or as a function of the options that returns it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import Any

from meshmpi.transformer.models import TransformerConfig
from meshmpi.transformer.pretrained.architectures.entries import Architecture, entries_of
from meshmpi.transformer.pretrained.architectures.options import Options

Values = dict[str, Any]
"""Arguments of `TransformerConfig`."""
Keys = Mapping[str, Any]
"""Field of `TransformerConfig` -> its value, or a function of `Options` that reads it."""
count, repeated, number, flag, activation = (
    partial(methodcaller, name) for name in ("count", "repeated", "number", "flag", "activation")
)


def sizes(vocab: int | None, length: int, d_model: int, d_ff: int, heads: int, layers: int) -> Values:
    """Sizes under their usual names; the arguments are what `transformers` takes where a file says nothing."""
    return {
        "vocab": count("vocab_size", vocab),
        "length": count("max_position_embeddings", length),
        "d_model": count("hidden_size", d_model),
        "d_ff": count("intermediate_size", d_ff),
        "heads": repeated("num_attention_heads", heads),
        "layers": repeated("num_hidden_layers", layers),
    }


def gated(key: str, default: str) -> Callable[[Options], str]:
    """Reads the activation of a gated unit."""
    return lambda options: options.gated(key, options.word(key, default))


def read(options: Options, keys: Keys) -> Values:
    """The fields of a row; heads share the width of the model unless the row says how wide one is."""
    values: Values = {name: value(options) if callable(value) else value for name, value in keys.items()}
    if values.get("d_kv") is None:
        values["d_kv"] = options.head(values["d_model"], values["heads"])
    return values


@dataclass(frozen=True)
class Row:
    """Describes an architecture; called with options, it makes the `Architecture`.

    A new architecture whose parts `TransformerConfig` has is a row of `ARCHITECTURES` and no other code.

    Attributes:
        kind, prefix, ignored: As in `Architecture`.
        names, legacy, conv1d: As in `entries_of`; ``names`` is a function where they depend on the config.
        keys: Where the fields of `TransformerConfig` are read.
        also: Reads the fields whose values depend on several keys.
        only: Options of which few values are implemented: those; what `transformers` takes without the key is first.
        special: Ids of special tokens that a file may leave out.
        harmless: Further options that change nothing in this architecture.
    """

    kind: str
    names: str | Callable[[TransformerConfig], str]
    keys: Keys
    also: Callable[[Options], Values] = lambda _: {}
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict[str, tuple[object, ...]])
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    special: Mapping[str, int] = field(default_factory=dict[str, int])
    legacy: tuple[tuple[str, str], ...] = ()
    conv1d: bool = False
    harmless: tuple[str, ...] = ()

    def __call__(self, options: Options) -> Architecture:
        for key, allowed in self.only.items():
            options.only(key, *allowed)
        options.known += self.harmless
        config = TransformerConfig(**read(options, {**self.keys, **self.also(options)}))
        special = options.special(**self.special)
        options.finish()
        if self.kind == "encoder_decoder":
            special.setdefault("decoder_start", special["pad"])
        names = self.names if isinstance(self.names, str) else self.names(config)
        entries = entries_of(config, names, self.legacy, self.conv1d)
        return Architecture(
            options.name, self.kind, config, entries, self.prefix, self.ignored, special, options.values
        )
