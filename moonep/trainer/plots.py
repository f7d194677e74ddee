"""`loss.png`: training and validation loss, bits per byte, and how evenly experts and ranks were loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonep.errors import DataError

INK, TRAIN, VALIDATION, BEFORE, AFTER = "#1f2430", "#7aa6d8", "#c2410c", "#9aa0ab", "#0f766e"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; a last line cut off by a crash is left out.

    Raises:
        DataError: the file is missing or another line is no JSON object.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist; a run writes it after its first step")
    lines = path.read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise DataError(f"{path}:{number} is not a JSON object") from None
    return rows


def plot_loss(metrics_path: Path | str, png_path: Path | str) -> None:
    """Draws the curves of a run.

    Args:
        metrics_path: a run's metrics.jsonl.
        png_path: where to write the picture; replaced if it exists.

    Raises:
        DataError: no metrics to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(Path(metrics_path))
    train = [row for row in rows if "loss" in row]
    validation = [row for row in rows if "val_loss" in row]
    if not train and not validation:
        raise DataError(f"{metrics_path} holds no losses; nothing to draw")
    balance = [row for row in train if row.get("moe")]
    # A Figure of its own instead of pyplot: no global state, no display, safe in a training process.
    figure = Figure(figsize=(9, 7.2 if balance else 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    if balance:
        grid = figure.add_gridspec(2, 2, height_ratios=[2.1, 1])
        _draw_loss(figure.add_subplot(grid[0, :]), train, validation)
        _draw_experts(figure.add_subplot(grid[1, 0]), balance)
        _draw_ranks(figure.add_subplot(grid[1, 1]), balance)
    else:
        _draw_loss(figure.add_subplot(), train, validation)
    figure.savefig(png_path)


def smooth(values: Sequence[float], span: float) -> NDArray[np.float64]:
    """Exponential average over about `span` values to either side, so that a falling curve is not delayed."""
    forward = _running_average(values, span)
    backward = _running_average(list(values)[::-1], span)[::-1]
    return (forward + backward) / 2


def _running_average(values: Sequence[float], span: float) -> NDArray[np.float64]:
    """Exponential moving average without the pull of a start value."""
    decay = 1 - 1 / max(span, 1.0)
    total = weight = 0.0
    averaged = []
    for value in values:
        total = decay * total + value
        weight = decay * weight + 1
        averaged.append(total / weight)
    return np.array(averaged)


def _draw_loss(axes: Any, train: list[dict[str, Any]], validation: list[dict[str, Any]]) -> None:
    losses = [row["loss"] for row in train]
    if train:
        steps = [row["step"] for row in train]
        axes.plot(steps, losses, color=TRAIN, alpha=0.35, linewidth=0.8)
        axes.plot(
            steps, smooth(losses, len(losses) / 50), color=TRAIN, linewidth=1.8, label="training (smoothed)"
        )
    if validation:
        last = validation[-1]
        steps = [row["step"] for row in validation]
        values = [row["val_loss"] for row in validation]
        label = f"validation (last {last['val_loss']:.3f})"
        axes.plot(steps, values, color=VALIDATION, marker="o", markersize=4, linewidth=1.4, label=label)
        _add_bits_axis(axes, last)
    _style(axes, "loss (nats a token)", f"Loss after {max(r['step'] for r in [*train, *validation]):,} steps")
    _limit_to_body(axes, losses + [row["val_loss"] for row in validation])
    axes.legend(frameon=False, loc="upper right")


def _add_bits_axis(axes: Any, last: Mapping[str, float]) -> None:
    """A second scale at the right: bits per byte are the loss times a constant of the validation text."""
    bits = last.get("val_bits_per_byte")
    if not bits or not last["val_loss"]:
        return
    ratio = bits / last["val_loss"]
    right = axes.secondary_yaxis("right", functions=(lambda loss: loss * ratio, lambda b: b / ratio))
    right.set_ylabel(f"bits per byte (last {bits:.3f})", color=INK)
    right.tick_params(colors=INK, labelsize=9)
    right.spines["right"].set_visible(False)


def _limit_to_body(axes: Any, losses: list[float]) -> None:
    """Leaves room for the first steps only as far as they do not flatten the rest of the curve."""
    finite = np.array([loss for loss in losses if np.isfinite(loss)])
    if len(finite) > 20:
        low, high = finite.min(), np.quantile(finite, 0.995)
        axes.set_ylim(low - 0.05 * (high - low), high + 0.08 * (high - low))


def _draw_experts(axes: Any, rows: list[dict[str, Any]]) -> None:
    """MaxVio: how far the busiest expert of a layer lies above the mean; median and range over layers."""
    steps = [row["step"] for row in rows]
    table = _layer_table(rows, "maxvio")
    span = len(rows) / 50
    low, middle, high = (smooth(np.nanquantile(table, q, axis=1), span) for q in (0.0, 0.5, 1.0))
    axes.fill_between(steps, low, high, color=AFTER, alpha=0.15, linewidth=0, label="all layers")
    axes.plot(steps, middle, color=AFTER, linewidth=1.6, label=f"median layer (last {middle[-1]:.2f})")
    _style(axes, "MaxVio", "Expert balance: busiest over mean, less 1")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, loc="upper right")


def _draw_ranks(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Rank imbalance of the worst layer, before planning (what static experts would give) and after."""
    steps = [row["step"] for row in rows]
    span = len(rows) / 50
    styles = {"before": (BEFORE, "before planning"), "after": (AFTER, "after planning")}
    top = 1.05
    for key, (color, label) in styles.items():
        worst = np.nanmax(_layer_table(rows, f"rank_imbalance_{key}"), axis=1)
        curve = smooth(worst, span)
        top = max(top, float(np.nanmax(curve)))
        axes.plot(steps, curve, color=color, linewidth=1.6, label=f"{label} (last {worst[-1]:.2f})")
    _style(axes, "max / mean tokens", "Rank imbalance, worst layer")
    axes.set_ylim(0.98 - 0.02 * (top - 1), top + 0.25 * (top - 1))
    axes.legend(frameon=False, fontsize=8, loc="upper right")


def _layer_table(rows: list[dict[str, Any]], key: str) -> NDArray[np.float64]:
    """`[rows, layers]`; a number that a run did not measure is NaN."""
    return np.array([[_number(layer.get(key)) for layer in row["moe"]] for row in rows])


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _style(axes: Any, label: str, title: str) -> None:
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel(label, color=INK)
    axes.set_title(title, loc="left", fontsize=10.5, color=INK, fontweight="bold")
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
