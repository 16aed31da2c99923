"""Holds the configuration of a Transformer: sizes, options, dimensions, initializers.  Builds no graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from meshmpi.dims import Dimension, Layout
from meshmpi.errors import ConfigError
from meshmpi.graph.ops.sources import VariableDType
from meshmpi.nn.attention import AttentionInitializers, AttentionOptions, attention_initializers
from meshmpi.nn.initializers import random_normal_initializer, variance_scaling_initializer
from meshmpi.nn.layers import factors
from meshmpi.nn.positions import RotaryScaling
from meshmpi.nn.routing import Gating
from meshmpi.validated import OrNone, setting, settings

GPT2_STDDEV = 0.02
"""Source: GPT-2's code (Radford et al. 2019)."""


def _share(help: str, default: float | None = 0.0) -> Any:
    """A share of something that is dropped: from 0 on, below 1."""
    return setting(default, help, minimum=0.0, below=1.0)


class _Dim:
    """A dim whose size is a setting."""

    def __init__(self, name: str, setting: str = ""):
        self.name, self.setting = name, setting or name

    def __get__(self, config: Any, owner: type[Any]) -> Dimension:
        return Dimension(self.name, getattr(config, self.setting))


@settings
class TransformerConfig:
    """Sizes and options of a Transformer; the defaults are the paper's language model, at a small size."""

    vocab: int = setting(0, "rows of the embedding; 0: size of the run's vocabulary", "tokens", minimum=0)
    length: int = setting(256, "maximum sequence length, and length of a training window", "tokens", minimum=1)
    d_model: int = setting(256, "width of the residual stream", minimum=1)
    d_ff: int = setting(1024, "width inside the feed-forward layers", minimum=1)
    heads: int = setting(4, "attention heads", minimum=1)
    d_kv: int = setting(64, "width of keys and values per head", minimum=1)
    layers: int = setting(4, "layers of the decoder, and of the encoder if there is one", minimum=1)
    norm: Literal["rms", "layer"] = setting("rms", "norm before every sublayer and at the end")
    norm_scale: bool = setting(True, "whether norms have a scale")
    norm_bias: bool = setting(True, "whether layer norms have a bias; an RMS norm never has one")
    norm_epsilon: float = setting(1e-6, "number added to the variance")
    activation: str = setting("relu", "activation in the feed-forward layers: a name of mm.nn.ACTIVATIONS")
    ff_bias: bool = setting(False, "whether feed-forward layers have biases")
    attention_bias: bool = setting(False, "whether attention projections have biases")
    tied_softmax: bool = setting(False, "whether the embedding is also the softmax matrix")
    learned_positions: bool = setting(True, "whether positions have learned vectors")
    attention_dropout: float = _share("share of attention weights dropped in training")
    ff_dropout: float = _share("share of hidden feed-forward activations dropped in training")
    residual_dropout: float = _share("share of the embedding and of every sublayer's output dropped in training")
    dropout_over_length: bool = setting(False, "whether one dropout mask serves all positions, as in the paper")
    initializers: Literal["paper", "gpt2"] = setting(
        "paper", "initial values; gpt2: normal 0.02, output projections divided by sqrt(2 * layers)"
    )
    scale_logits: OrNone[bool] = setting(
        None, "whether attention logits are divided by sqrt(d_kv); none: unless the initializers contain that factor"
    )
    label_smoothing: float = _share("label smoothing in training")
    z_loss: float = setting(0.0, "factor of log(Z)**2 in the training loss")
    logit_jitter: float = setting(0.0, "in training logits are multiplied by random numbers in 1 +- this")
    padding_id: int = setting(-1, "target token that the training loss ignores; -1: none")
    dtype: Literal["float32", "float64"] = setting("float32", "data type of the variables and their updates")
    activation_dtype: Literal["", "float32", "float64", "bfloat16"] = setting(
        "", "data type of the computation; empty: dtype"
    )
    residual_constraint: str = setting(
        "", "layout of the residual stream between sublayers, such as length:cols (sequence parallelism); empty: none"
    )
    memory_heads: int = setting(0, "heads of keys and values; 0: same as heads, 1: multi-query, else grouped-query")
    rotary: bool = setting(False, "whether queries and keys of self-attention are rotated by their positions")
    relative_buckets: int = setting(
        0, "buckets of a learned bias by distance that all layers share; 0: none, T5: 32", minimum=0
    )
    local_window: int = setting(
        0, "positions that a query of the decoder sees, itself and those before it; 0: all", "tokens", minimum=0
    )
    experts: int = setting(0, "experts in place of a feed-forward layer; 0: none", minimum=0)
    experts_every: int = setting(2, "period of layers with experts, counted from 1", "layers", minimum=1)
    expert_choices: int = setting(1, "experts of a token: 1 (Switch), 2 (GShard), ...", minimum=1)
    expert_capacity: float = setting(
        1.25, "capacity of an expert in training, as a multiple of its even share of tokens"
    )
    expert_eval_capacity: float = setting(2.0, "capacity of an expert outside of training")
    expert_group: int = setting(0, "number of tokens that share capacities; 0: one sequence", "tokens", minimum=0)
    expert_balance: float = setting(1e-2, "factor of the load-balancing loss, in training")
    expert_z_loss: float = setting(0.0, "factor of the router's z-loss, in training")
    expert_jitter: float = setting(0.0, "in training the router's input is multiplied by random numbers in 1 +- this")
    recompute: Literal["none", "layers"] = setting(
        "none", "rematerialisation; layers: each layer is recomputed from its input, so memory holds one layer"
    )
    encoder_layers: int = setting(0, "layers of the encoder of an encoder-decoder; 0: same as layers", minimum=0)
    norm_after: bool = setting(False, "whether norms follow the sum of sublayer and residual stream, as in BERT")
    embedding_norm: bool = setting(False, "whether embeddings are normalised before the first layer")
    token_types: int = setting(0, "number of token types (sentence A, B) with learned vectors; 0: none", minimum=0)
    embedding_dropout: OrNone[float] = _share("share of embeddings dropped; none: same as residual_dropout", None)
    final_dropout: float = _share("share of the final norm's output dropped in training")
    head_transform: bool = setting(
        False, "whether logits are made from norm(activation(dense(x))), as in masked language models"
    )
    softmax_bias: bool = setting(False, "whether logits have a bias")
    scale_softmax: OrNone[bool] = setting(
        None,
        "whether logits are divided by sqrt(d_model); none: if the softmax is tied and the initializers are the"
        " paper's, so that the embedding has variance 1",
    )
    rotary_base: float = setting(10000.0, "the slowest rotation is this**(2 / d_kv - 1) radians per position")
    rotary_scaling: str = setting(
        "", "scaling of the rotations: linear:<factor> or llama3:<factor>,<low>,<high>,<length>; empty: not"
    )
    relative_distance: int = setting(128, "distance from which all positions share the last relative bucket", "tokens")
    token_dropout: float = _share(
        "share of tokens masked in training, 0.12 in ESM2: the embedding of mask_id is zero, and the others are scaled"
        " by (1 - this) / (1 - the share that is masked in their sequence), in training or not"
    )
    mask_id: int = setting(-1, "token that replaces a masked token; -1: none")
    expert_places: int = setting(0, "tokens per group that an expert takes; 0: from expert_capacity", minimum=0)
    experts_remainder: int = setting(
        0, "layer n, counted from 1, has experts if n leaves this on division by experts_every", minimum=0
    )
    decoder_experts_every: int = setting(0, "experts_every of an encoder-decoder's decoder; 0: the same", minimum=0)
    experts_skip_padding: bool = setting(True, "whether padding does not use expert capacity")
    shared_embedding: bool = setting(True, "whether source and target of an encoder-decoder have one embedding")
    attention_output_bias: OrNone[bool] = setting(
        None, "whether the output of attention has a bias; none: as attention_bias"
    )
    query_norm: Literal["", "head", "all"] = setting(
        "", "RMS norm of queries and keys: head: over each head, all: over all heads together; empty: none"
    )
    norm_output: bool = setting(
        False, "whether norms are those of what sublayers return, before it is added to the residual stream"
    )
    rotary_width: int = setting(0, "how many elements of each head are rotated, the first ones; 0: all d_kv", minimum=0)
    parallel: bool = setting(
        False, "whether the feed-forward layer reads the input of attention instead of the sum after it"
    )
    position_offset: int = setting(
        0,
        "row of the position table for the first token of a text; if not 0, padding is not counted and has the row"
        " before",
        minimum=0,
    )

    def check(self) -> None:
        """Refuses values that contradict each other or do not name anything.

        Raises:
            ConfigError: Or another error of the package, which says what does not fit.
        """
        factors(self.activation)
        Layout(self.residual_constraint)
        RotaryScaling.parse(self.rotary_scaling)
        self.attention_options().heads_dims(self.heads_dim)
        if self.rotary_base <= 1.0:
            raise ConfigError(f"Transformer: rotary_base is {self.rotary_base}.", "Give more than 1.")
        if self.rotary and self.d_kv % 2:
            raise ConfigError(f"Transformer: rotary positions with d_kv {self.d_kv}.", "Give an even d_kv.")
        if self.relative_buckets and self.local_window:
            raise ConfigError(
                f"Transformer: relative_buckets is {self.relative_buckets} and local_window"
                f" {self.local_window}; a local window has no relative bias.",
                "Set one of them to 0, or use rotary positions.",
            )
        if self.norm_after and self.norm_output:
            raise ConfigError("Transformer: norm_after and norm_output are both true.", "Set one of them to false.")
        if self.norm_after and self.parallel:
            raise ConfigError("Transformer: norm_after and parallel are both true.", "Set one of them to false.")
        if self.rotary_width % 2 or self.rotary_width > self.d_kv:
            raise ConfigError(
                f"Transformer: rotary_width is {self.rotary_width} of d_kv {self.d_kv}.",
                "Give an even number up to d_kv.",
            )
        self._check_experts()
        self._check_tokens()

    def _check_experts(self) -> None:
        if not self.experts:
            return
        if self.expert_choices > self.experts:
            raise ConfigError(
                f"Transformer: expert_choices is {self.expert_choices} of {self.experts} experts.",
                "Give no more choices than experts.",
            )
        self.gating()  # checks its own options

    def _check_tokens(self) -> None:
        if self.mask_id < -1 or 0 < self.vocab <= self.mask_id:
            raise ConfigError(
                f"Transformer: mask_id is {self.mask_id}, but vocab is {self.vocab}.",
                "Give an id of the vocabulary, or -1 for none.",
            )
        if self.token_dropout and self.mask_id < 0:
            raise ConfigError(
                f"Transformer: token_dropout is {self.token_dropout} without a mask_id.",
                "Give the id that stands for a hidden token.",
            )

    def with_options(self, **changes: Any) -> TransformerConfig:
        """The same config with some options changed."""
        return replace(self, **changes)

    # ---- dims ------------------------------------------------------------------------------

    length_dim = _Dim("length")
    model_dim = _Dim("d_model")
    ff_dim = _Dim("d_ff")
    heads_dim = _Dim("heads")
    kv_dim = _Dim("d_kv")
    experts_dim = _Dim("experts")
    types_dim = _Dim("token_types")
    transform_dim = _Dim("d_transform", "d_model")  # of ``head_transform``

    @property
    def positions_dim(self) -> Dimension:
        """Rows of the position table."""
        return Dimension("length", self.length + self.position_offset)

    @property
    def vocab_dim(self) -> Dimension:
        if not self.vocab:
            raise ConfigError("Transformer: vocab is 0.", "Give the number of token ids.")
        return Dimension("vocab", self.vocab)

    # ---- what follows from the options -----------------------------------------------------

    @property
    def variable_dtype(self) -> VariableDType:
        return VariableDType(self.dtype, self.activation_dtype or self.dtype)

    @property
    def attention_scale(self) -> float:
        """Factor of the attention logits."""
        explicit = not self._paper if self.scale_logits is None else self.scale_logits
        return self.d_kv**-0.5 if explicit else 1.0

    @property
    def softmax_scale(self) -> float:
        """Factor of the logits: d_model**-0.5 where ``scale_softmax`` says so."""
        unit = self.tied_softmax and self._paper
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
            self.expert_choices,
            self.expert_capacity,
            self.expert_eval_capacity,
            group_size=self.expert_group or None,
            jitter=self.expert_jitter,
            balance_loss=self.expert_balance,
            z_loss=self.expert_z_loss,
            places=self.expert_places or None,
        )

    @property
    def attention_has_output_bias(self) -> bool:
        own = self.attention_output_bias
        return self.attention_bias if own is None else own

    def attention_options(self, self_attention: bool = True) -> AttentionOptions:
        """Memory heads and rotations; only self-attention is rotated."""
        return AttentionOptions(
            self.memory_heads,
            rotary=self.rotary and self_attention,
            rotary_base=self.rotary_base,
            rotary_scaling=RotaryScaling.parse(self.rotary_scaling),
            output_bias=self.attention_output_bias,
            query_norm=self.query_norm,
            norm_epsilon=self.norm_epsilon,
            rotary_width=self.rotary_width,
        )

    def attention_initializers(self) -> AttentionInitializers:
        if self._paper:
            folded = self.attention_scale == 1.0
            return attention_initializers(self.model_dim, self.kv_dim, self.heads_dim, folded)
        into = random_normal_initializer(0.0, GPT2_STDDEV)
        return AttentionInitializers(into, into, into, self._output_initializer())

    def ff_initializers(self) -> tuple[Any, Any]:
        """Initializers of the kernels into and out of the hidden layer."""
        return self.head_initializer(), variance_scaling_initializer() if self._paper else self._output_initializer()

    def head_initializer(self) -> Any:
        """The initializer of the kernel of ``head_transform``."""
        return variance_scaling_initializer() if self._paper else random_normal_initializer(0.0, GPT2_STDDEV)

    def embedding_initializer(self) -> Any:
        """The initializer of the embeddings of tokens, positions and token types."""
        return random_normal_initializer(0.0, 1.0 if self._paper else GPT2_STDDEV)

    def softmax_initializer(self) -> Any:
        return random_normal_initializer(0.0, self.d_model**-0.5 if self._paper else GPT2_STDDEV)

    def _output_initializer(self) -> Any:
        return random_normal_initializer(0.0, GPT2_STDDEV / (2 * self.layers) ** 0.5)

    @property
    def _paper(self) -> bool:
        return self.initializers == "paper"
