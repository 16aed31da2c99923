"""`meshmpi score`, `generate` and `export`: what a trained model is used for.

Turns arguments into calls of `meshmpi.transformer.pretrained` and prints what comes back.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshmpi.commands.command import Command
from meshmpi.errors import ConfigError, DataError
from meshmpi.runtime.mesh_protocol import AnyMesh

_MODEL = "folder or file of a Hugging Face checkpoint, or folder of a run"


_NOT_DONE: dict[str, Any] = {
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
"""What generation in transformers also takes, and generation here does not -> where it is off."""


def _add_score(score: argparse.ArgumentParser) -> None:
    score.add_argument("model", type=Path, help=_MODEL)
    score.add_argument("file", type=Path, help="one text a line; for an encoder-decoder: source, tab, target")
    _add_tokens(score)
    score.add_argument(
        "--allow-unknown",
        action="store_true",
        help="take text that the tokenizer has no token for as the unknown token",
    )


def _add_generate(generate: argparse.ArgumentParser) -> None:
    generate.add_argument("model", type=Path, help=_MODEL)
    given = generate.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", metavar="TEXT", help="text to continue (or to translate)")
    given.add_argument("--prompts", type=Path, metavar="FILE", help="one text a line")
    _add_tokens(generate)
    _add_choosing(generate)


def _add_export(export: argparse.ArgumentParser) -> None:
    export.add_argument("run", type=Path, help="folder of a run, or one of its checkpoints")
    export.add_argument("out", type=Path, help="folder to make")
    export.add_argument(
        "--like",
        type=Path,
        required=True,
        metavar="MODEL",
        help="the checkpoint that the run was initialised from: names, config and tokenizer",
    )
    export.add_argument("--dtype", default="float32", help="float32, bfloat16, float16 or float64")
    export.add_argument("--max-shard", metavar="SIZE", help="split into files of at most this")
    export.add_argument("--storage", help="layout of stored variables meanwhile, as d_model:rows")


def _add_tokens(command: argparse.ArgumentParser) -> None:
    """Arguments of commands that read texts and run a model."""
    command.epilog = (
        "--layout may also be a name; in each a rank holds its share of the weights:\n"
        "  megatron  heads, d_ff and vocab over all ranks (default)\n"
        "  storage   the batch over all ranks, weights gathered where they are used\n"
        "  2d        the batch over the first axis, heads, d_ff and vocab over the others"
    )
    command.add_argument("--storage", help="layout of stored variables, as d_model:rows")
    command.add_argument("--batch", type=int, default=8, help="rows computed together")
    command.add_argument("--tokenizer", type=Path, metavar="PATH", help="default: the one in the folder of the weights")
    command.add_argument("--token-ids", action="store_true", help="texts are token ids, separated by spaces")
    command.add_argument("--truncate", action="store_true", help="cut lines that are longer than the model takes")


def _add_choosing(command: argparse.ArgumentParser) -> None:
    command.add_argument("--tokens", type=int, default=64, help="largest length of a continuation")
    command.add_argument("--temperature", type=float, default=1.0, help="0 takes the most probable token")
    command.add_argument("--top-k", type=int, default=0, help="draw from the k most probable tokens")
    command.add_argument("--top-p", type=float, default=1.0, help="draw from the most probable tokens with this sum")
    command.add_argument("--seed", type=int, default=0, help="seed of the random numbers")
    command.add_argument("--beams", type=int, default=0, help="beam search with this number of beams")
    command.add_argument(
        "--alpha",
        type=float,
        help="its length penalty ((5 + length) / 6)**alpha (default: 0.6 for a run; for a"
        " checkpoint transformers' search, as its generation_config.json says)",
    )
    command.add_argument(
        "--stop",
        type=int,
        action="append",
        metavar="ID",
        help="token that ends a text; may be repeated (default: all ends that the model names)",
    )
    command.add_argument("--stream", action="store_true", help="print while it is generated")


# ---- what several commands need --------------------------------------------------------------


def _placed(options: argparse.Namespace, config: Any) -> tuple[Any, str, str | None]:
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


def _tokenizer(options: argparse.Namespace, model: Any) -> Any:
    if options.token_ids:
        if options.tokenizer is not None:
            raise ConfigError("--tokenizer and --token-ids.", "Give one of them.")
        return None
    return model.tokenizer(options.tokenizer)


def _say(mesh: AnyMesh, text: str) -> None:
    if mesh.rank == 0:
        print(text, flush=True)


# ---- score -----------------------------------------------------------------------------------


def _score(options: argparse.Namespace) -> int:
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
    rows = ["line\ttokens\tlog_likelihood\tperplexity"]
    for s in [*scores, total(scores)]:
        name = s.number or "total"
        rows.append(f"{name}\t{s.tokens}\t{s.log_likelihood:.4f}\t{s.perplexity:.4f}")
    cut = [line for line in lines if line.cut]
    if cut:
        tokens = sum(line.cut for line in cut)
        rows.append(f"note: {tokens} tokens of {len(cut)} lines were left out (--truncate)")
    _say(mesh, "\n".join(rows))
    return 0


def _predictable(lines: Sequence[Any], path: Path, model: Any) -> Sequence[Any]:
    """The lines, each of which has a token to be predicted."""
    for line in lines:
        if model.kind == "lm" and len(line.tokens) < 2:
            raise DataError(
                f"{path}:{line.number} has one token, and nothing before it to predict it from.", "Write a longer text."
            )
        if model.kind == "encoder" and all(line.special):
            raise DataError(f"{path}:{line.number} has special tokens only.", "Write a text to be scored.")
    return lines


# ---- generate --------------------------------------------------------------------------------


def _generate(options: argparse.Namespace) -> int:
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
    options: argparse.Namespace, mesh: AnyMesh, generator: Any, tokenizer: Any, prompts: list[list[int]], model: Any
) -> None:
    """Generates and prints: the text of one prompt, or for each of several a line of JSON."""
    from meshmpi.transformer.decoding.decoding import Sampling

    stop = list(model.ends) if options.stop is None else options.stop
    if mesh.rank == 0 and (others := otherwise(model.generation, options)):
        print(f"{model.path} asks for {others}: not followed, options decide", file=sys.stderr)
    if options.beams:
        if options.stream:
            raise ConfigError("--stream with --beams.", "Beams are known at their end only.")
        how = {"alpha": 0.6 if options.alpha is None else options.alpha}
        if options.alpha is None and model.manifest is None:
            given = model.generation
            penalty, early = given.get("length_penalty"), given.get("early_stopping")
            how = {"power": 1.0 if penalty is None else penalty, "early_stopping": early or False}
        found = generator.beam_search(prompts, options.tokens, beams=options.beams, stop=stop, **how)
        for k, beams in enumerate(found):
            _say(mesh, _beams_text(options, tokenizer, k, beams))
        return
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    how = {"sampling": sampling, "stop": stop, "seed": options.seed}
    if options.stream and len(prompts) == 1:
        _stream(mesh, generator.stream(prompts, options.tokens, **how), tokenizer, stop)
        return
    for k, tokens in enumerate(generator.generate(prompts, options.tokens, **how)):
        text = _text(tokenizer, tokens)
        several = json.dumps({"line": k + 1, "text": text, "tokens": tokens}, ensure_ascii=False)
        _say(mesh, text if options.prompts is None else several)


def otherwise(generation: Mapping[str, Any], options: argparse.Namespace) -> str:
    """What a checkpoint says of generation that these options do not do: "top_k=5, num_beams=4"."""
    ours: dict[str, Any] = {
        "do_sample": options.temperature > 0 and not options.beams,
        "num_beams": options.beams or 1,
        "max_new_tokens": options.tokens,
        **(
            {}
            if options.beams or not options.temperature
            else {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
        ),
        **_NOT_DONE,
    }
    said = {k: generation[k] for k in ours if generation.get(k) is not None}
    return ", ".join(f"{k}={v!r}" for k, v in said.items() if v != ours[k] and v != [])


def _stream(mesh: AnyMesh, tokens: Any, tokenizer: Any, stop: Sequence[int]) -> None:
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
    _say(mesh, _text(tokenizer, done)[len(shown) :])


def _text(tokenizer: Any, tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens)


def _beams_text(options: argparse.Namespace, tokenizer: Any, k: int, beams: Any) -> str:
    if options.prompts is None:
        return "\n".join(f"{b.score:.4f}\t{_text(tokenizer, b.tokens)}" for b in beams)
    found = [{"text": _text(tokenizer, b.tokens), "score": b.score, "tokens": list(b.tokens)} for b in beams]
    return json.dumps({"line": k + 1, "beams": found}, ensure_ascii=False)


# ---- export ----------------------------------------------------------------------------------


def _export(options: argparse.Namespace) -> int:
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
    _say(mesh, f"wrote {folder}")
    return 0


def _overlay(whole: Any, part: Any) -> None:
    """Puts the variables of a model for shorter texts into those of the whole one.  Collective."""
    for name, variable in part.types.items():
        if variable.type == whole.types[name].type:
            for rank, block in part.blocks[name].items():
                whole.blocks[name][rank][...] = block
        else:  # the first of the learned positions
            value, first = whole[name], part[name]
            value[tuple(slice(0, n) for n in first.shape)] = first
            whole.assign({name: value})


COMMANDS = (
    Command("score", _score, "log-likelihood of each line of a file", _add_score),
    Command("generate", _generate, "continue texts with a model", _add_generate),
    Command("export", _export, "write a run's model as a Hugging Face checkpoint", _add_export),
)
