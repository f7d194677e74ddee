"""Tables, files and the report of an estimate."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from moonep.command import bytes_text, table, to_yaml, write_json, write_text
from moonep.simulate.estimation import (
    CHIP_COLUMNS,
    CLUSTER_COLUMNS,
    OPERATOR_COLUMNS,
    Estimate,
    Inference,
    budget,
)
from moonep.simulate.html import Page
from moonep.simulate.operators import Workpoint, operator_table, time_operators, weight_gigabytes
from moonep.simulate.splits import SPLIT_COLUMNS
from moonep.simulate.training import flops_per_token

FAMILY_COLOURS = {
    "KDA": "#0072b2",
    "MLA": "#d55e00",
    "MoE": "#009e73",
    "dense FFN": "#e69f00",
    "residual": "#7f7f7f",
    "embedding and head": "#cc79a7",
}
SHOWN_SPLITS = 12


def headline(result: Estimate) -> str:
    """The answer in a sentence."""
    total, active = result.parameters
    text = f"{result.config.model}: {total / 1e9:,.1f} B parameters, {active / 1e9:,.2f} B active."
    if result.splits:
        best = result.splits[0]
        cost = budget(best, result.config.tokens, result.hardware, active)
        s = best.setup
        text += (
            f" Training fits {s.devices} x {result.hardware.name} (EP {s.ep}, PP {s.pp}, CP {s.cp}, DP "
            f"{s.dp}): "
            f"{best.memory.total / 1e9:.0f} GB a device, {best.tokens_per_s:,.0f} tokens/s, "
            f"{cost['days']:,.1f} days for "
            f"{result.config.tokens:.3g} tokens ({cost['mfu'] * 100:.0f} % MFU)."
        )
    for part in result.inference:
        if part.at.phase == "decode":
            text += (
                f" One decode step (batch {part.at.batch}, context {part.at.context:,}) takes "
                f"{part.seconds * 1e3:.2f} ms "
                f"on {result.hardware.name}."
            )
    return text


def _capacity_remark(result: Estimate, part: Inference) -> str:
    """A warning where the chips asked for cannot hold the weights."""
    need = -(-weight_gigabytes(result.model, part.at.precision) // result.hardware.usable_gb)
    return f" if it held the weights, which need {need:.0f}" if need > part.at.chips else ""


def memory_rows(result: Estimate) -> list[tuple[Any, ...]]:
    """Bytes of the fullest device, by part, of the fastest split."""
    memory = result.splits[0].memory.to_dict()
    return [
        (name.replace("_", " "), bytes_text(value), 100 * value / memory["total"])
        for name, value in memory.items()
    ]


def print_estimate(result: Estimate) -> None:
    """Everything on standard output."""
    print(headline(result))
    if result.splits:
        _print_training(result)
    for part in result.inference:
        print()
        print(table(operator_title(result, part), OPERATOR_COLUMNS, part.rows(), operator_note(part)))
        if result.config.explain:
            print()
            for timed in part.operators:
                print(f"  {timed.operator.family}, {timed.operator.name}: {timed.operator.formula}")
    if result.chips:
        print()
        print(table(chip_title(result), CHIP_COLUMNS, result.chips))


def _print_training(result: Estimate) -> None:
    rows = [split.row() for split in result.splits[:SHOWN_SPLITS]]
    note = f"{len(result.splits)} splits fit" + (
        f"; the fastest {SHOWN_SPLITS} shown" if len(result.splits) > SHOWN_SPLITS else ""
    )
    print()
    print(table(f"Training on {result.devices} x {result.hardware.name}", SPLIT_COLUMNS, rows, note))
    print()
    print(table("Memory of the fullest device, fastest split", ("part", "bytes", "%"), memory_rows(result)))
    if result.clusters:
        print()
        print(table("The smallest cluster of each kind", CLUSTER_COLUMNS, result.clusters))
    if result.config.explain:
        print()
        print(explanation(result))


def explanation(result: Estimate) -> str:
    """The formulas behind training's numbers, with this run's values."""
    flops = flops_per_token(result.model, result.config.train.context)
    s = result.splits[0].setup
    lines = [
        (__import__("moonep.simulate.training", fromlist=["x"]).__doc__ or "").strip(),
        "",
        f"FLOPs a token: 6 x active parameters = {flops['parameters']:.4g}, mixers (attention, KDA "
        f"recurrences) x 3 = "
        f"{flops['mixers']:.4g}",
        f"this split: {s}",
    ]
    return "\n".join(lines)


def operator_title(result: Estimate, part: Inference) -> str:
    a = part.at
    tokens = f"batch {a.batch}, context {a.context:,}"
    return (
        f"{a.phase}: {tokens}, {a.precision}, {a.chips} x {result.hardware.name} (one device; all instances)"
    )


def operator_note(part: Inference) -> str:
    t = part.totals
    memory = t["weight_bytes"] + t["activation_bytes"] + t["state_bytes"]
    return (
        f"{part.seconds * 1e3:.3f} ms, {t['flops'] / 1e12:.3f} TFLOP, {bytes_text(memory)} "
        f"(weights {bytes_text(t['weight_bytes'])}, states and cache {bytes_text(t['state_bytes'])}); "
        f"kernel launches "
        f"{part.launches_fused:,} fused, {part.launches_unfused:,} unfused"
    )


def chip_title(result: Estimate) -> str:
    i = result.config.inference
    return (
        f"Decode of {result.config.model} by chip: batch {i.batch}, context {i.context:,}, {i.precision}, "
        f"weights spread over "
        f"{i.chips} chip(s); target {i.target_tokens_s:g} tokens/s a sequence"
    )


def write_estimate(result: Estimate, out: Path, *, report: bool = True) -> list[Path]:
    """summary.json, operators_PHASE.png, report.html."""
    paths = [write_json(out / "summary.json", result.to_dict())]
    for part in result.inference:
        paths.append(_plot(result, part, out / f"operators_{part.at.phase}.png"))
    if report:
        paths.append(write_text(out / "report.html", estimate_report(result)))
    return paths


def _plot(result: Estimate, part: Inference, path: Path) -> Path:
    """Share of time by operator."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [t for t in part.operators if t.seconds / part.seconds > 0.002]
    figure, axis = pyplot.subplots(figsize=(8, 0.26 * len(rows) + 1.2), layout="constrained")
    axis.barh(
        [t.operator.name for t in rows],
        [100 * t.seconds / part.seconds for t in rows],
        color=[FAMILY_COLOURS[t.operator.family] for t in rows],
    )
    axis.invert_yaxis()
    axis.set_xlabel("% of time")
    axis.set_title(operator_title(result, part), fontsize=9)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
    return path


def estimate_report(result: Estimate) -> str:
    """The whole page as text."""
    total, active = result.parameters
    hardware = result.hardware
    page = Page(
        title=f"{result.config.model} on {hardware.name}",
        subtitle=(
            f"{total:,} parameters, {active:,} active for a token; dimensions of the released configuration",
        ),
        answer=headline(result),
    )
    page.tile(f"{total / 1e9:,.0f} B", "parameters")
    page.tile(f"{active / 1e9:,.1f} B", "active for a token")
    if result.splits:
        _training_sections(page, result)
    for part in result.inference:
        _operator_sections(page, result, part)
    if result.chips:
        _batch_chart(page, result)
        page.table(
            chip_title(result),
            "'tokens/s a sequence' is the roofline with kernel launches; 'bandwidth only' divides active "
            "weights, KDA states and "
            "MLA cache by the memory bandwidth; the last column is the bandwidth that the target asks for.",
            CHIP_COLUMNS,
            result.chips,
            0,
        )
    page.table(
        f"Hardware figures of {hardware.name}",
        "'assumed' is a specification or an assumption, as its source says.",
        ("figure", "value", "origin", "source"),
        hardware.source_table(),
    )
    values = dataclasses.asdict(result.config)
    values["cluster"] = hardware.name
    page.code("Configuration", "Every key of this run.", to_yaml(values))
    return page.render()


def _training_sections(page: Page, result: Estimate) -> None:
    best = result.splits[0]
    cost = budget(best, result.config.tokens, result.hardware, result.parameters[1])
    page.tile(f"{result.devices}", f"{result.hardware.name} devices")
    page.tile(f"{best.memory.total / 1e9:.0f} GB", "of memory a device")
    page.tile(f"{best.tokens_per_s:,.0f}", "tokens/s in training")
    page.tile(f"{cost['mfu'] * 100:.0f} %", "MFU (6 x active parameters)")
    page.tile(f"{cost['device_hours']:,.0f}", f"device-hours for {result.config.tokens:.3g} tokens")
    parts = {
        key.replace("_", " "): value / 1e9 for key, value in best.memory.to_dict().items() if key != "total"
    }
    page.chart(
        "Memory of the fullest device",
        f"The fastest split that fits {result.hardware.usable_gb:.0f} usable GB.",
        [
            {
                "type": "bar",
                "orientation": "h",
                "x": list(parts.values()),
                "y": list(parts),
                "marker": {"color": "#0072b2"},
                "hovertemplate": "%{y}: %{x:.2f} GB<extra></extra>",
            }
        ],
        {"xaxis": {"title": {"text": "GB"}}, "yaxis": {"autorange": "reversed"}},
        height=340,
    )
    page.table(
        "Splits that fit, fastest first",
        "Predicted with even routing; tools.tune predicts with your routing.",
        SPLIT_COLUMNS,
        [split.row() for split in result.splits[:60]],
        0,
    )
    if result.clusters:
        page.table(
            "The smallest cluster of each kind",
            "Fewest devices that hold training.",
            CLUSTER_COLUMNS,
            result.clusters,
        )


def _operator_sections(page: Page, result: Estimate, part: Inference) -> None:
    names = [timed.operator.name for timed in part.operators]
    families: dict[str, list[Any]] = {}
    for timed in part.operators:
        families.setdefault(timed.operator.family, []).append(timed)
    data = []
    for family, rows in families.items():
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": family,
                "y": [_row_name(t.operator.name, family, names) for t in rows],
                "x": [t.seconds * 1e3 for t in rows],
                "marker": {"color": FAMILY_COLOURS[family]},
                "customdata": [[t.operator.count, t.bound, 100 * t.seconds / part.seconds] for t in rows],
                "hovertemplate": "%{y}x %{customdata[0]}: %{x:.4f} ms, %{customdata[2]:.2f} %, "
                "%{customdata[1]}-bound"
                "<extra></extra>",
            }
        )
    layout = {
        "xaxis": {"title": {"text": "ms of all instances"}},
        "yaxis": {"autorange": "reversed", "tickfont": {"size": 11}},
        "legend": {"orientation": "h", "y": 1.06},
        "barmode": "stack",
    }
    page.chart(
        f"Where {part.at.phase} spends its time",
        operator_title(result, part),
        data,
        layout,
        140 + 21 * len(part.operators),
    )
    columns = (*OPERATOR_COLUMNS, "formula")
    rows = [(*row, timed.operator.formula) for row, timed in zip(part.rows(), part.operators, strict=True)]
    page.table(f"Operators of {part.at.phase}", operator_note(part), columns, rows)


def _row_name(name: str, family: str, names: list[str]) -> str:
    """The operator's name, with its part where two parts have one of the same name."""
    return f"{name} ({family}) " if names.count(name) > 1 else f"{name} "


def _batch_chart(page: Page, result: Estimate) -> None:
    """Decode tokens/s over the batch, by phase of the roofline."""
    i = result.config.inference
    batches = [1 << power for power in range(11)]
    data = []
    for context in sorted({1024, i.context, 131_072}):
        speeds = []
        for batch in batches:
            at = Workpoint("decode", batch, context, i.precision, i.chips)
            times = time_operators(operator_table(result.model, at), result.hardware, fused=i.fused)
            speeds.append(batch / sum(t.seconds for t in times))
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"context {context:,}",
                "x": batches,
                "y": speeds,
                "hovertemplate": "batch %{x}: %{y:,.0f} tokens/s<extra></extra>",
            }
        )
    layout = {
        "xaxis": {"title": {"text": "sequences decoded together"}, "type": "log"},
        "yaxis": {"title": {"text": "tokens/s in all"}, "type": "log"},
        "legend": {"orientation": "h", "y": 1.1},
    }
    page.chart(
        f"Decode speed over batch on {i.chips} x {result.hardware.name}",
        "Memory capacity is not considered here: the chip table says how many chips the weights need.",
        data,
        layout,
    )
