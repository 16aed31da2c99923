"""What a training run measures: one JSON line a record, one file a rank, and a loss curve.

Knows nothing of models, meshes or MPI, only the number of a rank.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshmpi.errors import DataError

_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # JSON has no such numbers


def metrics_path(folder: str | os.PathLike[str], rank: int = 0) -> Path:
    """The metrics file of a rank."""
    return Path(folder, f"metrics-rank-{rank:05d}.jsonl")


class MetricsWriter:
    """Appends records to the metrics file of a rank.

    Args:
        folder: Folder of the run, made when missing.
        rank: This rank.
        resume_step: Records of this step and later are dropped first, because a resumed run
            will write them again; None keeps all.
        flush_seconds: How old a record may get before it is written to the file; 0: every one is
            there when `write` returns.
        say: Takes lines about what is damaged in the file.  It never blocks a resume: what cannot
            be read is set aside.

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
        """Writes one record.

        Args:
            values: Numbers, strings, lists or dicts of them.  By habit: ``step``, ``loss`` and
                ``held_out_loss`` in nats per token, times in seconds.
        """
        self._file.write(_line(values))
        if time.monotonic() - self._flushed >= self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        """Writes all records to the file now."""
        self._file.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def drop_from(path: Path, step: int, say: Callable[[str], None] = print) -> None:
    """Leaves out the records of this step and later; what cannot be read is set aside.

    Args:
        path: A metrics file; it need not exist.
        step: The first one that a resumed run writes again.
        say: Takes a line for what was set aside.
    """
    if not os.path.lexists(path):
        return
    try:
        kept, damaged, _ = _parsed(_regular(path))
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
    beside = path.with_suffix(".new")
    beside.write_text("".join(_line(r) for r in kept if r.get("step", -1) < step), encoding="utf-8")
    os.replace(beside, path)


def _regular(path: Path) -> bytes:
    """The bytes of a file; of a FIFO or a device nothing is read, as that may never return."""
    if not path.is_file():
        raise OSError(0, "it is not a file")
    return path.read_bytes()


def _aside(path: Path) -> Path:
    """An unused name in the folder of ``path``."""
    k = 1
    while os.path.lexists(place := path.with_name(f"{path.stem}.damaged-{k}")):
        k += 1
    return place


def drop_ranks(folder: str | os.PathLike[str], ranks: int, step: int, say: Callable[[str], None] = print) -> None:
    """Leaves out the same of ranks that a run which is resumed on fewer ranks no longer has."""
    for path in sorted(Path(folder).glob("metrics-rank-*.jsonl")):
        number = path.stem.rsplit("-", 1)[-1]
        if number.isdigit() and int(number) >= ranks:
            drop_from(path, step, say)


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
    """Reads the records of a run.

    Args:
        path: A metrics file, or the folder of a run.
        rank: Whose file to take from a folder.

    Returns:
        The records in order.  A last line cut short by a killed job is left out.

    Raises:
        DataError: The file is missing, or a line other than the last is damaged.
    """
    file = metrics_path(path, rank) if Path(path).is_dir() else Path(path)
    try:
        records, damaged, _ = _parsed(_regular(file))
    except OSError as error:
        raise DataError(f"there are no metrics at {file}: {error.strerror}.", "Name the folder of a run.") from error
    if damaged:
        number, line = damaged[0]
        raise DataError(
            f"{file}:{number} is not a record: {line[:60]!r}.",
            "Delete that line, or resume the run, which sets it aside.",
        )
    return records


def _parsed(data: bytes) -> tuple[list[dict[str, Any]], list[tuple[int, bytes]], bytes]:
    """The records of a file, its damaged lines by number, and a last line that was cut short."""
    records: list[dict[str, Any]] = []
    damaged: list[tuple[int, bytes]] = []
    *lines, cut = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line.strip(b"\0").decode())  # NULs: the power failed
            if not isinstance(record, dict) or not isinstance(record.get("step", 0), int):
                raise ValueError
        except (ValueError, RecursionError):  # a UnicodeDecodeError is a ValueError
            damaged.append((number, line + b"\n"))
            continue
        records.append({k: _WORDS.get(v, v) if isinstance(v, str) else v for k, v in record.items()})
    return records, damaged, cut


def plot_losses(
    records: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    title: str = "",
    baselines: Mapping[str, float] | None = None,
) -> Path:
    """Draws the loss curves of a run into a PNG file.

    Args:
        records: With ``step`` and ``loss`` (training) or ``held_out_loss``, in nats per token.
        path: The file to write.
        title: Stands above the curves.
        baselines: Label -> loss in nats per token, each drawn as a horizontal line.

    Returns:
        The file written.

    Raises:
        DataError: The extra `plot` is not installed, or no record holds a loss.
    """
    curves = {"training": curve(records, "loss"), "held out": curve(records, "held_out_loss")}
    if not any(steps for steps, _ in curves.values()):
        raise DataError(
            "no record holds 'loss' or 'held_out_loss': there is no curve to draw.", "Train for at least one step."
        )
    figure, axes = new_figure()
    _draw(axes, curves, baselines or {})
    return save_figure(figure, axes, path, title)


def new_figure() -> tuple[Any, Any]:
    """A figure of matplotlib and its axes.

    Raises:
        DataError: The extra `plot` is not installed.
    """
    figure_class, canvas_class = _matplotlib()
    figure = figure_class(figsize=(8, 5), layout="constrained")
    canvas_class(figure)
    return figure, figure.add_subplot()


def save_figure(figure: Any, axes: Any, path: str | os.PathLike[str], title: str) -> Path:
    """Writes a figure of losses over steps as PNG; the file appears whole."""
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    figure.savefig(beside, format="png", dpi=120)
    os.replace(beside, path)
    return path


def _draw(axes: Any, curves: Mapping[str, tuple[list[int], list[float]]], baselines: Mapping[str, float]) -> None:
    steps, losses = curves["training"]
    if steps:
        axes.plot(steps, losses, color="tab:blue", alpha=0.35, linewidth=0.8)
        axes.plot(steps, smooth(losses), color="tab:blue", label="training (smoothed)")
    steps, losses = curves["held out"]
    if steps:
        axes.plot(steps, losses, color="tab:red", marker="o", markersize=4, label=f"held out (last {losses[-1]:.3f})")
    for k, (label, loss) in enumerate(baselines.items()):
        style = ("--", ":", "-.")[k % 3]
        axes.axhline(loss, color="black", linestyle=style, label=f"{label} ({loss:g})")


def curve(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the records that have both ``step`` and ``key``."""
    points = [(int(r["step"]), float(r[key])) for r in records if "step" in r and key in r]
    return [s for s, _ in points], [v for _, v in points]


def smooth(losses: Sequence[float]) -> list[float]:
    """Mean over a fiftieth of the run around each step; values that are no numbers are left out.

    Centred, because a mean over past steps alone lags behind a falling loss.
    """
    half, out = len(losses) // 100, []
    for k in range(len(losses)):
        reach = min(half, k, len(losses) - 1 - k)  # shorter, but still centred, near the ends
        around = [v for v in losses[k - reach : k + reach + 1] if math.isfinite(v)]
        out.append(sum(around) / len(around) if around else math.nan)
    return out


def _matplotlib() -> tuple[Any, Any]:
    """Matplotlib's figure and its canvas for files: no window, no global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DataError(
            "drawing a loss curve needs the package matplotlib, which is not installed.",
            "Install it with: pip install 'meshmpi[plot]'",
        ) from error
    return Figure, FigureCanvasAgg
