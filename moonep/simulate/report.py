"""report.html of a simulation: the answer, where the time goes, balance over steps, rank loads, frontier,
memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from moonep.command import bytes_text, to_yaml
from moonep.simulate.html import Page
from moonep.simulate.output import (
    BALANCE_COLUMNS,
    COLOURS,
    PHASES,
    TIME_COLUMNS,
    balance_rows,
    confidence,
    headline,
    imbalance_by_step,
    time_rows,
)
from moonep.simulate.study import Study, best_policy

LINE_COLOURS = (
    "#1b2733",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#d55e00",
    "#009e73",
    "#0072b2",
    "#7a5195",
    "#7f7f7f",
)
MAX_HEATMAP_VALUES = 400_000


def study_report(study: Study) -> str:
    """The whole page as text."""
    g, spec = study.geometry, study.spec
    page = Page(
        title=f"Expert-parallel balance: {study.title}",
        subtitle=(
            f"R={g.R} ranks, E={g.E} experts, top-{g.K}, S={g.S} tokens a rank, dispatched width H={g.H}, "
            f"expert width "
            f"Hi={g.Hi}; {spec.steps} steps x {spec.layers} layers; seed {study.config.seed}",
            f"Cost model: {spec.hardware.name}, {confidence(study)}",
        ),
        answer=headline(study),
    )
    _tiles(page, study)
    _time_chart(page, study)
    _balance_chart(page, study)
    _load_chart(page, study)
    _frontier_chart(page, study)
    _memory_chart(page, study)
    best = list(study.summary).index(best_policy(study.summary))
    page.table(
        "Predicted time and memory",
        "Means over layers and steps. Reserved: shapes known at construction, no host synchronisation. "
        "Peak: buffers "
        "sized after the counts are known. The fastest policy is marked; click a column to sort.",
        TIME_COLUMNS,
        time_rows(study),
        best,
    )
    page.table(
        "Balance and movement",
        "'x bound': moved tokens over the fewest that reach the same balance. 'bound' after copies is "
        "proved. Egress and "
        "ingress count expert copies of the busiest owner and receiver; remote rows are counted after "
        "duplicates are removed.",
        BALANCE_COLUMNS,
        balance_rows(study),
        best,
    )
    page.table(
        f"Hardware figures of {spec.hardware.name}",
        "What the prediction rests on. 'assumed' is a specification or an assumption, as its source says.",
        ("figure", "value", "origin", "source"),
        spec.hardware.source_table(),
    )
    page.code("Configuration", "Every key of this run.", to_yaml(_config(study)))
    return page.render()


def _config(study: Study) -> dict[str, Any]:
    values = dataclasses.asdict(study.config)
    values["cluster"] = study.spec.hardware.name
    values["workload"] = {k: v for k, v in values["workload"].items() if v is not None}
    return values


def _tiles(page: Page, study: Study) -> None:
    base = next(iter(study.summary.values()))
    best = best_policy(study.summary)
    s = study.summary[best]
    page.tile(f"{base['imbalance_before']:.2f} x", "fullest rank over the mean, unbalanced")
    page.tile(f"{base['expert_maxvio']:.2f}", "expert maxvio")
    page.tile(best, "fastest policy")
    page.tile(f"{s['speedup']:.2f} x", "faster than unbalanced, expert layer")
    page.tile(f"{s['imbalance_after']:.3f} x", f"fullest rank under {best}")
    page.tile(f"{s['total_us'] / 1e3:.2f} ms", "one layer, forward and backward")
    page.tile(
        bytes_text(study.memory[best]["reserved"]),
        f"expert memory of a rank, {study.memory[best]['verdict']}",
    )


def _time_chart(page: Page, study: Study) -> None:
    labels = list(study.summary)
    data = []
    for (key, name), colour in zip(PHASES, COLOURS, strict=True):
        milliseconds = [study.summary[label][f"{key}_us"] / 1e3 for label in labels]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": labels,
                "x": milliseconds,
                "marker": {"color": colour},
                "hovertemplate": f"%{{y}}: {name} %{{x:.3f}} ms<extra></extra>",
            }
        )
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "predicted ms of one expert layer"}},
        "yaxis": {"autorange": "reversed"},
        "legend": {"orientation": "h", "y": -0.22, "font": {"size": 11}},
        "margin": {"l": 110, "r": 24, "t": 34, "b": 60},
    }
    page.chart(
        "Where the time goes",
        "A phase lasts as long as its slowest rank. Click a name in the legend to hide a phase (backward, "
        "for instance).",
        data,
        layout,
        height=180 + 38 * len(labels) + 60,
    )


def _line(label: str, index: int, values: np.ndarray, visible: bool) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label,
        "x": list(range(values.size)),
        "y": np.round(values, 5),
        "line": {"color": LINE_COLOURS[index % len(LINE_COLOURS)], "width": 2},
        "visible": visible,
        "hovertemplate": "step %{x}: %{y:.3f}<extra>" + label + "</extra>",
    }


def _balance_chart(page: Page, study: Study) -> None:
    labels = list(study.summary)
    views = ["worst layer", *[f"layer {layer}" for layer in range(min(study.spec.layers, 24))]]
    data, buttons = [], []
    for view in range(len(views)):
        for index, label in enumerate(labels):
            values = (
                imbalance_by_step(study, label) if view == 0 else _layer_imbalance(study, label, view - 1)
            )
            data.append(_line(label, index, values, view == 0))
        shown = [v == view for v in range(len(views)) for _ in labels]
        buttons.append({"label": views[view], "method": "update", "args": [{"visible": shown}]})
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": "rank imbalance, max / mean"}},
        "updatemenus": [{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.17, "yanchor": "top"}],
        "hovermode": "x unified",
        "legend": {"orientation": "h", "y": -0.2},
    }
    page.chart(
        "Balance over steps",
        "Rows computed by the fullest rank over the mean. 1 is exact balance; choose a layer above the "
        "chart.",
        data,
        layout,
    )


def _layer_imbalance(study: Study, label: str, layer: int) -> np.ndarray:
    values = np.ones(study.spec.steps)
    for record in study.records:
        if record.policy == label and record.layer == layer:
            values[record.step] = record.values["imbalance_after"]
    return values


def _load_chart(page: Page, study: Study) -> None:
    """Heat map of rank loads, one policy at a time; the layer whose unbalanced load is worst."""
    labels = list(study.summary)
    steps = max(1, min(study.spec.steps, MAX_HEATMAP_VALUES // (study.spec.num_ranks * len(labels))))
    layer = max(study.records, key=lambda r: r.values["imbalance_before"]).layer
    top = max(1.05, max(r.values["imbalance_after"] for r in study.records if r.layer == layer))
    data, buttons = [], []
    for index, label in enumerate(labels):
        loads = np.stack(
            [
                r.load / max(r.load.mean(), 1e-9)
                for r in study.records
                if r.policy == label and r.layer == layer
            ][:steps]
        )
        data.append(
            {
                "type": "heatmap",
                "z": np.round(loads.T, 3),
                "zmin": 0,
                "zmid": 1,
                "zmax": top,
                "colorscale": [[0, "#2166ac"], [1 / top * 0.999, "#f7f7f7"], [1, "#b2182b"]],
                "colorbar": {"title": {"text": "load / mean"}},
                "visible": index == 0,
                "hovertemplate": "step %{x}, rank %{y}: %{z:.3f} x mean<extra></extra>",
            }
        )
        shown = [i == index for i in range(len(labels))]
        buttons.append({"label": label, "method": "update", "args": [{"visible": shown}]})
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": "rank"}},
        "updatemenus": [{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.17, "yanchor": "top"}],
    }
    page.chart(
        f"Load of every rank (layer {layer}, the most unbalanced)",
        "Red ranks hold the others up, blue ones wait. Choose a policy above the chart.",
        data,
        layout,
    )


def _frontier_chart(page: Page, study: Study) -> None:
    data = []
    for index, (label, s) in enumerate(study.summary.items()):
        data.append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "name": label,
                "x": [s["copies"]],
                "y": [s["imbalance_after"]],
                "text": [label],
                "textposition": "bottom center" if index % 2 else "top center",
                "cliponaxis": False,
                "marker": {
                    "size": 16,
                    "color": LINE_COLOURS[index % len(LINE_COLOURS)],
                    "line": {"color": "#fff", "width": 1},
                },
                "hovertemplate": (
                    f"{label}: %{{x:.2f}} copies, imbalance %{{y:.3f}}, {s['total_us'] / 1e3:.3f} "
                    f"ms<extra></extra>"
                ),
            }
        )
    layout = {
        "xaxis": {"title": {"text": "expert weight copies a layer (mean)"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "rank imbalance after (mean)"}},
        "showlegend": False,
    }
    page.chart(
        "What balance costs in weight copies",
        "Lower left is better. Between policies the trade is real: exact balance buys its last per cent "
        "with most copies.",
        data,
        layout,
    )


def _memory_chart(page: Page, study: Study) -> None:
    labels = list(study.summary)
    parts = (
        ("weights", "weights", "#0072b2"),
        ("gradients", "gradients", "#56b4e9"),
        ("optimizer", "optimizer state", "#7f7f7f"),
        ("pools", "copied experts", "#d55e00"),
        ("shard_reserved", "shard, worst case", "#009e73"),
        ("saved_reserved", "saved for backward, worst case", "#b7d7c9"),
    )
    data: list[dict[str, Any]] = []
    for key, name, colour in parts:
        gigabytes = [study.memory[label][key] / 1e9 for label in labels]
        data.append(
            {
                "type": "bar",
                "name": name,
                "x": labels,
                "y": gigabytes,
                "marker": {"color": colour},
                "hovertemplate": f"%{{x}}: {name} %{{y:.2f}} GB<extra></extra>",
            }
        )
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "peak if sized after the counts",
            "x": labels,
            "y": [study.memory[label]["peak"] / 1e9 for label in labels],
            "marker": {"symbol": "line-ew-open", "size": 30, "color": "#1b2733", "line": {"width": 3}},
            "hovertemplate": "%{x}: peak %{y:.2f} GB<extra></extra>",
        }
    )
    limit = next(iter(study.memory.values()))["limit"] / 1e9
    layout = {
        "barmode": "stack",
        "yaxis": {"title": {"text": "GB of one rank"}},
        "shapes": [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": limit,
                "y1": limit,
                "line": {"color": "#b2182b", "dash": "dash"},
            }
        ],
        "annotations": [
            {
                "xref": "paper",
                "x": 1,
                "y": limit,
                "text": f"device limit {limit:.0f} GB",
                "showarrow": False,
                "yshift": 9,
                "xanchor": "right",
            }
        ],
        "legend": {"orientation": "h", "y": -0.2},
    }
    page.chart(
        "Memory of the experts on one rank",
        "Bars: what must be set aside so that no routing can overflow it. A system without a balance target "
        "must be ready "
        "for every token arriving at one rank, or size its buffers after the counts are known and risk "
        "running out.",
        data,
        layout,
        height=460,
    )
