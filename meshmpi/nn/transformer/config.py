"""What a Transformer is made of: sizes, options, dims and initializers.  Builds no graph."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from meshmpi.dims import Dimension, Layout
from meshmpi.errors import ConfigError, suggest
from meshmpi.nn.attention import (
    AttentionInitializers,
    AttentionOptions,
    attention_initializers,
)
from meshmpi.nn.initializers import random_normal_initializer, variance_scaling_initializer
from meshmpi.nn.layers import factors
from meshmpi.nn.positions import RotaryScaling
from meshmpi.nn.routing import Gating
from meshmpi.ops.sources import VariableDType

GPT2_STDDEV = 0.02
"""Source: GPT-2's code (Radford et al. 2019)."""
_CHOICES = {
    "norm": ("rms", "layer"),
    "initializers": ("paper", "gpt2"),
    "dtype": ("float32", "float64"),
    "activation_dtype": ("", "float32", "float64", "bfloat16"),
    "recompute": ("none", "layers"),
}

_COUNTS = (
    "relative_buckets", "local_window", "experts", "expert_group", "encoder_layers", "token_types",
    "expert_places", "experts_remainder", "decoder_experts_every",
)  # fmt: skip
_SHARES = (
    "attention_dropout", "ff_dropout", "residual_dropout", "embedding_dropout", "final_dropout",
    "label_smoothing", "token_dropout",
)  # fmt: skip
_TYPES = {
    "int": (int,), "float": (float, int), "str": (str,), "bool": (bool,),
    "bool | None": (bool, type(None)), "float | None": (float, int, type(None)),
}  # fmt: skip


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and options of a Transformer; the defaults are the paper's language model.

    Attributes:
        vocab: Number of token ids.
        length: Longest sequence, in tokens.
        d_model: Width of the residual stream.
        d_ff: Width inside the feed-forward layers.
        heads: Attention heads.
        d_kv: Width of keys and values of one head.
        layers: Layers of the decoder, and of the encoder where there is one.
        norm: "rms" or "layer", before every sublayer and at the end.
        norm_scale: Whether norms have a scale.
        norm_bias: Whether layer norms have a bias (an RMS norm never has).
        norm_epsilon: Added to the variance.
        activation: Between the two feed-forward matrices; a name of `mm.nn.ACTIVATIONS`.
        ff_bias: Whether feed-forward layers have biases.
        attention_bias: Whether attention projections have biases.
        tied_softmax: Whether the embedding is also the softmax matrix.
        learned_positions: Whether there is a learned vector for each position.
        attention_dropout: Share of attention weights dropped in training.
        ff_dropout: Share of hidden feed-forward activations dropped.
        residual_dropout: Share of the embedding and of each sublayer's output dropped.
        dropout_over_length: Whether dropout uses one mask for all positions, as the paper does.
        initializers: "paper" or "gpt2" (normal 0.02; output projections / sqrt(2 * layers)).
        scale_logits: Whether attention logits are divided by sqrt(d_kv); None: unless the
            initializers are the paper's, which contain that factor.
        label_smoothing: In training.
        z_loss: In training.
        logit_jitter: Logits are multiplied by numbers in 1 +- this, in training.
        padding_id: Target id that does not count in the loss; -1: every position counts.
        dtype: In which variables are stored and updated.
        activation_dtype: In which is computed; empty: as ``dtype``.
        residual_constraint: Layout of the residual stream between sublayers, such as
            ``"length:cols"`` (sequence parallelism); empty: the computation layout.
        memory_heads: Heads of keys and values: 0 as many as ``heads``, 1 multi-query, else
            grouped-query (see `mm.AttentionOptions`).
        rotary: Whether queries and keys of self-attention are rotated by their positions.
        relative_buckets: Buckets of a learned bias by distance that the self-attentions of a stack
            share, 32 in T5; 0: none.
        local_window: Positions that a query of the decoder's self-attention sees, itself and those
            before it; 0: all.
        experts: Experts of a mixture in place of a feed-forward layer; 0: none.
        experts_every: Every how many-th layer has experts, counted from 1.
        expert_choices: Experts of a token: 1 (Switch), 2 (GShard), ...
        expert_capacity: In training an expert takes this times its even share of tokens.
        expert_eval_capacity: The same outside of training.
        expert_group: Tokens that share capacities; 0: those of one sequence.
        expert_balance: Factor of the load-balancing loss, in training.
        expert_z_loss: Factor of the router's z-loss, in training.
        expert_jitter: In training the router sees its input times numbers in 1 +- this.
        recompute: "layers": in training the inside of each layer, but for its experts, is computed
            again for the backward pass, so that memory holds one layer (`mm.recompute_grad`).
        encoder_layers: Layers of the encoder of an encoder-decoder; 0: as ``layers``.
        norm_after: Whether norms stand behind the sum of sublayer and residual stream, as in BERT
            and the first Transformer; then there is none at the end.
        embedding_norm: Whether the embeddings are normalised before the first layer.
        token_types: Kinds of tokens (sentence A, sentence B), each with a learned vector; 0: none.
        embedding_dropout: Share of the embedding dropped; None: as ``residual_dropout``.
        final_dropout: Share of what the norm at the end returns that is dropped.
        head_transform: Whether logits are made from norm(activation(dense(x))), as in masked
            language models, with the activation of the feed-forward layers.
        softmax_bias: Whether logits have a bias.
        scale_softmax: Whether logits are divided by sqrt(d_model); None: if the softmax is tied and
            the initializers are the paper's, so that the embedding has variance 1.
        rotary_base: Sets the slowest rotation, base**(2 / d_kv - 1) radians per position.
        rotary_scaling: How rotations are slowed down: "linear:<factor>", or "llama3:<factor>,<low>,
            <high>,<length>" (see `mm.RotaryScaling`); empty: not.
        relative_distance: Distance from which on all share the last relative bucket.
        token_dropout: Share of tokens that is masked in training, 0.12 in ESM2: the embedding of
            ``mask_id`` is zero, and the others are multiplied by (1 - this) / (1 - the share that
            is masked in their sequence), in training or not; 0: off.
        mask_id: Token id that stands for a hidden token; -1: none.
        expert_places: Tokens of a group that an expert takes; 0: by ``expert_capacity``.
        experts_remainder: Layer n, counted from 1, has experts if n leaves this on division by
            ``experts_every``.
        decoder_experts_every: ``experts_every`` of the decoder of an encoder-decoder; 0: the same.
        experts_skip_padding: Whether padding takes no places of experts.
        shared_embedding: Whether source and target of an encoder-decoder have one embedding.
        attention_output_bias: Whether the output of attention has a bias; None: as
            ``attention_bias``.
    """

    vocab: int
    length: int
    d_model: int
    d_ff: int
    heads: int
    d_kv: int
    layers: int
    norm: str = "rms"
    norm_scale: bool = True
    norm_bias: bool = True
    norm_epsilon: float = 1e-6
    activation: str = "relu"
    ff_bias: bool = False
    attention_bias: bool = False
    tied_softmax: bool = False
    learned_positions: bool = True
    attention_dropout: float = 0.0
    ff_dropout: float = 0.0
    residual_dropout: float = 0.0
    dropout_over_length: bool = False
    initializers: str = "paper"
    scale_logits: bool | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_jitter: float = 0.0
    padding_id: int = -1
    dtype: str = "float32"
    activation_dtype: str = ""
    residual_constraint: str = ""
    memory_heads: int = 0
    rotary: bool = False
    relative_buckets: int = 0
    local_window: int = 0
    experts: int = 0
    experts_every: int = 2
    expert_choices: int = 1
    expert_capacity: float = 1.25
    expert_eval_capacity: float = 2.0
    expert_group: int = 0
    expert_balance: float = 1e-2
    expert_z_loss: float = 0.0
    expert_jitter: float = 0.0
    recompute: str = "none"
    encoder_layers: int = 0
    norm_after: bool = False
    embedding_norm: bool = False
    token_types: int = 0
    embedding_dropout: float | None = None
    final_dropout: float = 0.0
    head_transform: bool = False
    softmax_bias: bool = False
    scale_softmax: bool | None = None
    rotary_base: float = 10000.0
    rotary_scaling: str = ""
    relative_distance: int = 128
    token_dropout: float = 0.0
    mask_id: int = -1
    expert_places: int = 0
    experts_remainder: int = 0
    decoder_experts_every: int = 0
    experts_skip_padding: bool = True
    shared_embedding: bool = True
    attention_output_bias: bool | None = None

    def __post_init__(self) -> None:
        self._check_types()
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(
                    f"Transformer: {name} is '{value}'.", suggest(str(value), allowed)
                )
        for name in ("vocab", "length", "d_model", "d_ff", "heads", "d_kv", "layers"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"Transformer: {name} is {getattr(self, name)}.", "Give at least 1."
                )
        for name in _SHARES:
            if not 0.0 <= (getattr(self, name) or 0.0) < 1.0:
                raise ConfigError(
                    f"Transformer: {name} is {getattr(self, name)}.", "Give a number in [0, 1)."
                )
        factors(self.activation)
        Layout(self.residual_constraint)
        self._check_attention()
        self._check_tokens()
        if self.experts:
            self.gating()  # checks its own options

    def _check_attention(self) -> None:
        self.attention_options().heads_dims(self.heads_dim)
        if self.rotary and self.d_kv % 2:
            raise ConfigError(
                f"Transformer: rotary positions with d_kv {self.d_kv}.", "Give an even d_kv."
            )
        if self.relative_buckets and self.local_window:
            raise ConfigError(
                f"Transformer: relative_buckets is {self.relative_buckets} and local_window"
                f" {self.local_window}; a local window has no relative bias.",
                "Set one of them to 0, or use rotary positions.",
            )
        for name in _COUNTS:
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"Transformer: {name} is {getattr(self, name)}.", "Give 0 or more."
                )
        if self.rotary_base <= 1.0:
            raise ConfigError(
                f"Transformer: rotary_base is {self.rotary_base}.", "Give more than 1."
            )
        RotaryScaling.parse(self.rotary_scaling)
        if self.experts_every < 1 or (self.experts and self.expert_choices > self.experts):
            raise ConfigError(
                f"Transformer: experts_every is {self.experts_every}, expert_choices"
                f" {self.expert_choices} of {self.experts} experts.",
                "Give at least 1, and no more choices than experts.",
            )

    def _check_tokens(self) -> None:
        if not -1 <= self.mask_id < self.vocab:
            raise ConfigError(
                f"Transformer: mask_id is {self.mask_id}, but vocab is {self.vocab}.",
                "Give an id of the vocabulary, or -1 for none.",
            )
        if self.token_dropout and self.mask_id < 0:
            raise ConfigError(
                f"Transformer: token_dropout is {self.token_dropout} without a mask_id.",
                "Give the id that stands for a hidden token.",
            )

    def _check_types(self) -> None:
        """ConfigError for a value of another type than its option's, as a string from a shell."""
        for f in fields(self):
            value = getattr(self, f.name)
            allowed = _TYPES[str(f.type)]
            # bool is a kind of int for Python, and no number for us.
            if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
                raise ConfigError(
                    f"Transformer: {f.name} is {value!r} ({type(value).__name__}).",
                    f"Give {' or '.join(t.__name__ for t in allowed)}.",
                )

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> TransformerConfig:
        """A config from keys and values, as a TOML file has them.

        Raises:
            ConfigError: A key does not exist, or one without a default is missing.
        """
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(f"a Transformer has no option '{key}'.", suggest(key, known))
        missing = [n for n in known[:7] if n not in values]
        if missing:
            raise ConfigError(f"a Transformer needs {', '.join(missing)}.", "Give numbers.")
        return cls(**values)

    def with_options(self, **changes: Any) -> TransformerConfig:
        """The same config with some options changed."""
        return replace(self, **changes)

    # ---- dims ------------------------------------------------------------------------------

    @property
    def vocab_dim(self) -> Dimension:
        return Dimension("vocab", self.vocab)

    @property
    def length_dim(self) -> Dimension:
        return Dimension("length", self.length)

    @property
    def model_dim(self) -> Dimension:
        return Dimension("d_model", self.d_model)

    @property
    def ff_dim(self) -> Dimension:
        return Dimension("d_ff", self.d_ff)

    @property
    def heads_dim(self) -> Dimension:
        return Dimension("heads", self.heads)

    @property
    def kv_dim(self) -> Dimension:
        return Dimension("d_kv", self.d_kv)

    @property
    def experts_dim(self) -> Dimension:
        return Dimension("experts", self.experts)

    @property
    def types_dim(self) -> Dimension:
        return Dimension("token_types", self.token_types)

    @property
    def transform_dim(self) -> Dimension:
        """Of what ``head_transform`` makes of d_model; of the same size."""
        return Dimension("d_transform", self.d_model)

    # ---- what follows from the options -----------------------------------------------------

    @property
    def variable_dtype(self) -> VariableDType:
        return VariableDType(self.dtype, self.activation_dtype or self.dtype)

    @property
    def attention_scale(self) -> float:
        """Factor of the attention logits."""
        explicit = self.initializers != "paper" if self.scale_logits is None else self.scale_logits
        return self.d_kv**-0.5 if explicit else 1.0

    @property
    def softmax_scale(self) -> float:
        """Factor of the logits: d_model**-0.5 where ``scale_softmax`` says so."""
        unit = self.tied_softmax and self.initializers == "paper"
        scaled = unit if self.scale_softmax is None else self.scale_softmax
        return self.d_model**-0.5 if scaled else 1.0

    @property
    def dropout_broadcast(self) -> tuple[str, ...]:
        return ("length",) if self.dropout_over_length else ()

    def has_experts(self, layer: int) -> bool:
        """Whether layer 0, 1, ... has experts in place of its feed-forward layer."""
        every = self.experts_every
        return self.experts > 0 and (layer + 1) % every == self.experts_remainder % every

    @property
    def encoder_stack(self) -> TransformerConfig:
        """The config of the encoder alone of an encoder-decoder."""
        return replace(self, layers=self.encoder_layers or self.layers, encoder_layers=0)

    @property
    def decoder_stack(self) -> TransformerConfig:
        """The config of the decoder alone of an encoder-decoder."""
        every = self.decoder_experts_every or self.experts_every
        return replace(self, encoder_layers=0, experts_every=every, decoder_experts_every=0)

    def gating(self) -> Gating:
        """How tokens choose experts."""
        return Gating(
            self.expert_choices, self.expert_capacity, self.expert_eval_capacity,
            group_size=self.expert_group or None, jitter=self.expert_jitter,
            balance_loss=self.expert_balance, z_loss=self.expert_z_loss,
            places=self.expert_places or None,
        )  # fmt: skip

    @property
    def attention_has_output_bias(self) -> bool:
        own = self.attention_output_bias
        return self.attention_bias if own is None else own

    def attention_options(self, self_attention: bool = True) -> AttentionOptions:
        """Memory heads and rotations; only self-attention is rotated."""
        return AttentionOptions(
            self.memory_heads, rotary=self.rotary and self_attention, rotary_base=self.rotary_base,
            rotary_scaling=RotaryScaling.parse(self.rotary_scaling),
            output_bias=self.attention_output_bias,
        )  # fmt: skip

    def attention_initializers(self) -> AttentionInitializers:
        if self.initializers == "paper":
            folded = self.attention_scale == 1.0
            return attention_initializers(self.model_dim, self.kv_dim, self.heads_dim, folded)
        into = random_normal_initializer(0.0, GPT2_STDDEV)
        return AttentionInitializers(into, into, into, self._output_initializer())

    def ff_initializers(self) -> tuple[Any, Any]:
        """Of the kernels into and out of the hidden layer."""
        if self.initializers == "paper":
            return variance_scaling_initializer(), variance_scaling_initializer()
        return random_normal_initializer(0.0, GPT2_STDDEV), self._output_initializer()

    def head_initializer(self) -> Any:
        """Of the kernel of ``head_transform``."""
        if self.initializers == "paper":
            return variance_scaling_initializer()
        return random_normal_initializer(0.0, GPT2_STDDEV)

    def embedding_initializer(self) -> Any:
        """Of the embeddings of tokens, positions and token types."""
        stddev = 1.0 if self.initializers == "paper" else GPT2_STDDEV
        return random_normal_initializer(0.0, stddev)

    def softmax_initializer(self) -> Any:
        stddev = self.d_model**-0.5 if self.initializers == "paper" else GPT2_STDDEV
        return random_normal_initializer(0.0, stddev)

    def _output_initializer(self) -> Any:
        return random_normal_initializer(0.0, GPT2_STDDEV / (2 * self.layers) ** 0.5)
