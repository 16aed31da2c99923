"""Builds the parts of all Transformers: embeddings, sublayers, layers, logits, loss.  The config has all options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor, scope
from meshmpi.graph.autodiff import recompute_grad
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.contraction import einsum
from meshmpi.graph.ops.indexing import gather
from meshmpi.graph.ops.placement import constrain
from meshmpi.graph.ops.reductions import cumsum, reduce_sum
from meshmpi.graph.ops.sources import get_variable, ones
from meshmpi.graph.ops.structure import rename_dimension, reshape
from meshmpi.graph.ops.structure import slice as slice_dim
from meshmpi.nn.attention import multihead_attention
from meshmpi.nn.experts import ExpertsOutput, mixture_of_experts
from meshmpi.nn.initializers import zeros_initializer
from meshmpi.nn.layers import dense, dense_relu_dense, dropout_over, embedding_weights, factors
from meshmpi.nn.local_attention import local_self_attention
from meshmpi.nn.losses import softmax_cross_entropy_with_logits, weighted_mean, weights_nonzero
from meshmpi.nn.normalization import layer_norm, rms_norm
from meshmpi.nn.positions import relative_position_bias
from meshmpi.nn.randomness import multiplicative_jitter
from meshmpi.transformer.models.config import TransformerConfig


def layer_scope(number: int):
    """Prefix ``layer_007`` of one layer's variables."""
    return scope(f"layer_{number:03d}")


@dataclass(frozen=True)
class Stack:
    """The parts of an encoder or a decoder, as variables of the current scope.

    Attributes:
        config: The stack.
        training: Whether dropout, jitter and training capacities act.
        mixtures: Takes what each mixture of experts returns, for its losses.
    """

    config: TransformerConfig
    training: bool = False
    mixtures: list[ExpertsOutput] | None = None

    # -- sublayers ---------------------------------------------------------------------------------

    def placed(self, x: Tensor) -> Tensor:
        """x placed as the config says of the residual stream."""
        layout = self.config.residual_constraint
        return constrain(x, layout) if layout else x

    def dropped(self, x: Tensor, rate: float) -> Tensor:
        """x with dropout in training."""
        return dropout_over(x, self.training, rate, self.config.dropout_broadcast)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """x normalised over d_model."""
        c = self.config
        if c.norm == "rms":
            y = rms_norm(x, "d_model", c.norm_epsilon, name, c.norm_scale, c.variable_dtype)
        else:
            y = layer_norm(x, "d_model", c.norm_epsilon, name, c.norm_scale, c.norm_bias, c.variable_dtype)
        # y is placed like x already.  This places its *gradient* before anything else uses it, so that
        # the sum pending in it is scattered at once.
        return self.placed(y)

    def sublayer(
        self, x: Tensor, name: str, function: Callable[[Tensor], Tensor], stream: Tensor | None = None
    ) -> Tensor:
        """x + dropout(function(norm(x))), or norm(x + dropout(function(x))) with ``norm_after``.

        With ``norm_output`` it is x + dropout(norm(function(x))).  A given ``stream`` takes the place of x in the sum.
        """
        after, output = self.config.norm_after, self.config.norm_output
        y = function(x if after or output else self.norm(x, f"{name}_norm"))
        y = self.norm(y, f"{name}_norm") if output else y
        y = ew.add(x if stream is None else stream, self.dropped(self.placed(y), self.config.residual_dropout))
        return self.norm(y, f"{name}_norm") if after else y

    def _attention(self, self_attention: bool = True) -> dict[str, Any]:
        """Keyword arguments of all attention layers."""
        c = self.config
        return {
            "is_training": self.training,
            "dropout_rate": c.attention_dropout,
            "dropout_broadcast_dims": c.dropout_broadcast,
            "use_bias": c.attention_bias,
            "scale": c.attention_scale,
            "initializers": c.attention_initializers(),
            "variable_dtype": c.variable_dtype,
            "options": c.attention_options(self_attention),
        }

    def attention(
        self,
        x: Tensor,
        mask: Tensor | None,
        memory: Tensor | None = None,
        name: str = "attention",
        position_bias: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """x plus attention to itself, or to ``memory`` [batch, memory_length, d_model]."""
        how = {**self._attention(memory is None), "name": name, "position_bias": position_bias, "causal": causal}
        dims = (self.config.kv_dim, self.config.heads_dim)
        return self.sublayer(x, name, lambda h: multihead_attention(h, memory, mask, *dims, **how))

    def causal_attention(
        self, x: Tensor, seen: Tensor | None, position_bias: Tensor | None, real: Tensor | None = None
    ) -> Tensor:
        """x plus attention of its positions to earlier ones: all, or those of the local window.

        Args:
            x: [batch, length, d_model].
            seen: bool over dims of [batch, length, memory_length], False for what no position sees, or
                none of another segment; None: all.
            position_bias: Added to the logits.
            real: bool [batch, length], for a local window: padding and the rest do not see each other.
        """
        c = self.config
        if not c.local_window:
            return self.attention(x, seen, position_bias=position_bias, causal=True)
        segments, how = None if real is None else ew.cast(real, "int32"), self._attention()

        def attend(h: Tensor) -> Tensor:
            dims = (c.kv_dim, c.heads_dim, c.local_window)
            return local_self_attention(h, *dims, segments=segments, name="attention", **how)

        return self.sublayer(x, "attention", attend)

    def relative_bias(self, length: Dimension, bidirectional: bool) -> Tensor | None:
        """The bias of logits by distance that all self-attentions of a stack share, if there is one."""
        c = self.config
        if not c.relative_buckets:
            return None
        heads, _ = c.attention_options().heads_dims(c.heads_dim)
        memory, how = length._replace(name="memory_length"), (bidirectional, c.relative_buckets, c.relative_distance)
        return relative_position_bias(heads, length, memory, *how, variable_dtype=c.variable_dtype)

    def feed_forward(self, x: Tensor, begun: Tensor, layer: int, mask: Tensor | None = None) -> Tensor:
        """x plus two dense layers or a mixture of experts, as the number of the layer says.

        Args:
            x: [batch, length, d_model], the stream after attention.
            begun: The stream before attention, which these layers read if the config says ``parallel``.
            layer: Number of the layer.
            mask: bool [batch, length]: positions that may take places of experts; None: all.
        """
        c = self.config
        how: dict[str, Any] = {
            "activation": c.activation,
            "use_bias": c.ff_bias,
            "dropout_rate": c.ff_dropout,
            "variable_dtype": c.variable_dtype,
            "initializers": c.ff_initializers(),
            "name": "feed_forward",
        }

        def feed_forward(h: Tensor) -> Tensor:
            if not c.has_experts(layer):
                broadcast = c.dropout_broadcast
                return dense_relu_dense(h, c.ff_dim, self.training, dropout_broadcast_dims=broadcast, **how)
            real = mask if c.experts_skip_padding else None
            found = mixture_of_experts(h, c.experts_dim, c.ff_dim, c.gating(), self.training, mask=real, **how)
            if self.mixtures is not None:
                self.mixtures.append(found)
            return found.output

        return self.sublayer(begun if c.parallel else x, "feed_forward", feed_forward, x)

    def layers(self, x: Tensor, attend: Callable[[Tensor], Tensor], mask: Tensor | None) -> Tensor:
        """The output of all layers, with the final norm.

        Args:
            x: [batch, length, d_model], embedded tokens.
            attend: The attention sublayers of one layer, in whose scope it is called.
            mask: bool [batch, length]: positions that may take places of experts; None: all.
        """
        c = self.config
        for i in range(c.layers):
            with layer_scope(i):

                def inside(x: Tensor, i: int = i) -> Tensor:
                    y = attend(x)
                    return y if c.has_experts(i) else self.feed_forward(y, x, i, mask)

                again = self.training and c.recompute == "layers"
                begun, x = x, recompute_grad(inside, [x]) if again else inside(x)
                # What experts return is needed outside, so experts are not computed again.
                x = self.feed_forward(x, begun, i, mask) if c.has_experts(i) else x
        return self.final(x)

    def final(self, x: Tensor) -> Tensor:
        """The output of a stack: its stream, normalised unless every layer ended with a norm."""
        x = x if self.config.norm_after else self.norm(x, "final_norm")
        return self.dropped(x, self.config.final_dropout)

    # -- from tokens, and to them --------------------------------------------------------------------

    def token_embedding(self, stack: str = "") -> Tensor:
        """The table ``embedding`` [vocab, d_model] of the current scope, for every part that asks.

        Where the stacks of an encoder-decoder have tables of their own, the table of ``stack``, "encoder"
        or "decoder".
        """
        c = self.config
        with scope("" if c.shared_embedding else stack, reuse="auto"):
            first = c.embedding_initializer()
            return embedding_weights(c.vocab_dim, c.model_dim, c.variable_dtype, first, "embedding")

    def position_embedding(self) -> Tensor | None:
        """The table ``positions`` [length, d_model] of the current scope, if the config has one."""
        return self._table("positions", self.config.positions_dim) if self.config.learned_positions else None

    def _table(self, name: str, rows: Dimension) -> Tensor:
        shape = Shape([rows, self.config.model_dim])
        return get_variable(name, shape, self.config.variable_dtype, self.config.embedding_initializer())

    def embed(
        self,
        tokens: Tensor,
        table: Tensor,
        positions: Tensor | None,
        length_name: str = "length",
        places: Tensor | None = None,
        *,
        real: Tensor | None = None,
        types: Tensor | None = None,
    ) -> Tensor:
        """Token plus position vectors, [batch, length, d_model], as they enter the first layer.

        Args:
            tokens: int32 [batch, length].
            table: [vocab, d_model].
            positions: [length, d_model] or None.
            length_name: Name of the dim of positions of ``tokens``.
            places: int32 [batch, length]: the position of each token in its own sequence; None: 0, 1,
                2, ... along the length.
            real: bool [batch, length]: which positions count for ``token_dropout`` and ``position_offset``;
                None: all.
            types: int32 [batch, length], kinds of tokens; None: all of kind 0.

        Raises:
            ShapeError: The tokens are longer than the config's length.
        """
        c, length = self.config, tokens.shape.dim(length_name).size
        x = gather(table, tokens, c.vocab_dim)
        if c.token_dropout:
            x = self._tokens_dropped(x, tokens, length_name, real)
        if positions is not None:
            if length > c.length:
                raise ShapeError(
                    f"the tokens have {length_name} {length}, but there are {c.length} positions.",
                    "Cut the tokens, or make a config with a greater length.",
                    str(tokens.source),
                )
            first = c.position_offset
            if first and places is None and real is not None:
                counted = ew.cast(real, "int32")
                places = ew.subtract(ew.multiply(cumsum(counted, length_name), counted), 1)
            if places is None:
                vectors = rename_dimension(slice_dim(positions, first, length, "length"), "length", length_name)
            else:
                vectors = gather(positions, ew.add(places, first) if first else places, c.positions_dim)
            x = ew.add(x, vectors, output_shape=x.shape)
        if c.token_types:
            kinds = self._table("token_types", c.types_dim)
            if types is None:
                kind = reshape(slice_dim(kinds, 0, 1, "token_types"), Shape([c.model_dim]))
            else:
                kind = gather(kinds, types, c.types_dim)
            x = ew.add(x, kind, output_shape=x.shape)
        if c.embedding_norm:
            x = self.norm(x, "embedding_norm")
        return self.dropped(self.placed(x), c.residual_dropout if c.embedding_dropout is None else c.embedding_dropout)

    def _tokens_dropped(self, x: Tensor, tokens: Tensor, length_name: str, real: Tensor | None) -> Tensor:
        """x with zeros for hidden tokens, the others scaled to the mean size they had in training."""
        dtype = "float64" if x.dtype == "float64" else "float32"  # a bfloat16 cannot count to 1000
        kept = ew.cast(ew.not_equal(tokens, self.config.mask_id), dtype)
        counted = ones(tokens.shape, dtype) if real is None else ew.cast(real, dtype)
        length = reduce_sum(counted, reduced_dim=length_name)
        hidden = reduce_sum(ew.subtract(1.0, kept), reduced_dim=length_name)
        # An empty row, all padding, divides nothing by 1; a row that is hidden wholly has only zeros.
        visible = ew.maximum(ew.subtract(length, hidden), 1.0)
        factor = ew.multiply(ew.divide(length, visible), 1.0 - self.config.token_dropout)
        factor = ew.multiply(kept, factor, output_shape=tokens.shape)
        return ew.multiply(x, ew.cast(factor, x.dtype), output_shape=x.shape)

    def logits(self, x: Tensor, table: Tensor) -> Tensor:
        """Logits [batch, length, vocab], by the variable ``softmax`` or by the embedding ``table``."""
        c = self.config
        shape, dtype = Shape([*x.shape.without(["d_model"]), c.vocab_dim]), c.variable_dtype
        if c.head_transform:
            made, first = factors(c.activation)[0], c.head_initializer()
            x = dense(x, c.transform_dim, c.model_dim, (), True, made, dtype, first, "head")
            x = self.norm(rename_dimension(x, "d_transform", "d_model"), "head_norm")
        if not c.tied_softmax:
            table = get_variable("softmax", Shape([c.model_dim, c.vocab_dim]), dtype, c.softmax_initializer())
        if c.softmax_scale != 1.0:
            x = ew.multiply(x, c.softmax_scale)
        logits = einsum([x, table], shape)
        if c.softmax_bias:
            bias = get_variable("softmax_bias", Shape([c.vocab_dim]), dtype, zeros_initializer(), decays=False)
            logits = ew.add(logits, bias, output_shape=shape)
        return multiplicative_jitter(logits, self.training, c.logit_jitter)

    def mean_loss(self, logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean cross entropy in nats, by weights [batch, length] or over the targets that are not padding.

        Label smoothing, z_loss and the losses of experts act in training only, so that evaluation is
        plain cross entropy.
        """
        c = self.config
        extra = (c.z_loss, c.label_smoothing) if self.training else (0.0, 0.0)
        losses = softmax_cross_entropy_with_logits(logits, targets, c.vocab_dim, *extra)
        if weights is not None:
            weights = ew.cast(weights, losses.dtype)
        elif c.padding_id >= 0:
            weights = weights_nonzero(targets, c.padding_id, losses.dtype)
        mean = weighted_mean(losses, weights)
        for found in self.mixtures or () if self.training else ():
            mean = ew.add(mean, ew.cast(found.loss, mean.dtype))
        return mean
