"""`meshmpi train` and `sample`: train a model, and generate text with it."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from meshmpi.commands.command import DRAWING, Command, Options, answer_of, argument, say, settings_of
from meshmpi.commands.model import model_of
from meshmpi.commands.planning import plan_of
from meshmpi.commands.starting import on_ranks
from meshmpi.errors import ConfigError
from meshmpi.job import rank_by_environment
from meshmpi.runtime.mesh import size_error
from meshmpi.runtime.world import world_size
from meshmpi.transformer.training.config import of_run
from meshmpi.transformer.training.settings import MeshSettings, Settings
from meshmpi.transformer.training.setup import chosen_layout, make_mesh, mesh_shape


def _settings(options: Options) -> Settings:
    more = ["mesh.recover=true"] if options.recover else []
    more += [] if options.trace is None else [f"trace.steps={options.trace}"]
    more += ["train.progress=on"] if options.progress else []
    return settings_of(options, options.config, *more)


def _folder(options: Options) -> Path:
    return options.out or (options.config if of_run(options.config) else Path("runs", options.config.stem))


def _resume(options: Options) -> bool | str:
    """A run that is named by its folder goes on, unless it goes on elsewhere."""
    return options.resume or (of_run(options.config) is not None and options.out is None)


def _start(options: Options, given: Sequence[str]) -> int:
    """Starts a training on several ranks, and again when its job dies, if restarts are allowed."""
    from meshmpi.transformer.training.supervisor import Supervisor, parse_hosts

    settings = _settings(options)  # finds mistakes before ranks are started
    recover, run = settings.mesh.recover, _folder(options)
    shape = mesh_shape(settings.mesh, options.ranks)
    spare = options.ranks > shape.size and recover  # they replace lost ranks
    if shape.size != options.ranks and not spare:
        raise size_error(shape, options.ranks)
    hosts = parse_hosts(options.hosts, options.ranks) if options.hosts else []
    if options.dry_run:  # a plan needs no ranks
        return _train(options)

    def start(ranks: int, more: Sequence[str], hosts: str) -> int:
        return on_ranks(ranks, [*given, *more], options.module, hosts=hosts, recover=recover, run=run, listens=True)

    if not options.restarts and not recover:
        return start(options.ranks, (), options.hosts)
    return Supervisor(settings, run, options.ranks, hosts, _resume(options), start).run(options.restarts)


def _train(options: Options) -> int:
    settings, initialize = _settings(options), None
    if options.init_from is not None:
        from meshmpi.transformer.pretrained.finetune import fine_tuning

        settings, initialize = fine_tuning(settings, options.init_from)
    if options.dry_run:
        if rank_by_environment() == 0:
            mesh = mesh_shape(settings.mesh, options.ranks or world_size())
            print(plan_of(model_of(settings, options.config.stem, mesh), settings.mesh.machine)[0])
        return 0
    from meshmpi.transformer.training.run import train

    folder = _folder(options)
    result = train(settings, folder, resume=_resume(options), initialize=initialize)
    if rank_by_environment() == 0 and (result.checkpoint or not result.stopped_by):
        print(_next_commands(settings, folder, options.module, world_size(), bool(result.stopped_by)))
    return result.exit_status


def _next_commands(settings: Settings, folder: Path, module: str, ranks: int, stopped: bool) -> str:
    """What to type after a training, on as many ranks; after one that was stopped, only what goes on with it."""
    python = min(sys.executable, os.path.relpath(sys.executable), key=len)
    # A launcher may have put an environment on the path of ranks that is not on the user's.
    on_path = sys.prefix in (os.environ.get("VIRTUAL_ENV"), sys.base_prefix)
    own = "meshmpi" if on_path else f"{python} -m meshmpi"
    # Another module fetches the data that its settings name.
    command = own if module == "meshmpi" else f"{python} -m {module}"
    again = f"{command} train {folder}" + (f" --ranks {ranks}" if ranks > 1 else "")
    if stopped:
        return f"go on with:\n  {again}"
    lines = [f"{own} sample {folder} --tokens 300"] if settings.task == "lm" else []
    lines += [f"{again} --set train.steps={2 * settings.train.steps}", f"{own} checkpoint ls {folder}"]
    return "next:\n  " + "\n  ".join(lines)


def _sample(options: Options) -> int:
    from meshmpi import checkpoint
    from meshmpi.transformer.decoding.decoding import Sampling
    from meshmpi.transformer.decoding.sampling import Sampler
    from meshmpi.transformer.training.saved import open_run

    saved = open_run(options.run)
    if saved.settings.task != "lm":
        raise ConfigError(
            f"{options.run} is a run of task '{saved.settings.task}', which does not continue texts.",
            "For a translation: python -m apps.transformer translate translate RUN < FILE.",
        )
    wanted = {k: getattr(saved.settings.sample, k) for k in ("prompt", "tokens", "temperature", "seed")}
    wanted |= {k: getattr(options, k) for k in wanted if getattr(options, k) is not None}
    if options.beams and options.stop:
        raise ConfigError("--beams with --stop: beam search does not stop at a text.", "Leave one of them out.")
    asked = MeshSettings(shape=options.mesh or "", layout=options.layout or "")
    mesh, vocabulary = make_mesh(asked), saved.vocabulary
    sampling = Sampling(wanted["temperature"], options.top_k, options.top_p)
    layout = chosen_layout(asked, mesh.shape)
    sampler = Sampler(saved.config, vocabulary, mesh, layout, None, None, sampling, wanted["seed"])
    checkpoint.load(saved.manifest, sampler.variables, extra=True)
    prompt, count = wanted["prompt"], wanted["tokens"]
    if options.beams:
        best = sampler.best(prompt, count, options.beams, options.alpha)
        found = [(b.score, prompt + vocabulary.decode(b.tokens)) for b in best]
        data = {"texts": [{"score": score, "text": text} for score, text in found]}
        answer_of(mesh, options, "\n".join(f"{score:.4f} {text}" for score, text in found), data)
        return 0
    if options.json:
        text = "".join([prompt, *sampler.pieces(prompt, count, options.stop)])
        answer_of(mesh, options, "", {"texts": [{"text": text}]})
        return 0
    pieces = sampler.pieces(prompt, count, options.stop)
    for text in itertools.chain([prompt], pieces) if options.stream else [prompt, *pieces]:
        say(mesh, text, end="")
    say(mesh, "")
    return 0


_RESUME = "continue from the run's newest checkpoint, or from this one"
_INIT_FROM = (
    "start from a trained model, a Hugging Face checkpoint or a run; its sizes and tokenizer replace those of"
    " the settings"
)
_TRACE = "record 5 steps, or this number, for Perfetto (trace.steps)"
_RESTARTS = "with --ranks: start the job again, up to K times, when a rank or host is lost"
_TRAIN = (
    argument("--out", Path, "folder of the run; default: runs/<config>", metavar="DIR"),
    argument("--recover", bool, "continue on a smaller mesh when ranks are lost (mesh.recover)"),
    argument("--restarts", int, _RESTARTS, 0, "K"),
    argument("--hosts", str, "with --ranks: hosts and their ranks, such as n1:2,n2:2", "", "LIST"),
    argument("--resume", str, _RESUME, False, "CHECKPOINT", nargs="?", const=True),
    argument("--trace", int, _TRACE, None, "STEPS", nargs="?", const=5),
    argument("--init-from", Path, _INIT_FROM, None, "MODEL"),
    argument("--progress", bool, "draw a progress line even if stderr is not a terminal (train.progress)"),
    argument("--dry-run", bool, "print the plan: cost, memory, times; train nothing"),
)
_SAMPLE = (
    argument("run", Path, "folder of a run, or a checkpoint"),
    argument("--prompt", str, "text to continue (default: the run's setting)"),
    argument("--tokens", int, "length of the continuation"),
    argument("--temperature", float, "0 takes the most probable token"),
    argument("--seed", int, "seed of the random numbers"),
    *DRAWING,
    argument("--stop", list, "stop before this text", metavar="TEXT"),
    argument("--stream", bool, "print the text as it is drawn"),
    argument("--alpha", float, "exponent of the length penalty of beam search; 0: none", 0.6),
)
COMMANDS = (
    Command("train", _train, "train a Transformer", _TRAIN, ("config", "mesh", "ranks"), _start),
    Command("sample", _sample, "continue a text with a trained model", _SAMPLE, ("mesh", "ranks", "json")),
)
