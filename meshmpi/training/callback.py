"""The interface of callbacks of a run, and the two exceptions that end a run early."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from meshmpi.errors import ArgumentError, MissingNameError, suggest
from meshmpi.runtime.compiled import CompiledStep
from meshmpi.runtime.mesh_protocol import AnyMesh


class Interrupted(Exception):
    """The run has been asked to stop; raised on all ranks at the same place."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason  # for example "SIGTERM on rank 3", or "SIGINT at the launching process"


class Step(NamedTuple):
    """A training step that has run."""

    number: int  # the first step is 1
    loss: float
    learning_rate: float | None  # that the update used; None where the step does not report it
    seconds: float
    comm_seconds: float  # of these, in collectives
    reports: Mapping[str, float]  # other numbers of the step by name


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation has found."""

    title: ClassVar[str] = "evaluation"
    loss: float | None  # held out; None where only other numbers were computed
    seconds: float  # time taken
    measures: Mapping[str, float] = field(default_factory=dict)  # others by name, such as ``accuracy``

    def numbers(self) -> dict[str, float]:
        """All of them, by their names in the metrics."""
        loss = {} if self.loss is None else {"held_out_loss": self.loss}
        return {**loss, "seconds": self.seconds, **self.measures}

    def __str__(self) -> str:
        numbers = [] if self.loss is None else [f"loss {self.loss:.4f}"]
        numbers += [f"{name} {value:.4f}" for name, value in self.measures.items()]
        return f"{', '.join(numbers)} ({self.seconds:.1f} s)"


@dataclass(frozen=True)
class Sample:
    """What a trained model shows of itself at the end of a run."""

    text: str = ""  # for people
    measures: Mapping[str, float] = field(default_factory=dict)  # by name, such as ``bleu``: for the metrics
    heading: str = ""  # printed above the text


class Run(Protocol):
    """What a callback may know of its run."""

    step: CompiledStep
    mesh: AnyMesh
    folder: Path
    say: Callable[[str], None]  # prints a line, on rank 0 only

    @property
    def done(self) -> int:
        """Training steps done."""
        ...


class Callback:
    """Watches a run.  The loop calls these methods on all ranks at the same places, so they may communicate.

    An exception of any of them ends the run.

    Attributes:
        run: The run, from `on_begin` on.

    Example:
        >>> class Losses(mm.Callback):
        ...     def on_step(self, step):
        ...         print(step.number, step.loss)
    """

    run: Run

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        called = {n: f for n, f in vars(Callback).items() if inspect.isfunction(f) and not n.startswith("_")}
        for name, function in vars(cls).items():
            if not name.startswith(("on_", "before_", "reports")) or not inspect.isfunction(function):
                continue
            if name not in called:
                raise ArgumentError(f"callback {cls.__name__}: a run never calls {name}().", suggest(name, called))
            given = [p for p in inspect.signature(called[name]).parameters if p != "self"]
            try:
                inspect.signature(function).bind(None, *given)
            except TypeError as error:
                raise ArgumentError(
                    f"callback {cls.__name__}: {name}{inspect.signature(function)} is called with"
                    f" {len(given)} argument{'s' * (len(given) != 1)} besides self: {error}.",
                    f"Write def {name}({', '.join(['self', *given])}).",
                ) from None

    def __getattr__(self, name: str) -> Any:
        if name == "run":
            raise MissingNameError(f"callback {type(self).__name__} has no run yet.", "Use it from on_begin() on.")
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def on_begin(self, done: int, last: Mapping[str, float]) -> None:
        """The run begins after ``done`` steps; ``last`` holds the numbers of the step before, if known."""

    def before_step(self, number: int) -> None:
        """Step ``number`` comes next."""

    def on_step(self, step: Step) -> None:
        """A step has run."""

    def reports(self) -> Mapping[str, float]:
        """Numbers of the step that has just run, to print and record beside those that it fetched."""
        return {}

    def on_evaluate(self, number: int, evaluation: Evaluation) -> None:
        """The model was evaluated after step ``number``."""

    def before_save(self, number: int) -> None:
        """The variables after step ``number`` are about to be saved."""

    def on_save(self, path: Path, seconds: float) -> None:
        """A checkpoint is complete; writing it took ``seconds``."""

    def on_trained(self) -> None:
        """All steps are done and saved; the last evaluation follows."""

    def on_sample(self, measures: Mapping[str, float]) -> None:
        """The sample at the end of the run gave these numbers."""

    def on_end(self, stopped_by: str) -> None:
        """The run ends; ``stopped_by`` says what ended it early, if anything did."""

    def on_failure(self, error: BaseException) -> None:
        """The run ends by an exception."""
