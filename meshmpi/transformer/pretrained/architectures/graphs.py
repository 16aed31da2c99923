"""Builds the logits of any architecture, so that scoring needs no code for each."""

from __future__ import annotations

from dataclasses import dataclass

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor
from meshmpi.graph.ops.elementwise import not_equal
from meshmpi.graph.ops.sources import placeholder
from meshmpi.nn.experts import ExpertsOutput
from meshmpi.transformer.models import encoder_decoder, lm, masked_lm
from meshmpi.transformer.models.transformers import SOURCE_LENGTH
from meshmpi.transformer.pretrained.architectures.entries import Architecture


@dataclass(frozen=True)
class Inputs:
    """The feeds of a model, all int32; each is called as its attribute."""

    tokens: Tensor  # [batch, length]; for an encoder-decoder the target, moved right by one
    mask: Tensor  # [batch, length], 1 for tokens and 0 for padding
    source: Tensor | None = None  # [batch, source_length], for an encoder-decoder
    source_mask: Tensor | None = None  # [batch, source_length], the same of the source
    types: Tensor | None = None  # [batch, length], kinds of tokens, for a model that has them


def model_inputs(architecture: Architecture, batch: int, length: int, source_length: int = 0) -> Inputs:
    """Placeholders in the current graph for what the model takes.

    An encoder-decoder, and no other model, needs the ``source_length``.
    """
    both = architecture.kind == "encoder_decoder"
    if both != (source_length > 0):
        raise ShapeError(
            f"a {architecture.name} model is of kind {architecture.kind}, and source_length is {source_length}.",
            "Give a positive number to encoder-decoders, and to them only.",
        )
    rows = Dimension("batch", batch)
    shape = Shape([rows, Dimension("length", length)])
    made = {name: placeholder(name, shape, "int32") for name in ("tokens", "mask")}
    if both:
        wide = Shape([rows, Dimension(SOURCE_LENGTH, source_length)])
        for name in ("source", "source_mask"):
            made[name] = placeholder(name, wide, "int32")
    elif architecture.config.token_types:
        made["types"] = placeholder("types", shape, "int32")
    return Inputs(**made)


def model_logits(
    architecture: Architecture, inputs: Inputs, training: bool = False, mixtures: list[ExpertsOutput] | None = None
) -> Tensor:
    """Logits [batch, length, vocab]: of the next token, or of that at the place by an encoder.

    The ``inputs`` are those of `model_inputs`, or tensors like these; ``mixtures`` takes what each mixture of experts
    returns.

    Example:
        >>> from meshmpi.transformer.pretrained.architectures import architecture, model_inputs, model_logits
        >>> found = architecture({"model_type": "gpt2", "n_layer": 2})
        >>> with mm.Graph():
        ...     model_logits(found, model_inputs(found, batch=4, length=16)).shape
        [batch=4, length=16, vocab=50257]
    """
    config, mask = architecture.config, not_equal(inputs.mask, 0)
    if architecture.kind == "encoder_decoder":
        if inputs.source is None or inputs.source_mask is None:
            raise ShapeError(f"a {architecture.name} model needs a source and its mask.", "Use model_inputs().")
        return encoder_decoder(
            config,
            inputs.source,
            inputs.tokens,
            training,
            mixtures,
            source_mask=not_equal(inputs.source_mask, 0),
            mask=mask,
        )
    model = lm if architecture.kind == "lm" else masked_lm
    return model(config, inputs.tokens, training, mixtures, mask=mask, types=inputs.types)
