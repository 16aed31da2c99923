"""`mm.fit`: trains any compiled step with everything the trainer of Transformers has."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, Union, runtime_checkable

from meshmpi.checkpoint import Manifest, find
from meshmpi.errors import CheckpointError, ConfigError, DataError, suggest
from meshmpi.graph import Tensor
from meshmpi.graph.arguments import asked, checked, shown
from meshmpi.guard.flight import phase
from meshmpi.ir.kinds import Write
from meshmpi.runtime.agreement import from_first
from meshmpi.runtime.compiled import CompiledStep
from meshmpi.runtime.feeding import BlockFeeder, Held
from meshmpi.training.callback import Callback, Evaluation
from meshmpi.training.loop import Loop, Result
from meshmpi.training.metrics import check_tensorboard
from meshmpi.training.progress import Extras, LiveLine
from meshmpi.training.settings import (
    CheckpointSettings,
    EvaluateSettings,
    GuardSettings,
    LoopSettings,
    RunSettings,
    TraceSettings,
)
from meshmpi.training.signals import StopSignals
from meshmpi.training.starting import Resume, equip, ready, run_loop
from meshmpi.training.stopping import Stopping

Section = TypeVar("Section")


@runtime_checkable
class Reader(Protocol):
    """Data by step number, of which each rank reads its blocks; ``digest``, if there, says which data they are."""

    def feeds(self, step: int, held: Held) -> Mapping[str, Any]:
        """The blocks of the batch of a step, from 0, that this rank holds: an array for every name of ``held``."""
        ...


Data = Union[Reader, Callable[[int], Mapping[Any, Any]], Iterable[Mapping[Any, Any]]]
"""What `fit` trains on."""
Fetch = Union[Tensor, str]
Evaluate = Callable[[], Union[float, Mapping[str, float]]]


@checked
def fit(
    step: CompiledStep,
    data: Data,
    *,
    steps: int,
    folder: str | os.PathLike[str] = "run",
    resume: Resume = False,
    loss: Fetch | None = None,
    learning_rate: Fetch | None = None,
    finite: Fetch | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 0,
    checkpoint: int | Mapping[str, Any] = 0,
    log: int | Mapping[str, Any] = 50,
    guard: Mapping[str, Any] | None = None,
    trace: int | Mapping[str, Any] = 0,
    callbacks: Sequence[Callback] = (),
    say: Callable[[str], None] = print,
) -> Result:
    """Trains: calls ``step`` until ``steps`` steps are done, and logs, evaluates and saves on the way.  Collective.

    SIGTERM, SIGUSR1, Ctrl-C and the time limit of a Slurm job end it after a step and a save; `Result` says so.

    Args:
        step: What `mm.compile` returned, with a scalar loss among its fetches.
        data: Feeds by step number, from 0: a function of it; a reader of `mm.data`, or any object with its method
            ``feeds``; or an iterable of feeds, which begins anew at its end unless it is an iterator.
        steps: Length of the training, steps before a resume included.
        folder: For checkpoints, metrics, pictures.  An earlier run there is renamed, unless it is resumed.
        resume: True: from the newest checkpoint; "auto": if there is one; or the folder of a checkpoint.
        loss: The fetch that is the loss; default: the first scalar.
        learning_rate: The fetch to print as such.
        finite: ``optimizer.finite`` of ``minimize(loss, watch=[loss])``, a fetch: a step whose numbers are not finite
            updates nothing.  Without it, a loss that is not finite stops the run after the update.
        evaluate: Called on all ranks; returns a loss, or numbers by name: ``{"loss": 0.1, "accuracy": 0.97}``.
        evaluate_every: In steps; 0: only at the end.
        checkpoint, log, trace: Interval (trace: number) of steps, or a mapping of the settings in docs/fit.md.
        guard: A mapping of the settings in docs/fit.md.
        callbacks: Called at every step, evaluation, save and failure, on all ranks.
        say: Takes lines of progress, on rank 0 only.

    Raises:
        ConfigError, DataError, CheckpointError: An argument is wrong; data end too early; nothing fits to resume.
        TrainingError: Numbers are not finite, or replicas differ.

    Example:
        >>> result = mm.fit(step, lambda n: {"x": inputs[n % 100]}, steps=1000, checkpoint=200)
    """
    settings = _settings(step, steps, evaluate_every, checkpoint, log, guard or {}, trace)
    fetches = _fetches(step, loss, learning_rate, finite)
    _check_together(step, settings, evaluate, finite)
    finite = step.fetches[finite] if isinstance(finite, str) else finite
    with StopSignals():
        at = Path(folder)
        source = from_first(step.mesh, lambda: bool(find(at / "checkpoints"))) if resume == "auto" else resume
        source = bool(source) if isinstance(source, int) else source
        told = partial(asked, say, "fit")
        make = partial(Fit, settings, step, fetches, data, at, told, evaluate, finite, callbacks)
        return run_loop(step.mesh, at, told, lambda: ready(make(), source))


class Fit(Loop):
    """The loop of `fit`."""

    resume_by = "resume=True"

    def __init__(
        self,
        settings: LoopSettings,
        step: CompiledStep,
        fetches: Mapping[str, Tensor],
        data: Data,
        folder: Path,
        say: Callable[[str], None],
        evaluate: Evaluate | None,
        finite: Tensor | None,
        callbacks: Sequence[Callback],
    ) -> None:
        began, first = time.perf_counter(), step.mesh.rank == 0
        phase("load")
        live = LiveLine(settings.train.progress if first else "off", say)
        say = live.say if first else lambda line: None
        if settings.train.tensorboard:
            check_tensorboard()
        layout = str(step.layouts[0])
        super().__init__(settings, step, fetches, layout, folder, say, Stopping(step.mesh))
        self._data, self._evaluate_now = data, evaluate
        self._digest = getattr(data, "digest", None)
        self._feeds = _by_number(step, data)
        numbers = sum(t.type.shape.size for t in step.variables.types.values())
        lead = f"{numbers:,} numbers in variables on mesh {step.mesh.shape}, layout '{layout}'"
        facts = {"parameters": numbers, "layout": layout}
        equip(self, live, Extras(say), lead, began, facts, (1.0, "steps"), finite, callbacks)

    def feeds(self, number: int) -> Mapping[str, Any]:
        return self._feeds(number)

    def evaluate(self, final: bool) -> Evaluation | None:
        if self._evaluate_now is None:
            return None
        began, given = time.perf_counter(), asked(self._evaluate_now, "fit: evaluate")
        found = given if isinstance(given, Mapping) else {"loss": given}
        try:
            numbers = {getattr(name, "name", str(name)): float(value) for name, value in found.items()}
        except (TypeError, ValueError):
            told = [f"{name!r}: {shown(value)}" for name, value in found.items()]
            raise ConfigError(
                f"evaluate() returned {{{', '.join(told)}}}, in which not every value is a number.",
                "Return a loss, or numbers by name: {'loss': 0.1, 'accuracy': 0.97}.",
            ) from None
        return Evaluation(numbers.pop("loss", None), time.perf_counter() - began, numbers)

    def about(self) -> dict[str, Any]:
        return {} if self._digest is None else {"data_digest": self._digest}

    def accept(self, manifest: Manifest) -> None:
        before = manifest.about.get("data_digest")
        if before != self._digest:
            raise CheckpointError(
                f"the checkpoint {manifest.folder} was trained on other data: their digest was {before},"
                f" now it is {self._digest}.",
                "Give the same data, or start again in another folder.",
            )


def _settings(
    step: Any, steps: Any, evaluate_every: Any, checkpoint: Any, log: Any, guard: Any, trace: Any
) -> LoopSettings:
    """The settings that the arguments of `fit` stand for."""
    logging: dict[str, Any] = dict(log) if isinstance(log, Mapping) else {"every": log}
    pictured = {name: logging.pop(name) for name in ("title", "baselines") if name in logging}
    if "every" in logging:
        logging["log_every"] = logging.pop("every")
    length = _section(RunSettings, "steps", steps, "steps")
    return LoopSettings(
        train=replace(_section(RunSettings, "log", logging), steps=length.steps, seed=step.program.seed),
        evaluate=_section(EvaluateSettings, "evaluate_every", evaluate_every, "every"),
        checkpoint=_section(CheckpointSettings, "checkpoint", checkpoint, "every"),
        guard=_section(GuardSettings, "guard", guard),
        trace=_section(TraceSettings, "trace", trace, "steps"),
        **pictured,
    )


def _check_together(step: CompiledStep, settings: LoopSettings, evaluate: Any, finite: Any) -> None:
    """ConfigError for arguments of which one makes no sense without another."""
    if settings.evaluate.every and evaluate is None:
        raise ConfigError(
            f"fit: evaluate_every is {settings.evaluate.every}, and nothing says what to evaluate.",
            "Give evaluate=, a function that returns a loss, or leave evaluate_every out.",
        )
    if settings.guard.non_finite == "skip" and finite is None:
        raise ConfigError(
            "fit: guard says 'skip', and no tensor says which steps are not finite: all updates would be made.",
            "Compile with optimizer.minimize(loss, watch=[loss]) and optimizer.finite among the fetches, and give"
            " finite=optimizer.finite.",
        )
    if not any(isinstance(i.attrs, Write) for i in step.program.instructions):
        raise ConfigError(
            "fit: the step updates no variable, so that nothing would be learned.",
            "Compile it with updates=optimizer.minimize(loss).",
        )


def _section(settings_class: type[Section], name: str, given: Any, main: str = "") -> Section:
    """A section of the settings from an argument of `fit`; a plain number stands for the setting ``main``."""
    alone = bool(main) and not isinstance(given, Mapping)
    try:
        return settings_class(**({main: given} if alone else given))
    except ConfigError as error:
        told = error.problem.removeprefix(f"{settings_class.__name__}: ")
        told = f"{name}{told.removeprefix(main)}" if alone else f"{name}: {told}"
        raise ConfigError(
            f"fit: {told}".replace("log_every", "every"), error.remedy.replace("log_every", "every")
        ) from None


def _fetches(
    step: CompiledStep, loss: Fetch | None, learning_rate: Fetch | None, finite: Fetch | None
) -> dict[str, Tensor]:
    """The scalars that a step returns, by name; "loss" and "learning_rate" are those meant by the arguments."""
    scalars = {n: t for n, t in step.fetches.items() if not t.shape}

    def found(given: Fetch, what: str) -> str:
        name = given if isinstance(given, str) else next((n for n, t in scalars.items() if t is given), given.name)
        if name not in scalars:
            raise ConfigError(
                f"{what}= is '{name}', which is not a scalar that the step returns.",
                f"Name it in mm.compile(fetches=[...]). {suggest(name, scalars)}",
            )
        return name

    if not scalars:
        raise ConfigError("the step returns no scalar, and so no loss.", "Compile it with fetches=[loss].")
    chosen = {"loss": next(iter(scalars)) if loss is None else found(loss, "loss")}
    if learning_rate is not None:
        chosen["learning_rate"] = found(learning_rate, "learning_rate")
    flag = [] if finite is None else [found(finite, "finite")]
    others = {n: t for n, t in scalars.items() if n not in (*chosen.values(), *flag) and n not in chosen}
    return {**{name: scalars[n] for name, n in chosen.items()}, **others}


def _by_number(step: CompiledStep, data: Any) -> Callable[[int], Mapping[Any, Any]]:
    """Data of any of the forms that `fit` takes, as a function of the step's number."""
    if isinstance(data, Reader):
        feeder = BlockFeeder(step, list(step.program.feeds))
        return lambda number: feeder.feeds(_batch(step, data, data.feeds(number, feeder.held)))
    if callable(data):
        return lambda number: _feeds(step, asked(data, "fit: data", number), number)
    if isinstance(data, Mapping):
        raise ConfigError(
            f"data is one mapping, {{{', '.join(f'{k!r}: {shown(v)}' for k, v in data.items())}}}.",
            "Give lambda step: feeds for the same feeds in every step, or mm.data.reader(data, batch=...) for batches"
            " of its rows.",
        )
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, Tensor)) and not hasattr(data, "ndim"):
        batches = _Sequence(data)
        return lambda number: _feeds(step, batches(number), number)
    raise ConfigError(
        f"data is {shown(data)}.",
        "Give a function of the step's number that returns feeds, a reader of mm.data, or an iterable of feeds.",
    )


def _feeds(step: CompiledStep, given: Any, number: int) -> Mapping[Any, Any]:
    """The feeds of a step as the user's data gave them: a mapping."""
    if not isinstance(given, Mapping):
        names = ", ".join(f"'{n}': ..." for n in step.program.feeds)
        raise DataError(
            f"the data gave {shown(given)} for step {number}, not feeds.", f"Give feeds by name: {{{names}}}."
        )
    return given


def _batch(step: CompiledStep, data: Any, blocks: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a reader gave; DataError where its batches have another number of rows than the feeds."""
    rows = getattr(data, "batch", None)
    wanted = {t.shape.sizes[0] for n, t in step.program.feeds.items() if n in blocks and t.shape}
    if isinstance(rows, int) and len(wanted) == 1 and {rows} != wanted:
        raise DataError(
            f"the reader makes batches of {rows} rows, and the feeds of the step have {min(wanted)}.",
            f"Give mm.data.reader(..., batch={min(wanted)}).",
        )
    return blocks


class _Sequence:
    """An iterable of feeds by number, asked for in rising order."""

    def __init__(self, data: Iterable[Mapping[Any, Any]]) -> None:
        self._data, self._next = data, 0
        self._feeds: Iterator[Mapping[Any, Any]] = iter(data)

    def __call__(self, number: int) -> Mapping[Any, Any]:
        while True:
            feeds, self._next = self._one(), self._next + 1
            if self._next > number:
                return feeds

    def _one(self) -> Mapping[Any, Any]:
        for _ in range(2):
            for feeds in self._feeds:
                return feeds
            if self._feeds is self._data:
                break
            self._feeds = iter(self._data)
        raise DataError(
            f"the data end after {self._next} batches, before the run does.",
            "Give fewer steps, or an iterable that can begin anew, such as a list.",
        )
