"""Reads a config.json such that no option is silently ignored."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from meshmpi.errors import ConfigError, suggest
from meshmpi.nn.layers import GATED_UNITS

ACTIVATIONS = {
    "relu": "relu",
    "relu2": "squared_relu",
    "silu": "swish",
    "swish": "swish",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "linear": "linear",
    "gelu": "gelu_exact",
    "gelu_python": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_python_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu_accurate": "gelu",
}
"""Names of activations in config.json -> ours.  Their "gelu" is the exact one."""
_HARMLESS = """
_name_or_path _commit_hash _attn_implementation _attn_implementation_autoset architectures auto_map
transformers_version dtype torch_dtype model_type id2label label2id num_labels problem_type finetuning_task
classifier_dropout classifier_bias task_specific_params tokenizer_class gradient_checkpointing initializer_range
initializer_factor torchscript use_bfloat16 n_ctx n_special predict_special_tokens embd_layer_norm_epsilon
directionality pruned_heads use_cache output_attentions output_hidden_states output_past return_dict
chunk_size_feed_forward reorder_and_upcast_attn pretraining_tp add_router_probs summary_type summary_use_proj
summary_activation summary_proj_to_labels summary_first_dropout pooler_fc_size pooler_num_attention_heads
pooler_num_fc_layers pooler_size_per_head pooler_type max_length min_length do_sample early_stopping num_beams
num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
exponential_decay_length_penalty suppress_tokens begin_suppress_tokens prefix cls_token_id sep_token_id unk_token_id
"""
HARMLESS = tuple(_HARMLESS.split())
"""Keys that do not change what the model computes from token ids: who wrote the file and how the model was
trained, how a call answers, poolers and summaries of other tasks, how text is generated."""
MOST = 1 << 24
"""Largest number in a config.  Known are contexts of 10 million tokens, and smaller ones."""
MOST_REPEATED = 1 << 12
"""Most layers or heads: each takes time and memory before a file of weights is looked at."""
MOST_EXPERTS = 1 << 16
"""Most experts of all layers together.  Known are 2,048 in each of 30."""
_SPECIAL = {
    "pad_token_id": "pad",
    "mask_token_id": "mask",
    "bos_token_id": "bos",
    "eos_token_id": "eos",
    "decoder_start_token_id": "decoder_start",
}
_SAVED = "Give the config.json that was saved with the checkpoint."


class Options:
    """The values of a config.json, each of which must be used, harmless or at its default.

    The methods that read an option raise ConfigError where its value is not of the kind that they return.

    Args:
        values: Content of config.json.
        name: The ``model_type``, for messages.
        ignore: Further keys that the caller declares harmless.
        keys: Names of the arrays in the checkpoint, where they are known.
    """

    def __init__(self, values: Mapping[str, Any], name: str, ignore: Sequence[str] = (), keys: Collection[str] = ()):
        self.values, self.name, self.keys = dict(values), name, keys
        self.known = [*HARMLESS, *_SPECIAL, *ignore]

    def get(self, key: str, default: object, *aliases: str) -> Any:
        """The value of ``key`` or of one of its other names; a null is the default."""
        self.known += [key, *aliases]
        return next((self.values[k] for k in (key, *aliases) if self.values.get(k) is not None), default)

    def number(self, key: str, default: float | None, *aliases: str) -> Any:
        """An int or a float; None as default: it must be there."""
        value = self.get(key, default, *aliases)
        if value is None:
            raise ConfigError(f"the config of this {self.name} model has no '{key}'.", _SAVED)
        if type(value) not in (int, float) or not abs(value) <= 1e300:
            raise _wrong(key, value, "Give a number.")
        return value

    def count(self, key: str, default: int | None, *aliases: str, least: int = 1, most: int = MOST) -> int:
        """A whole number from ``least`` to ``most``: how many there are of something, or how wide it is."""
        value = self.number(key, default, *aliases)
        if type(value) is not int or not least <= value <= most:
            raise ConfigError(
                f"'{key}' is {short(value)} in the config of this {self.name} model, not a whole"
                f" number from {least:,} to {most:,}.",
                _SAVED,
            )
        return value

    def repeated(self, key: str, default: int, *aliases: str) -> int:
        """As `count`, for layers and heads."""
        return self.count(key, default, *aliases, most=MOST_REPEATED)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise _wrong(key, value, "Give true or false.")
        return value

    def word(self, key: str, default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise _wrong(key, value, "Give a name.")
        return value

    def table(self, *keys: str) -> dict[str, Any]:
        """The first of several tables that is there and not empty."""
        self.known += keys
        value: Any = next((self.values[k] for k in keys if self.values.get(k)), {})
        if not isinstance(value, dict):
            raise ConfigError(f"{' or '.join(keys)} is {short(value)} in the config.", "Give a table.")
        return dict(value)

    def head(self, width: int, heads: int) -> int:
        """Width of a head where heads share the model's evenly."""
        if heads < 1 or width % heads:
            raise ConfigError(
                f"this {self.name} model has {heads} heads and a width of {width}.",
                "Give a number of heads that divides the width.",
            )
        return width // heads

    def only(self, key: str, *allowed: object, default: object = None) -> None:
        """Refuses values of ``key`` that are not implemented.

        Args:
            key: The option.
            allowed: Its values that are implemented.
            default: The default of transformers; None: the first of ``allowed``.
        """
        value = self.get(key, allowed[0] if default is None else default)
        if value not in allowed:
            raise ConfigError(
                f"this {self.name} model has {key}={short(value)}, which is not implemented.",
                f"Use a model with {key} {' or '.join(repr(a) for a in allowed)}.",
            )

    def activation(self, key: str, default: str) -> str:
        """Our name of the activation that ``key`` names."""
        return self.activation_named(self.word(key, default), key)

    def activation_named(self, value: str, key: str) -> str:
        """Our name of an activation."""
        if value not in ACTIVATIONS:
            raise ConfigError(
                f"this {self.name} model has {key}={value!r}, an activation that is not implemented.",
                suggest(value, ACTIVATIONS),
            )
        return ACTIVATIONS[value]

    def gated(self, key: str, value: str) -> str:
        """Our name of the gated unit whose activation is ``value``."""
        wanted = (self.activation_named(value, key), "linear")
        found = next((name for name, pair in GATED_UNITS.items() if pair == wanted), None)
        if found is None:
            raise ConfigError(
                f"this {self.name} model has {key}={value!r}, which has no gated unit.",
                f"Use a model with a unit of {', '.join(GATED_UNITS)}.",
            )
        return found

    def special(self, **defaults: int) -> dict[str, int]:
        """Token ids by purpose; the first where several tokens end a text."""
        found = dict(defaults)
        for key, name in _SPECIAL.items():
            value = self.values.get(key)
            if isinstance(value, list):
                value = value[0] if value else None
            if value is not None:
                if type(value) is not int or not -1 <= value <= MOST:
                    raise _wrong(key, value, "Give the id of a token.")
                found[name] = value
        return found

    def finish(self) -> None:
        """Raises ConfigError if a key was neither used nor known to be harmless.

        Nulls, false and empty values switch nothing on.
        """
        off: Sequence[object] = (None, False, "", [], {})
        on = [k for k, v in self.values.items() if not any(type(v) is type(e) and v == e for e in off)]
        left = [k for k in on if k not in self.known]
        if left:
            left_over = ", ".join(f"{k}={short(self.values[k])}" for k in left)
            raise ConfigError(
                f"the config of this {self.name} model has {left_over}, which may change what it"
                " computes and is not implemented.",
                f"If not, pass ignore={left!r}.",
            )


def _wrong(key: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(f"'{key}' is {short(value)} in the config.", remedy)


def short(value: object) -> str:
    """A value that somebody else may have made long, for a message."""
    if type(value) is int and abs(value) > MOST:
        return "a number beyond all sizes" if abs(value) > 1e300 else f"{value:.3g}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
