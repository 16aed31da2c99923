"""All settings of a training run, with meaning, unit and default of each.

Describes only: no files are read (`meshmpi.train.config` does), no graph is built
(`meshmpi.train.model` does), and no MPI is known.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from meshmpi.nn.transformer import TransformerConfig
from meshmpi.train.config import section, setting


@dataclass(frozen=True)
class DataSettings:
    """The text and how it is cut into tokens."""

    corpus: str = setting(
        "tinyshakespeare", "tinyshakespeare, shakespeare, sotu, or the path of a text file"
    )
    fallback: str = setting(
        "", "corpus to use when a named `corpus` cannot be fetched, as without a network"
    )
    vocabulary: str = setting("characters", "bytes, characters, bpe:<size> or tokenizer:<path>")
    held_out_fraction: float = setting(0.1, "part at the end of the text not trained on")


@dataclass(frozen=True)
class TranslationSettings:
    """Pairs of sentences, for task translation; their vocabulary is data.vocabulary."""

    pairs: str = setting(
        "debian-en-de",
        "debian-<from>-<to> with en and one of de, fr; or a file of lines source TAB target",
    )
    source: str = setting("", "a file of sentences, in place of pairs; empty: none")
    target: str = setting("", "the file of their translations, line by line")
    least_words: int = setting(2, "of each side", "words", minimum=0)
    most_words: int = setting(60, "of each side", "words", minimum=1)
    ratio: float = setting(2.0, "most words of one side for each of the other", minimum=1.0)
    source_length: int = setting(
        0, "places for sources in a row; 0: model.length", "tokens", minimum=0
    )
    packing: bool = setting(True, "whether several pairs share a row, which saves padding")
    beams: int = setting(4, "translations kept at each step of beam search", minimum=1)
    alpha: float = setting(0.6, "of the length penalty of beam search", minimum=0.0)
    sentences: int = setting(
        200, "held-out sentences translated at the end for BLEU; 0: none", minimum=0
    )
    sentence_batch: int = setting(16, "sentences translated together", minimum=1)


@dataclass(frozen=True)
class ModelSettings:
    """Options of the Transformer; the defaults are the paper's, at a small size."""

    vocab: int = setting(0, "rows of the embedding; 0: those of the vocabulary", "tokens")
    length: int = setting(256, "length of a window", "tokens", minimum=1)
    d_model: int = setting(256, "width of the residual stream", minimum=1)
    d_ff: int = setting(1024, "width inside the feed-forward layers", minimum=1)
    heads: int = setting(4, "attention heads", minimum=1)
    d_kv: int = setting(64, "width of keys and values of one head", minimum=1)
    layers: int = setting(4, "layers", minimum=1)
    norm: str = setting("rms", "before every sublayer and at the end", choices=("rms", "layer"))
    norm_scale: bool = setting(True, "whether norms have a scale")
    norm_bias: bool = setting(True, "whether layer norms have a bias")
    norm_epsilon: float = setting(1e-6, "added to the variance")
    activation: str = setting("relu", "between the feed-forward matrices: relu, gelu, swish ...")
    ff_bias: bool = setting(False, "whether feed-forward layers have biases")
    attention_bias: bool = setting(False, "whether attention projections have biases")
    tied_softmax: bool = setting(False, "whether the embedding is also the softmax matrix")
    learned_positions: bool = setting(True, "whether every position has a learned vector")
    attention_dropout: float = setting(0.0, "share of attention weights dropped in training")
    ff_dropout: float = setting(0.0, "share of hidden feed-forward activations dropped")
    residual_dropout: float = setting(0.0, "share of sublayer outputs and embeddings dropped")
    dropout_over_length: bool = setting(False, "one dropout mask for all positions (the paper)")
    initializers: str = setting("paper", "sizes of first values", choices=("paper", "gpt2"))
    scale_logits: bool | None = setting(
        None, "divide attention logits by sqrt(d_kv); none: unless the initializers contain it"
    )
    label_smoothing: float = setting(0.0, "in training")
    z_loss: float = setting(0.0, "factor of log(Z)**2, in training")
    logit_jitter: float = setting(0.0, "logits are multiplied by 1 +- this, in training")
    padding_id: int = setting(-1, "target that does not count in the training loss; -1: none")
    dtype: str = setting("float32", "of the variables", choices=("float32", "float64"))
    activation_dtype: str = setting(
        "", "computed in; empty: as dtype", choices=("", "float32", "float64", "bfloat16")
    )
    residual_constraint: str = setting(
        "", "layout of the residual stream, as length:cols (sequence parallelism)"
    )
    memory_heads: int = setting(0, "heads of keys and values; 0: as heads, 1: multi-query")
    rotary: bool = setting(False, "whether queries and keys are rotated by their positions")
    relative_buckets: int = setting(0, "buckets of a shared bias by distance; 0: none, T5: 32")
    local_window: int = setting(0, "positions a query sees; 0: all before it", "tokens")
    experts: int = setting(0, "experts in place of a feed-forward layer; 0: none")
    experts_every: int = setting(2, "every how many-th layer has experts", "layers", minimum=1)
    expert_choices: int = setting(1, "experts of a token", minimum=1)
    expert_capacity: float = setting(1.25, "room of an expert over its even share, in training")
    expert_eval_capacity: float = setting(2.0, "the same outside of training")
    expert_group: int = setting(0, "tokens that share room; 0: those of one window", "tokens")
    expert_balance: float = setting(1e-2, "factor of the load-balancing loss, in training")
    expert_z_loss: float = setting(0.0, "factor of the router's z-loss, in training")
    expert_jitter: float = setting(
        0.0, "the router's input is multiplied by 1 +- this, in training"
    )
    recompute: str = setting(
        "none", "what the backward pass computes again: none, or the inside of each layer",
        choices=("none", "layers"),
    )  # fmt: skip
    encoder_layers: int = setting(0, "of an encoder-decoder; 0: as layers")
    norm_after: bool = setting(False, "norms behind sublayers and their sum, as in BERT")
    embedding_norm: bool = setting(False, "whether embeddings are normalised before the layers")
    token_types: int = setting(0, "kinds of tokens, each with a learned vector; 0: none")
    embedding_dropout: float | None = setting(None, "of embeddings; none: as residual_dropout")
    final_dropout: float = setting(0.0, "share dropped of what the norm at the end returns")
    head_transform: bool = setting(False, "a dense layer, activation and norm before the logits")
    softmax_bias: bool = setting(False, "whether logits have a bias")
    scale_softmax: bool | None = setting(
        None, "divide logits by sqrt(d_model); none: if tied, with the paper's initializers"
    )
    rotary_base: float = setting(10000.0, "sets the slowest rotation")
    rotary_scaling: str = setting(
        "", "slower rotations: linear:<factor> or llama3:<factor>,<low>,<high>,<length>"
    )
    relative_distance: int = setting(128, "from which on all share a relative bucket", "tokens")
    token_dropout: float = setting(0.0, "share of masked tokens in training, whose vectors are 0")
    mask_id: int = setting(-1, "token that stands for a hidden one; -1: none")
    expert_places: int = setting(0, "tokens an expert takes; 0: by expert_capacity", "tokens")
    experts_remainder: int = setting(0, "layer number modulo experts_every of those with experts")
    decoder_experts_every: int = setting(0, "of an encoder-decoder's decoder; 0: the same")
    experts_skip_padding: bool = setting(True, "whether padding takes no places of experts")
    shared_embedding: bool = setting(True, "one embedding for source and target")
    attention_output_bias: bool | None = setting(
        None, "whether the output of attention has a bias; none: as attention_bias"
    )


@dataclass(frozen=True)
class OptimizerSettings:
    """How gradients become steps."""

    name: str = setting(
        "adamw", "the rule", choices=("sgd", "momentum", "adam", "adamw", "adafactor", "lamb")
    )
    learning_rate: str = setting(
        "0.001",
        "a number or a product, as 0.001*linear_warmup(100)*cosine_decay(2000, 0.1)",
    )
    beta1: float = setting(0.9, "adam(w), lamb: decay of the mean gradient; momentum: the momentum")
    beta2: float = setting(0.999, "adam(w), lamb: decay of the mean square")
    epsilon: float = setting(1e-8, "adam(w), lamb: added to the root")
    weight_decay: float = setting(0.01, "adamw, lamb: of matrices, per unit of learning rate")
    decay_exponent: float = setting(0.8, "adafactor: second moments decay by 1 - t**-this")
    relative_step: bool = setting(True, "adafactor: steps are relative to the size of the weights")
    clip_norm: float | None = setting(None, "largest norm of all gradients; none: not clipped")
    microbatches: int = setting(
        1, "parts of a batch computed one after the other, to save memory; must divide it",
        minimum=1,
    )  # fmt: skip


@dataclass(frozen=True)
class TrainSettings:
    """The length of the run and what one step takes."""

    steps: int = setting(2000, "length of the training", "steps", minimum=0)
    batch: int = setting(16, "windows per step, of all ranks together", "windows", minimum=1)
    seed: int = setting(0, "of initial values, batches and dropout")
    log_every: int = setting(50, "between lines of progress", "steps", minimum=1)
    plot: bool = setting(True, "whether to draw loss.png at the end")
    progress: str = setting(
        "auto", "a line that moves; auto: where stderr is a terminal", choices=("auto", "on", "off")
    )
    tensorboard: bool = setting(
        False, "whether to write event files into the run's folder tensorboard"
    )
    time_limit: str = setting(
        "", "from the start, after which it must have saved and stopped: seconds or hours:minutes;"
        " empty: that of the Slurm job, if it is in one",
    )  # fmt: skip


@dataclass(frozen=True)
class EvaluateSettings:
    """The held-out loss during training; at its end the whole held-out text is evaluated."""

    every: int = setting(200, "between evaluations; 0: only at the end", "steps", minimum=0)
    batch: int = setting(0, "windows evaluated together; 0: train.batch", "windows", minimum=0)
    windows: int = setting(
        0, "windows of each evaluation before the last; 0: the whole held-out text", "windows",
        minimum=0,
    )  # fmt: skip
    final_windows: int = setting(
        0, "windows of the last evaluation; 0: the whole held-out text", "windows", minimum=0
    )


@dataclass(frozen=True)
class CheckpointSettings:
    """What is kept to go on from."""

    every: int = setting(0, "between checkpoints; 0: only at the end", "steps", minimum=0)
    keep: int = setting(2, "newest checkpoints that are kept; 0: all", minimum=0)
    at_end: bool = setting(True, "whether the end of the run is saved")
    background: bool = setting(
        False, "write copies while the next steps run; takes memory for what a rank writes"
    )
    partner: str = setting(
        "", "second copy of each rank's file, kept by a rank of another host: memory, or a folder"
        " on its local disk; empty: none",
    )  # fmt: skip


@dataclass(frozen=True)
class GuardSettings:
    """What is done about numbers that went wrong."""

    non_finite: str = setting(
        "stop", "on NaN or infinity in loss or gradients: stop before the update, skip the update,"
        " or off: only a loss that is not finite stops, after the update",
        choices=("stop", "skip", "off"),
    )  # fmt: skip
    max_skips: int = setting(10, "skipped in a row that stop the run", "steps", minimum=1)
    replica_every: int = setting(
        100, "between comparisons of the variables that several ranks hold; 0: never", "steps",
        minimum=0,
    )  # fmt: skip
    replicas: str = setting(
        "stop", "on replicas that differ: stop, or repair: copy what most ranks hold",
        choices=("stop", "repair"),
    )  # fmt: skip


@dataclass(frozen=True)
class SampleSettings:
    """The continuation written at the end."""

    prompt: str = setting("\n", "text to continue")
    tokens: int = setting(200, "length of the continuation; 0: none", "tokens", minimum=0)
    temperature: float = setting(0.8, "0 takes the most probable token", minimum=0.0)
    seed: int = setting(0, "of the sampling noise")


@dataclass(frozen=True)
class MeshSettings:
    """The ranks and what is split over them; also given by --mesh, --layout, --storage."""

    shape: str = setting("", "as rows:2;cols:2; empty: all ranks on one axis, all")
    layout: str = setting(
        "", "as batch:rows;heads:cols; empty without a shape: batch:all (data-parallel)"
    )
    storage: str = setting("", "how variables are kept, as d_model:rows; empty: as computed with")
    optimizer_storage: str = setting("", "how optimizer slots are kept; empty: as their variable")
    overlap: str = setting(
        "auto", "reductions travel while gradients are computed; auto: between hosts",
        choices=("auto", "on", "off"),
    )  # fmt: skip
    memory_limit: str = setting(
        "", "of a training step on one rank, as 1.5 GB: recomputes until it fits; empty: none"
    )
    recover: bool = setting(
        False, "whether the other ranks go on when some are lost, on a smaller mesh; also --recover"
    )
    machine: str = setting(
        "", "description to predict times with; empty: what `meshmpi calibrate` measured here"
    )


@dataclass(frozen=True)
class TraceSettings:
    """A record of when each instruction ran on each rank; also --trace."""

    steps: int = setting(0, "recorded; 0: none", "steps", minimum=0)
    start: int = setting(10, "before the first one recorded", "steps", minimum=0)
    file: str = setting("trace.json.gz", "in the folder of the run, for Perfetto or Chrome")


@dataclass(frozen=True)
class Settings:
    """A training run of a Transformer."""

    task: str = setting(
        "lm", "what is learnt: lm, the next token of a text; translation",
        choices=("lm", "translation"),
    )  # fmt: skip
    title: str = setting("", "stands above the loss curve")
    baselines: dict[str, float] = setting(
        {}, "label -> published loss, drawn into the loss curve", "nats per token"
    )
    data: DataSettings = section(DataSettings)
    translation: TranslationSettings = section(TranslationSettings)
    model: ModelSettings = section(ModelSettings)
    optimizer: OptimizerSettings = section(OptimizerSettings)
    train: TrainSettings = section(TrainSettings)
    evaluate: EvaluateSettings = section(EvaluateSettings)
    checkpoint: CheckpointSettings = section(CheckpointSettings)
    guard: GuardSettings = section(GuardSettings)
    sample: SampleSettings = section(SampleSettings)
    mesh: MeshSettings = section(MeshSettings)
    trace: TraceSettings = section(TraceSettings)


def transformer_config(model: ModelSettings, vocabulary_size: int) -> TransformerConfig:
    """The Transformer that the settings describe.

    Args:
        model: The settings; ``vocab`` 0 stands for the size of the vocabulary.
        vocabulary_size: Number of different tokens of the text.

    Raises:
        ConfigError: An option has no such value, or the vocabulary does not fit.
    """
    from meshmpi.errors import ConfigError

    values = {f.name: getattr(model, f.name) for f in fields(model)}
    values["vocab"] = model.vocab or vocabulary_size
    if values["vocab"] < vocabulary_size:
        raise ConfigError(
            f"'model.vocab' is {model.vocab}, but the vocabulary has {vocabulary_size} tokens.",
            "Give 0, or at least that number.",
        )
    return TransformerConfig(**values)
