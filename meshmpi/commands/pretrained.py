"""`meshmpi score`, `generate` and `export`: use a trained model.

Turns arguments into calls of `meshmpi.transformer.pretrained` and prints the results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshmpi.commands.command import DRAWING, Command, Options, answer_of, argument, say
from meshmpi.errors import ConfigError, DataError
from meshmpi.runtime.mesh_protocol import AnyMesh

if TYPE_CHECKING:
    from meshmpi.runtime.variables import VariableStore
    from meshmpi.transformer.decoding.beams import Hypothesis
    from meshmpi.transformer.decoding.decoding import Generator, Token
    from meshmpi.transformer.models import TransformerConfig
    from meshmpi.transformer.pretrained.lines import Line
    from meshmpi.transformer.pretrained.model import Model
    from meshmpi.transformer.text.base import Vocabulary

_OFF: dict[str, object] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "typical_p": 1.0,
    "min_p": 0.0,
    "bad_words_ids": [],
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
}
"""Options of generation in transformers that are not implemented here -> the value that switches each off."""


def _placed(options: Options, config: TransformerConfig) -> tuple[AnyMesh, str, str | None]:
    """Mesh, layout and storage.  A layout may be the name of one that suits the model."""
    from meshmpi.transformer.pretrained.layouts import STYLES, suggested_layout
    from meshmpi.transformer.training.settings import MeshSettings
    from meshmpi.transformer.training.setup import make_mesh

    mesh = make_mesh(MeshSettings(shape=options.mesh or ""))
    layout = "megatron" if options.layout is None else options.layout
    if layout not in STYLES:
        return mesh, layout, options.storage
    found = suggested_layout(config, mesh.shape, layout)
    return mesh, found.layout, found.storage if options.storage is None else options.storage


def _tokenizer(options: Options, model: Model) -> Vocabulary | None:
    if options.token_ids:
        if options.tokenizer is not None:
            raise ConfigError("--tokenizer and --token-ids are both given.", "Give one of them.")
        return None
    return model.tokenizer(options.tokenizer)


def _score(options: Options) -> int:
    from meshmpi.runtime.agreement import from_first
    from meshmpi.transformer.pretrained.lines import Reader
    from meshmpi.transformer.pretrained.model import open_model
    from meshmpi.transformer.pretrained.scoring import Scorer, total

    model = open_model(options.model)
    tokenizer = _tokenizer(options, model)
    mesh, layout, storage = _placed(options, model.config)
    decoder_only = model.kind == "lm"
    reader = Reader(
        tokenizer,
        model.config.vocab,
        model.config.length + decoder_only,
        pairs=model.kind == "encoder_decoder",
        truncate=options.truncate,
        allow_unknown=options.allow_unknown,
        start=model.special.get("bos") if decoder_only else None,
        special_ids=tuple(model.special.values()),
    )
    lines = from_first(mesh, lambda: _predictable(reader.read(options.file), options.file, model))
    mask = None if tokenizer is None or "mask" in model.special else tokenizer.special.get("mask")
    scores = Scorer(model, mesh, layout, storage, options.batch, mask=mask).scores(lines)
    rows, data = ["line\ttokens\tlog_likelihood\tperplexity"], list[dict[str, Any]]()
    for s in [*scores, total(scores)]:
        name = s.number or "total"
        rows.append(f"{name}\t{s.tokens}\t{s.log_likelihood:.4f}\t{s.perplexity:.4f}")
        data.append({"line": name, "tokens": s.tokens, "log_likelihood": s.log_likelihood, "perplexity": s.perplexity})
    cut = [line for line in lines if line.cut]
    if cut:
        tokens = sum(line.cut for line in cut)
        rows.append(f"note: {tokens} tokens of {len(cut)} lines were left out (--truncate)")
    left_out = {"tokens_left_out": sum(line.cut for line in lines)}
    answer_of(mesh, options, "\n".join(rows), {"lines": data[:-1], "total": data[-1], **left_out})
    return 0


def _predictable(lines: Sequence[Line], path: Path, model: Model) -> Sequence[Line]:
    """The lines, each of which has a token to be predicted."""
    for line in lines:
        if model.kind == "lm" and len(line.tokens) < 2:
            raise DataError(f"{path}:{line.number} has one token, and no token before it.", "Write a longer text.")
        if model.kind == "encoder" and all(line.special):
            raise DataError(f"{path}:{line.number} has special tokens only.", "Write a text to be scored.")
    return lines


def _generate(options: Options) -> int:
    from meshmpi.runtime.agreement import from_first
    from meshmpi.transformer.decoding.decoding import Generator
    from meshmpi.transformer.pretrained.lines import Reader
    from meshmpi.transformer.pretrained.model import open_model

    model = open_model(options.model)
    if model.kind == "encoder":
        raise ConfigError(
            f"{model.path} is a masked model, which does not continue texts.",
            "Give a language model or an encoder-decoder; `meshmpi score` takes any.",
        )
    if options.tokens < 1:
        raise ConfigError(f"--tokens is {options.tokens}.", "Give at least 1.")
    tokenizer = _tokenizer(options, model)
    mesh, layout, storage = _placed(options, model.config)
    reader = Reader(tokenizer, model.config.vocab, model.config.length, truncate=options.truncate)

    def prompts() -> list[list[int]]:
        if options.prompts is not None:
            return [line.tokens for line in reader.read(options.prompts)]
        return [reader.line(options.prompt.encode(), "the prompt").tokens]

    given = from_first(mesh, prompts)
    known = model.config.vocab if tokenizer is None else min(tokenizer.size, model.config.vocab)
    longest = max(map(len, given))
    room = longest + options.tokens if model.kind == "lm" else 1 + options.tokens
    if model.config.learned_positions:
        room = min(room, model.config.length)
    generator = Generator(
        model.config,
        mesh,
        layout,
        model=model.kind,
        storage=storage,
        batch=min(options.batch, len(given)),
        max_length=room,
        source_length=longest,
        vocabulary_size=known,
        start=model.special.get("decoder_start", model.special.get("bos")),
    )
    model.load(generator.variables)
    _print_texts(options, mesh, generator, tokenizer, given, model)
    return 0


def _print_texts(
    options: Options,
    mesh: AnyMesh,
    generator: Generator,
    tokenizer: Vocabulary | None,
    prompts: list[list[int]],
    model: Model,
) -> None:
    """Generates and prints: the text of one prompt, or for each of several a line of JSON."""
    from meshmpi.transformer.decoding.decoding import Sampling

    stop = list(model.ends) if options.stop is None else options.stop
    if mesh.rank == 0 and (others := otherwise(model.generation, options)):
        print(f"{model.path} requests {others}; this is ignored, only the options count", file=sys.stderr)
    if options.beams:
        if options.stream:
            raise ConfigError("--stream does not work with --beams.", "The best beam is known only at the end.")
        how: dict[str, Any] = {"alpha": 0.6 if options.alpha is None else options.alpha}
        if options.alpha is None and model.manifest is None:
            given = model.generation
            penalty, early = given.get("length_penalty"), given.get("early_stopping")
            how = {"power": 1.0 if penalty is None else penalty, "early_stopping": early or False}
        found = generator.beam_search(prompts, options.tokens, beams=options.beams, stop=stop, **how)
        data = [_beams_data(tokenizer, k, beams) for k, beams in enumerate(found)]
        text = "\n".join(_beams_text(options, one) for one in data)
        answer_of(mesh, options, text, {"texts": data})
        return
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    choosing: dict[str, Any] = {"sampling": sampling, "stop": stop, "seed": options.seed}
    if options.stream and len(prompts) == 1 and not options.json:
        _stream(mesh, generator.stream(prompts, options.tokens, **choosing), tokenizer, stop)
        return
    made = [list(tokens) for tokens in generator.generate(prompts, options.tokens, **choosing)]
    data = [{"line": k + 1, "text": _text(tokenizer, tokens), "tokens": tokens} for k, tokens in enumerate(made)]
    lines = [one["text"] if options.prompts is None else json.dumps(one, ensure_ascii=False) for one in data]
    answer_of(mesh, options, "\n".join(lines) or "\n", {"texts": data})


def otherwise(generation: Mapping[str, object], options: Options) -> str:
    """What a checkpoint says of generation that these options do not do: "top_k=5, num_beams=4"."""
    sampled = options.temperature > 0 and not options.beams
    ours = {"do_sample": sampled, "num_beams": options.beams or 1, "max_new_tokens": options.tokens}
    if sampled:
        ours |= {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    ours |= _OFF
    said = {k: generation[k] for k in ours if generation.get(k) is not None}
    return ", ".join(f"{k}={v!r}" for k, v in said.items() if v != ours[k] and v != [])


def _stream(mesh: AnyMesh, tokens: Iterable[Token], tokenizer: Vocabulary | None, stop: Sequence[int]) -> None:
    """Prints one text as its tokens come; characters of several tokens when they are whole."""
    done: list[int] = []
    shown = ""
    for t in tokens:
        if t.token in stop:
            continue
        done.append(t.token)
        text = _text(tokenizer, done)
        if mesh.rank == 0 and not text.endswith("\ufffd"):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    say(mesh, _text(tokenizer, done)[len(shown) :])


def _text(tokenizer: Vocabulary | None, tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens)


def _beams_data(tokenizer: Vocabulary | None, k: int, beams: Sequence[Hypothesis]) -> dict[str, Any]:
    found = [{"text": _text(tokenizer, b.tokens), "score": b.score, "tokens": list(b.tokens)} for b in beams]
    return {"line": k + 1, "beams": found}


def _beams_text(options: Options, data: Mapping[str, Any]) -> str:
    if options.prompts is None:
        return "\n".join(f"{b['score']:.4f}\t{b['text']}" for b in data["beams"])
    return json.dumps(data, ensure_ascii=False)


def _export(options: Options) -> int:
    from meshmpi.amounts import bytes_of
    from meshmpi.transformer.pretrained.model import open_model
    from meshmpi.transformer.pretrained.save import save
    from meshmpi.transformer.pretrained.scoring import Scorer

    run, like = open_model(options.run), open_model(options.like)
    if like.manifest is not None:
        raise ConfigError(
            f"{options.like} is not a Hugging Face checkpoint.", "Give the one that the run was initialised from."
        )
    most = None if options.max_shard is None else bytes_of(options.max_shard)
    mesh, layout, storage = _placed(options, like.config)
    variables = Scorer(run, mesh, layout, storage, 1).loaded()
    if run.config.length < like.config.length:
        whole = Scorer(like, mesh, layout, storage, 1).loaded()
        _overlay(whole, variables)
        variables = whole
    folder = save(
        variables, like.architecture, options.out, dtype=options.dtype, max_shard_bytes=most, like=options.like
    )
    answer_of(mesh, options, f"wrote {folder}", {"wrote": str(folder)})
    return 0


def _overlay(whole: VariableStore, part: VariableStore) -> None:
    """Puts the variables of a model for shorter texts into those of the whole one.  Collective."""
    for name, variable in part.types.items():
        if variable.type == whole.types[name].type:
            for rank, block in part.blocks[name].items():
                whole.blocks[name][rank][...] = block
        else:  # the first of the learned positions
            value, first = whole[name], part[name]
            value[tuple(slice(0, n) for n in first.shape)] = first
            whole.assign({name: value})


_LAYOUTS = (
    "--layout may also be a name; in each a rank holds its share of the weights:\n"
    "  megatron  heads, d_ff and vocab over all ranks (default)\n"
    "  storage   the batch over all ranks, weights gathered where they are used\n"
    "  2d        the batch over the first axis, heads, d_ff and vocab over the others"
)
_MODEL = argument("model", Path, "folder or file of a Hugging Face checkpoint, or folder of a run")
_TOKENS = (
    argument("--storage", str, "storage layout of the variables, such as d_model:rows"),
    argument("--batch", int, "rows of a batch", 8),
    argument("--tokenizer", Path, "default: the one in the folder of the weights", metavar="PATH"),
    argument("--token-ids", bool, "texts are token ids, separated by spaces"),
    argument("--truncate", bool, "cut lines that are too long for the model"),
)
_SCORE = (
    _MODEL,
    argument("file", Path, "one text per line; for an encoder-decoder: source, tab, target"),
    *_TOKENS,
    argument("--allow-unknown", bool, "replace unknown text by the tokenizer's unknown token"),
)
_PROMPTS = (
    argument("--prompt", str, "text to continue or translate", metavar="TEXT"),
    argument("--prompts", Path, "one text per line", metavar="FILE"),
)
_ALPHA = (
    "exponent of the length penalty ((5 + length) / 6)**alpha (default: 0.6 for a run; for a checkpoint"
    " transformers' search with its generation_config.json)"
)
_STOP = "token that ends a text; may be repeated (default: all end tokens of the model)"
_GENERATE = (
    _MODEL,
    *_TOKENS,
    argument("--tokens", int, "maximum length of a continuation", 64),
    argument("--temperature", float, "0 takes the most probable token", 1.0),
    *DRAWING,
    argument("--seed", int, "seed of the random numbers", 0),
    argument("--alpha", float, _ALPHA),
    argument("--stop", int, _STOP, metavar="ID", action="append"),
    argument("--stream", bool, "print while it is generated"),
)
_LIKE = "the checkpoint from which the run was initialised: gives names, config and tokenizer"
_EXPORT = (
    argument("run", Path, "folder of a run, or one of its checkpoints"),
    argument("out", Path, "folder to make"),
    argument("--like", Path, _LIKE, metavar="MODEL", required=True),
    argument("--dtype", str, "float32, bfloat16, float16 or float64", "float32"),
    argument("--max-shard", str, "split into files of at most this size", metavar="SIZE"),
    argument("--storage", str, "storage layout of the variables during the export, such as d_model:rows"),
)
_TAKES = ("mesh", "ranks", "json")
_LIKELIHOOD = "log-likelihood of each line of a file"
COMMANDS = (
    Command("score", _score, _LIKELIHOOD, _SCORE, _TAKES, epilog=_LAYOUTS),
    Command("generate", _generate, "continue texts with a model", _GENERATE, _TAKES, one_of=_PROMPTS, epilog=_LAYOUTS),
    Command("export", _export, "write a run's model as a Hugging Face checkpoint", _EXPORT, _TAKES),
)
