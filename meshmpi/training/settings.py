"""Settings of a training loop, whatever it trains, each with meaning, unit and default."""

from __future__ import annotations

from typing import Literal

from meshmpi.validated import section, setting, settings


@settings
class RunSettings:
    """The length of the run and what it prints."""

    steps: int = setting(2000, "length of the training", "steps", minimum=0)
    seed: int = setting(0, "seed of initial values, batches and dropout")
    log_every: int = setting(50, "interval between printed lines", "steps", minimum=1)
    plot: bool = setting(True, "whether to draw loss.png at the end")
    progress: Literal["auto", "on", "off"] = setting("auto", "draw a progress line; auto: if stderr is a terminal")
    tensorboard: bool = setting(False, "whether to write event files into the run's folder tensorboard")
    time_limit: str = setting(
        "",
        "time after which the run must have saved and stopped: seconds or hours:minutes;"
        " empty: the limit of the Slurm job, inside one",
    )


@settings
class EvaluateSettings:
    """When the model is evaluated during training."""

    every: int = setting(0, "interval between evaluations; 0: only at the end", "steps", minimum=0)


@settings
class CheckpointSettings:
    """What is kept to go on from."""

    every: int = setting(0, "interval between checkpoints; 0: only at the end", "steps", minimum=0)
    keep: int = setting(2, "number of newest checkpoints to keep; 0: all", minimum=0)
    at_end: bool = setting(True, "whether to save at the end of the run")
    background: bool = setting(False, "write while the next steps run; needs memory for a copy of what a rank writes")
    partner: str = setting(
        "",
        "where a rank of another host keeps a second copy of each rank's file: memory, or a folder"
        " on its local disk; empty: no copy",
    )


@settings
class GuardSettings:
    """What is done about numbers that went wrong."""

    non_finite: Literal["stop", "skip", "off"] = setting(
        "stop",
        "on NaN or infinity in loss or gradients: stop before the update, skip the update,"
        " or off: only a loss that is not finite stops, after the update",
    )
    max_skips: int = setting(10, "number of consecutive skipped steps that stops the run", "steps", minimum=1)
    replica_every: int = setting(
        100, "interval between comparisons of replicated variables; 0: only before saves", "steps", minimum=0
    )
    replicas: Literal["stop", "repair"] = setting(
        "stop", "if replicas differ: stop, or repair: copy the majority's values"
    )


@settings
class TraceSettings:
    """A record of when each instruction ran on each rank; also --trace."""

    steps: int = setting(0, "number of steps recorded; 0: none", "steps", minimum=0)
    start: int = setting(10, "number of steps before the first recorded one", "steps", minimum=0)
    file: str = setting("trace.json.gz", "file in the folder of the run, for Perfetto or Chrome")


@settings
class LoopSettings:
    """All settings that a training loop reads."""

    title: str = setting("", "title of the loss curve")
    baselines: dict[str, float] = setting({}, "published losses by label, drawn in the loss curve", "nats per token")
    train: RunSettings = section(RunSettings)
    evaluate: EvaluateSettings = section(EvaluateSettings)
    checkpoint: CheckpointSettings = section(CheckpointSettings)
    guard: GuardSettings = section(GuardSettings)
    trace: TraceSettings = section(TraceSettings)
