"""Records of a training run: one JSON line per record, one file per rank, event files, loss curves."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshmpi.errors import ConfigError, DataError
from meshmpi.files import disk, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # JSON has no such numbers
EVENTS = "tensorboard"
"""Folder of the event files, inside the folder of a run."""
TAGS = {
    "loss": "loss/training",
    "held_out_loss": "loss/held_out",
    "bits_per_byte": "loss/bits_per_byte",
    "seconds": "step/seconds",
    "comm_seconds": "step/communication_seconds",
    "compute_seconds": "step/compute_seconds",
}
"""Name in the metrics -> tag in the event files; others are ``run/<name>``."""


def metrics_path(folder: str | os.PathLike[str], rank: int = 0) -> Path:
    """The metrics file of a rank."""
    return Path(folder, f"metrics-rank-{rank:05d}.jsonl")


class MetricsWriter:
    """Appends records to the metrics file of a rank, in a folder that is made when missing.

    Args:
        resume_step: Records of this step and later are dropped first, because a resumed run writes them again.
        flush_seconds: How old a record may get before it is in the file; 0: it is there when `write` returns.
        say: Takes lines about damage in the file, which never blocks a resume: see `drop_from`.

    Example:
        >>> with MetricsWriter(folder) as metrics:
        ...     metrics.write(step=0, loss=4.2, seconds=0.05)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int = 0,
        resume_step: int | None = None,
        flush_seconds: float = 0.0,
        say: Callable[[str], None] = print,
    ) -> None:
        self.path = metrics_path(folder, rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is not None:
            drop_from(self.path, resume_step, say)
        self._flush_seconds, self._flushed = flush_seconds, time.monotonic()
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(self, **values: Any) -> None:
        """Writes a record of numbers, strings, lists or dicts; times are in seconds, losses in nats per token."""
        self._file.write(_line(values))
        if time.monotonic() - self._flushed >= self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        self._file.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Writes what people and `meshmpi compare` read of a run, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.replace_file(path, [f"{json.dumps(document, indent=2)}\n".encode()])


def drop_from(path: Path, step: int, say: Callable[[str], None] = print) -> None:
    """Removes the records of this step and later from a file, if it exists, and moves what cannot be read elsewhere."""
    if not os.path.lexists(path):
        return
    try:
        kept, damaged = _parsed(plain.contents(path, None))
    except OSError as error:
        place = _aside(path)
        os.rename(path, place)
        say(f"note: {path} cannot be read ({error.strerror}): it is now {place}")
        return
    if damaged:
        place = _aside(path)
        place.write_bytes(b"".join(line for _, line in damaged))
        lines = f"{len(damaged)} line{'s' if len(damaged) > 1 else ''}"
        say(f"note: {path}: {lines} from line {damaged[0][0]} on cannot be read: kept in {place}")
    disk.replace_file(path, [_line(r).encode() for r in kept if r.get("step", -1) < step])


def drop_ranks(folder: str | os.PathLike[str], ranks: int, step: int, say: Callable[[str], None] = print) -> None:
    """`drop_from` for the ranks that a run no longer has when it is resumed on fewer."""
    for path in sorted(Path(folder).glob("metrics-rank-*.jsonl")):
        number = path.stem.rsplit("-", 1)[-1]
        if number.isdigit() and int(number) >= ranks:
            drop_from(path, step, say)


def _aside(path: Path) -> Path:
    """An unused name in the folder of ``path``."""
    k = 1
    while os.path.lexists(place := path.with_name(f"{path.stem}.damaged-{k}")):
        k += 1
    return place


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(_plain(values), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):  # NumPy's scalars and arrays
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def read_metrics(path: str | os.PathLike[str], rank: int = 0) -> list[dict[str, Any]]:
    """The records of a metrics file, or of a rank of the run in a folder, in order.

    A last line cut short by a killed job is left out.

    Raises:
        DataError: The file is missing, or a line other than the last is damaged.
    """
    file = metrics_path(path, rank) if Path(path).is_dir() else Path(path)
    try:
        records, damaged = _parsed(plain.contents(file, None))
    except OSError as error:
        raise DataError(f"there are no metrics at {file}: {error.strerror}.", "Name the folder of a run.") from error
    if damaged:
        number, line = damaged[0]
        raise DataError(
            f"{file}:{number} is not a record: {line[:60]!r}.",
            "Delete that line, or resume the run, which sets it aside.",
        )
    return records


def _parsed(data: bytes) -> tuple[list[dict[str, Any]], list[tuple[int, bytes]]]:
    """The records of a file, and its damaged lines by number; a last line without its end is left out."""
    records: list[dict[str, Any]] = []
    damaged: list[tuple[int, bytes]] = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line.strip(b"\0").decode())  # NULs: the power failed
            if not isinstance(record, dict) or not isinstance(record.get("step", 0), int):
                raise ValueError
        except (ValueError, RecursionError):  # a UnicodeDecodeError is a ValueError
            damaged.append((number, line + b"\n"))
            continue
        records.append({k: _WORDS.get(v, v) if isinstance(v, str) else v for k, v in record.items()})
    return records, damaged


# ---- TensorBoard -----------------------------------------------------------------------------


def check_tensorboard() -> None:
    """Raises ConfigError where the package tensorboardX is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise ConfigError(
            "train.tensorboard needs the package tensorboardX, which is not installed.",
            "Install it with: pip install 'meshmpi[tensorboard]', or leave train.tensorboard out.",
        )


class EventWriter:
    """Appends the records of the metrics to files in the folder `EVENTS` of a run, by the package tensorboardX.

    TensorBoard hides older events of ``first_step`` and later, since they come again.
    """

    def __init__(self, folder: str | os.PathLike[str], first_step: int) -> None:
        check_tensorboard()
        from tensorboardX import SummaryWriter

        purge = first_step if first_step > 1 else None
        # A file is named by the second: parts of a run that begin in the same second need another suffix.
        suffix = f".from-{first_step}"
        self._writer = SummaryWriter(str(Path(folder, EVENTS)), purge_step=purge, filename_suffix=suffix)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name != "step" and isinstance(value, (int, float)):
                tag = TAGS.get(name, f"run/{name}")
                if name == "seconds" and "held_out_loss" in values:
                    tag = "evaluation/seconds"
                self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        self._writer.close()


# ---- loss curves -----------------------------------------------------------------------------


def plot_losses(
    records: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    title: str = "",
    baselines: Mapping[str, float] | None = None,
    unit: str = "nats per token",
) -> Path:
    """Draws the loss curves of a run into a PNG file.

    Args:
        records: With ``step`` and ``loss`` (training) or ``held_out_loss``.
        baselines: Label -> loss, each drawn as a horizontal line.
        unit: Of all losses.

    Raises:
        DataError: The extra `plot` is not installed, or no record holds a loss.
    """
    (steps, losses), (held_out_steps, held_out) = curve(records, "loss"), curve(records, "held_out_loss")
    if not steps and not held_out_steps:
        raise DataError(
            "no record holds 'loss' or 'held_out_loss': there is no curve to draw.", "Train for at least one step."
        )
    figure, axes = new_figure()
    if steps:
        axes.plot(steps, losses, color="tab:blue", alpha=0.35, linewidth=0.8)
        axes.plot(steps, smooth(losses), color="tab:blue", label="training (smoothed)")
    if held_out_steps:
        label = f"held out (last {held_out[-1]:.3f})"
        axes.plot(held_out_steps, held_out, color="tab:red", marker="o", markersize=4, label=label)
    for k, (label, loss) in enumerate((baselines or {}).items()):
        axes.axhline(loss, color="black", linestyle=("--", ":", "-.")[k % 3], label=f"{label} ({loss:g})")
    return save_figure(figure, axes, path, title, unit)


def new_figure() -> tuple[Figure, Axes]:
    """A figure of matplotlib and its axes, without a window.

    Raises:
        DataError: The extra `plot` is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DataError(
            "drawing a loss curve needs the package matplotlib, which is not installed.",
            "Install it with: pip install 'meshmpi[plot]'",
        ) from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    return figure, figure.add_subplot()


def save_figure(
    figure: Figure, axes: Axes, path: str | os.PathLike[str], title: str, unit: str = "nats per token"
) -> Path:
    """Writes a figure of losses over steps as PNG, by a rename."""
    axes.set(xlabel="step", ylabel=f"loss ({unit})" if unit else "loss", title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk.beside(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=120)
    return path


def curve(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the records that have both ``step`` and ``key``."""
    points = [(int(r["step"]), float(r[key])) for r in records if "step" in r and key in r]
    return [s for s, _ in points], [v for _, v in points]


def smooth(losses: Sequence[float]) -> list[float]:
    """Mean over a fiftieth of the run around each step, without values that are not finite.

    It is centred, because a mean over past steps alone lags behind a falling loss.
    """
    half, out = len(losses) // 100, []
    for k in range(len(losses)):
        reach = min(half, k, len(losses) - 1 - k)  # shorter, but still centred, near the ends
        around = [v for v in losses[k - reach : k + reach + 1] if math.isfinite(v)]
        out.append(sum(around) / len(around) if around else math.nan)
    return out
