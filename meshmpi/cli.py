"""The command line: train, sample, score, generate, export, plan, doctor.

Turns arguments into settings and calls what does the work; a user's mistake ends in one message and
exit status 1.  Knows nothing of how training works.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshmpi.commands import (
    checkpoints,
    comparing,
    doctor,
    inspecting,
    planning,
    pretrained,
    status,
)
from meshmpi.errors import CheckpointError, ConfigError, MeshmpiError
from meshmpi.runtime.mesh import size_error
from meshmpi.runtime.world import rank_by_environment, world_size
from meshmpi.train import signals
from meshmpi.train.config import describe, from_dict, load
from meshmpi.train.settings import Settings, transformer_config
from meshmpi.train.setup import chosen_layout, make_mesh, mesh_shape
from meshmpi.train.signals import STOPPED

GRACE_VARIABLE, GRACE_SECONDS = "PRTE_MCA_odls_base_sigkill_timeout", "60"
"""How long Open MPI's launcher, told to stop by SIGTERM, lets ranks save their state.
Its own default of 1 s is less than a step of a large model takes."""
_FOR_THE_LAUNCHER = ("--ranks", "--restarts", "--hosts")
"""Options that ranks do not get; each takes a value."""
AGENT_VARIABLE = "PRTE_MCA_prte_launch_agent"
"""What Open MPI's launcher starts on other nodes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status, where nobody reads its output that of SIGPIPE."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            status = _run(given)
        except SystemExit:  # --help
            _flush()
            raise
        _flush()
        return status
    except BrokenPipeError:
        if not _readers_gone():  # another pipe, which is no matter of the user
            raise
        return 128 + signal.SIGPIPE


def _flush() -> None:
    """What nobody reads shows here, rather than while Python exits."""
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def _readers_gone() -> bool:
    """Whether what this process prints goes into a pipe without a reader; then it goes nowhere."""
    gone = False
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no file
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            if any(events & select.POLLERR for _, events in poll.poll(0)):
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), stream.fileno())
                gone = True
    return gone


def _run(given: Sequence[str]) -> int:
    from meshmpi.runtime import abort

    options = _parser().parse_args(given)
    abort.install_hooks()
    try:
        if options.ranks is not None:
            _check_early(options)
            if getattr(options, "dry_run", False):  # a plan needs no ranks
                return options.command(options)
            if hasattr(options, "restarts") and (options.restarts or _recovers(options)):
                return _supervised(options, given)
            hosts = getattr(options, "hosts", "")
            run = _folder(options) if hasattr(options, "restarts") else None
            return on_ranks(options.ranks, given, hosts=hosts, recover=_recovers(options), run=run)
        return options.command(options)
    except MeshmpiError as error:
        fail(f"{type(error).__name__}: {error}\n")
        return 1


def fail(text: str) -> None:
    """Prints an error once: it is mostly the same on all ranks."""
    from meshmpi.runtime import abort

    abort.end_job(text, 1)  # returns where no job of several ranks has begun
    rank = rank_by_environment()
    if rank:  # a launcher ends the other ranks as soon as the first has left
        time.sleep(abort.stagger_seconds(rank))
    sys.stderr.write(text)


def _check_early(options: argparse.Namespace) -> None:
    """Finds mistakes in settings and mesh before ranks are started, for a message on its own."""
    if hasattr(options, "config"):
        settings = settings_of(options)
        shape = mesh_shape(settings.mesh, options.ranks)
        spare = options.ranks > shape.size and settings.mesh.recover  # stand in for lost ranks
        if shape.size != options.ranks and not spare:
            raise size_error(shape, options.ranks)
        if getattr(options, "hosts", ""):
            from meshmpi.train.supervisor import parse_hosts

            parse_hosts(options.hosts, options.ranks)


def _recovers(options: argparse.Namespace) -> bool:
    return hasattr(options, "config") and settings_of(options).mesh.recover


def _supervised(options: argparse.Namespace, given: Sequence[str]) -> int:
    """Starts a training on several ranks, and again when its job dies."""
    from meshmpi.train.supervisor import Supervisor, parse_hosts

    def start(ranks: int, more: Sequence[str], hosts: str, environment: dict[str, str]) -> int:
        return on_ranks(
            ranks, [*given, *more], hosts=hosts, recover=_recovers(options),
            environment=environment, run=_folder(options),
        )  # fmt: skip

    hosts = parse_hosts(options.hosts, options.ranks) if options.hosts else []
    supervisor = Supervisor(
        settings_of(options), _folder(options), options.ranks, hosts, options.resume, start
    )
    return supervisor.run(options.restarts)


def on_ranks(
    ranks: int, given: Sequence[str], module: str = "meshmpi", *, hosts: str = "",
    recover: bool = False, environment: Mapping[str, str] | None = None, run: Path | None = None,
) -> int:  # fmt: skip
    """Starts the same command of ``python -m module`` again on several ranks.

    Args:
        ranks: How many.
        given: The command's arguments; the launcher's own among them are left out.
        module: What has the command.
        hosts, recover, environment: As of `meshmpi.runtime.launch.launch`.
        run: Folder of a training, on a file system that all hosts see.

    Returns:
        The exit status of the job, as a shell would tell it.
    """
    from meshmpi.runtime.launch import launch

    rest, k = [], 0
    while k < len(given):
        if given[k] in _FOR_THE_LAUNCHER:
            k += 2
        elif given[k].partition("=")[0] in _FOR_THE_LAUNCHER:
            k += 1
        else:
            rest.append(given[k])
            k += 1
    grace = {GRACE_VARIABLE: os.environ.get(GRACE_VARIABLE, GRACE_SECONDS), **(environment or {})}
    argv, more = ["-m", module, *rest], dict[str, Any]()
    if given[:1] == ["train"]:  # its ranks save when they are asked to stop
        prefix = signals.blocked_prefix() if module == "meshmpi" else []
        argv = ["--", *prefix, sys.executable, *argv]
        if prefix and "SLURM_JOB_ID" in os.environ:
            # Slurm signals the daemons of other nodes as well, which would take their ranks along.
            grace.setdefault(AGENT_VARIABLE, " ".join([*prefix, "prted"]))
        # Asked when the launcher's handlers are set.
        more = {"stop_by": signal.SIGUSR1, "stopped": signals.telling_before}
    try:
        with signals.handing_on(run) if more else contextlib.nullcontext({}) as told:
            status = launch(
                ranks, argv, environment={**grace, **told}, hosts=hosts,
                recover=recover and ranks > 1, **more,
            ).returncode  # fmt: skip
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    status = status if status >= 0 else 128 - status
    # Launcher or rank were ended by a signal before they listened: there was nothing to save.
    ended_early = more and status in (128 + signal.SIGUSR1, 128 + signal.SIGTERM)
    return STOPPED if ended_early else status


# ---- arguments -------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshmpi", description="Named-tensor programs on a mesh of MPI ranks."
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    _add_train(commands)
    planning.add(commands, _command)
    inspecting.add(commands, _command)
    status.add(commands, _command)
    comparing.add(commands)
    checkpoints.add(commands)
    pretrained.add(commands, _command)
    _add_sample(commands)
    doctor.add_arguments(_command(commands, "doctor", doctor.run, doctor.HELP, False))
    return parser


def _add_train(commands: Any) -> None:
    train = _command(commands, "train", _train, "train a Transformer language model", True)
    train.add_argument("--out", type=Path, metavar="DIR", help="folder of the run: runs/<config>")
    train.add_argument(
        "--recover", action="store_true",
        help="when ranks are lost, the others go on with a smaller mesh: mesh.recover",
    )  # fmt: skip
    train.add_argument(
        "--restarts", type=int, default=0, metavar="K",
        help="with --ranks: start the job again, up to K times, when a rank or host is lost",
    )  # fmt: skip
    train.add_argument(
        "--hosts", default="", metavar="LIST", help="with --ranks: where to start, as n1:2,n2:2"
    )
    train.add_argument(
        "--resume", nargs="?", const=True, default=False, metavar="CHECKPOINT",
        help="go on from the newest checkpoint of the run, or from this one",
    )  # fmt: skip
    train.add_argument(
        "--trace", nargs="?", const=5, type=int, metavar="STEPS",
        help="record 5 (or so many) steps for Perfetto: trace.steps",
    )  # fmt: skip
    train.add_argument(
        "--init-from", type=Path, metavar="MODEL",
        help="begin with a trained model: a Hugging Face checkpoint or a run; its sizes and its"
        " tokenizer replace those of the settings",
    )  # fmt: skip
    train.add_argument(
        "--progress", action="store_true",
        help="draw a line that moves, also where stderr is no terminal: train.progress",
    )  # fmt: skip
    train.add_argument(
        "--dry-run", action="store_true", help="print the plan: cost, memory, times; train nothing"
    )


def _add_sample(commands: Any) -> None:
    sample = _command(commands, "sample", _sample, "continue a text with a trained model", False)
    sample.add_argument("run", type=Path, help="folder of a run, or a checkpoint")
    sample.add_argument("--prompt", help="text to continue (default: the run's setting)")
    sample.add_argument("--tokens", type=int, help="length of the continuation")
    sample.add_argument("--temperature", type=float, help="0 takes the most probable token")
    sample.add_argument("--seed", type=int, help="of the noise")
    sample.add_argument("--top-k", type=int, default=0, help="draw from the k most probable tokens")
    sample.add_argument(
        "--top-p", type=float, default=1.0,
        help="draw from the most probable tokens that together reach this probability",
    )  # fmt: skip
    sample.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this; may be repeated",
    )
    sample.add_argument("--stream", action="store_true", help="print the text as it is drawn")
    sample.add_argument(
        "--beams", type=int, default=0, help="search the most probable texts with so many beams"
    )
    sample.add_argument(
        "--alpha", type=float, default=0.6, help="of the length penalty of beams; 0: none"
    )


def _command(
    commands: Any, name: str, function: Any, help_text: str, configured: bool
) -> argparse.ArgumentParser:
    """A command with the arguments that several share."""
    made = commands.add_parser(
        name, help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"settings:\n\n{describe(Settings, _width())}" if configured else None,
    )  # fmt: skip
    made.set_defaults(command=function, ranks=None)
    if configured:
        made.add_argument("config", type=Path, help="a TOML file with settings, or: quickstart")
        made.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE",
            help="one setting, as train.steps=100; may be repeated",
        )  # fmt: skip
        made.add_argument("--storage", help="how variables are kept: mesh.storage")
    if name != "doctor":
        made.add_argument("--mesh", help="as rows:2;cols:2: mesh.shape")
        made.add_argument("--layout", help="as batch:rows;heads:cols: mesh.layout")
        if name not in ("plan", "search"):
            made.add_argument("--ranks", type=int, metavar="N", help="start this on N MPI ranks")
    return made


def _width() -> int:
    """Columns of a line of help."""
    return max(80, min(100, shutil.get_terminal_size().columns))


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings of a command that has a configuration."""
    overrides = list(options.set)
    for key, value in (
        ("shape", options.mesh), ("layout", options.layout), ("storage", options.storage),
    ):  # fmt: skip
        if value is not None:
            overrides.append(f"mesh.{key}={value}")
    if getattr(options, "recover", False):
        overrides.append("mesh.recover=true")
    if getattr(options, "trace", None) is not None:
        overrides.append(f"trace.steps={options.trace}")
    if getattr(options, "progress", False):
        overrides.append("train.progress=on")
    return load(Settings, options.config, overrides)


# ---- commands --------------------------------------------------------------------------------


def _train(options: argparse.Namespace) -> int:
    settings, initialize = settings_of(options), None
    if options.init_from is not None:
        from meshmpi.pretrained.finetune import fine_tuning

        settings, initialize = fine_tuning(settings, options.init_from)
    if options.dry_run:
        from meshmpi.train.report import plan_report

        if rank_by_environment() == 0:
            ranks = options.ranks or world_size()
            print(plan_report(settings, machine=settings.mesh.machine, ranks=ranks))
        return 0
    from meshmpi.train.loop import train
    from meshmpi.train.outcome import note_outcome

    result = train(settings, _folder(options), resume=options.resume, initialize=initialize)
    note_outcome()
    return STOPPED if result.stopped_by else 0


def _folder(options: argparse.Namespace) -> Path:
    return options.out or Path("runs", options.config.stem)


def _sample(options: argparse.Namespace) -> int:
    from meshmpi.train.decoding import Sampling
    from meshmpi.train.sampling import Sampler
    from meshmpi.train.vocabulary import restore_vocabulary

    manifest, checkpoint = _newest(options.run)
    saved = from_dict(Settings, manifest.about["settings"])
    if saved.task != "lm":
        raise ConfigError(
            f"{options.run} is a run of task '{saved.task}', which continues no text.",
            "Of a translation: python -m apps.transformer translate translate RUN < FILE.",
        )
    vocabulary = restore_vocabulary(manifest.about["vocabulary"])
    asked = from_dict(
        Settings, {"mesh": {"shape": options.mesh or "", "layout": options.layout or ""}}
    ).mesh
    wanted = {k: getattr(saved.sample, k) for k in ("prompt", "tokens", "temperature", "seed")}
    wanted |= {k: getattr(options, k) for k in wanted if getattr(options, k) is not None}
    sampling = Sampling(wanted["temperature"], options.top_k, options.top_p)
    if options.beams and options.stop:
        raise ConfigError("a search with beams ends at no text.", "Leave out --stop or --beams.")
    mesh = make_mesh(asked)
    sampler = Sampler(
        transformer_config(saved.model, vocabulary.size), vocabulary, mesh,
        chosen_layout(asked, mesh.shape), None, None, sampling, wanted["seed"],
    )  # fmt: skip
    checkpoint.load(manifest, sampler.variables, extra=True)
    prompt, count = wanted["prompt"], wanted["tokens"]
    if options.beams:
        for found in sampler.best(prompt, count, options.beams, options.alpha):
            _say(mesh, f"{found.score:.4f} {prompt}{vocabulary.decode(found.tokens)}\n")
        return 0
    pieces = sampler.pieces(prompt, count, options.stop)
    for text in [prompt, *pieces] if not options.stream else itertools.chain([prompt], pieces):
        _say(mesh, text)
    _say(mesh, "\n")
    return 0


def _say(mesh: Any, text: str) -> None:
    """Prints at once, on rank 0."""
    if mesh.rank == 0:
        print(text, end="", flush=True)


def _newest(run: Path) -> tuple[Any, Any]:
    """The manifest of a checkpoint, or of the newest one of a run."""
    from meshmpi import checkpoint

    found = [run] if (run / "manifest.json").exists() else checkpoint.find(run / "checkpoints")
    if not found:
        raise CheckpointError(
            f"there is no checkpoint in {run}.", "Give the folder of a run, as runs/quickstart."
        )
    return checkpoint.read_manifest(found[0]), checkpoint
