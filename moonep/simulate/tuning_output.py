"""Tables, tuned.yaml, summary and report of a tuning."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from moonep.command import table, to_yaml, write_json, write_text
from moonep.simulate.html import Page
from moonep.simulate.measuring import describe, training_keys
from moonep.simulate.tuning import Candidate, Tuning, confidence, pareto, rejected

COLUMNS = (
    "EP",
    "policy",
    "tau",
    "slots",
    "micro-batch",
    "accumulation",
    "recompute",
    "ZeRO",
    "padding",
    "payload",
    "overlap",
    "tokens/s",
    "measured",
    "GB a device",
    "imbalance",
    "copies",
)
SHOWN = 12


def row(result: Tuning, c: Candidate) -> tuple[Any, ...]:
    """One table row."""
    k = c.choice
    slots = "all" if k.slots is None else str(k.slots)
    settings = (k.ep, k.policy, k.tau, slots, k.micro_batch, c.accumulation, k.recompute, k.zero)
    transport = (k.padding, k.payload, k.overlap)
    return (*settings, *transport, c.tokens_per_s, result.measured.get(k), c.gigabytes, c.imbalance, c.copies)


def headline(result: Tuning) -> str:
    """The answer in a sentence."""
    best, c = result.best, result.best.choice
    speed = result.measured.get(c, best.tokens_per_s)
    basis = "measured" if c in result.measured else "predicted"
    across = c.ep > result.hardware.domain_size * result.hardware.ranks_per_device
    where = "across nodes" if across else "inside a node"
    policy = "no balancing needed" if c.ep == 1 else f"{c.policy} at tau={c.tau:g}"
    return (
        f"{result.config.model} on {result.config.devices} x {result.hardware.name}: EP {c.ep} ({where}), "
        f"{policy}, "
        f"micro-batch {c.micro_batch} x {best.accumulation}, ZeRO-{c.zero}, recomputation "
        f"{'on' if c.recompute else 'off'}: "
        f"{speed:,.0f} tokens/s {basis}, {best.gigabytes:.1f} GB a device."
    )


def print_tuning(result: Tuning, failures: list[str]) -> None:
    """Everything on standard output."""
    ranked = result.feasible
    print(headline(result))
    print(
        f"routing {result.routing}; searched {result.searched}, {len(ranked)} fit. Confidence: "
        f"{confidence(result)}."
    )
    print()
    print(table(f"The best {min(SHOWN, len(ranked))}", COLUMNS, [row(result, c) for c in ranked[:SHOWN]]))
    print()
    front = pareto(ranked)
    print(
        table(
            "Pareto front of tokens/s, memory and balance", COLUMNS, [row(result, c) for c in front[:SHOWN]]
        )
    )
    print()
    print(table("Why the others lost (best rival with that value)", ("value", "because"), rejected(result)))
    for line in failures:
        print(f"not measured: {line}")


def tuned_yaml(result: Tuning) -> str:
    """The experiment file that train.py takes."""
    return (
        "# @package _global_\n"
        f"# {headline(result)}\n"
        f"# python -m tools.tune; routing {result.routing}; {confidence(result)}\n"
        f"{to_yaml(training_keys(result, result.best))}\n"
    )


def write_tuning(result: Tuning, failures: list[str], out: Path, *, report: bool = True) -> list[Path]:
    """experiment/tuned.yaml, summary.json, pareto.png, report.html. The tuned file is composed once to prove
    it valid."""
    tuned = write_text(out / "experiment" / "tuned.yaml", tuned_yaml(result))
    _prove(out)
    ranked = result.feasible
    summary = {
        "model": result.config.model,
        "cluster": result.hardware.name,
        "devices": result.config.devices,
        "routing": result.routing,
        "searched": result.searched,
        "confidence": confidence(result),
        "best": {**result.best.to_dict(), "measured_tokens_per_s": result.measured.get(result.best.choice)},
        "pareto": [c.to_dict() for c in pareto(ranked)],
        "rejected": [{"value": value, "because": why} for value, why in rejected(result)],
        "measured": [
            {**c.to_dict(), "measured_tokens_per_s": result.measured[c.choice]}
            for c in ranked
            if c.choice in result.measured
        ],
        "failures": failures,
    }
    paths = [tuned, write_json(out / "summary.json", summary), _plot(result, out / "pareto.png")]
    if report:
        paths.append(write_text(out / "report.html", tuning_report(result, failures)))
    return paths


def _prove(out: Path) -> None:
    """Composes train.py's configuration with the tuned file; raises ConfigError if a key is not one of its
    own."""
    from moonep.trainer.compose import compose
    from moonep.trainer.config import Config

    compose("train", Config, ["--config-dir", str(out), "experiment=tuned"])


def _plot(result: Tuning, path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranked, front = result.feasible, pareto(result.feasible)
    figure, axis = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    axis.scatter(
        [c.gigabytes for c in ranked], [c.tokens_per_s for c in ranked], s=9, color="#b8c4d0", label="fits"
    )
    axis.scatter(
        [c.gigabytes for c in front],
        [c.tokens_per_s for c in front],
        s=26,
        color="#0072b2",
        label="Pareto front",
    )
    axis.scatter(
        [result.best.gigabytes], [result.best.tokens_per_s], s=80, marker="*", color="#d55e00", label="chosen"
    )
    axis.set_xlabel("GB a device")
    axis.set_ylabel("tokens/s")
    axis.set_title(f"{result.config.model} on {result.config.devices} x {result.hardware.name}", fontsize=10)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
    return path


def tuning_report(result: Tuning, failures: list[str]) -> str:
    """The whole page as text."""
    ranked, best = result.feasible, result.best
    page = Page(
        title=f"Tuning {result.config.model} on {result.config.devices} x {result.hardware.name}",
        subtitle=(
            f"routing {result.routing}; searched {result.searched}",
            f"Confidence: {confidence(result)}",
        ),
        answer=headline(result),
    )
    page.tile(f"{result.measured.get(best.choice, best.tokens_per_s):,.0f}", "tokens/s")
    page.tile(f"{best.gigabytes:.1f} GB", "of memory a device")
    page.tile(f"{best.imbalance:.3f} x", "fullest rank over the mean")
    page.tile(f"{best.copies:.1f}", "expert copies a layer")
    page.tile(f"{len(ranked)}", f"of {len(result.candidates)} configurations fit")
    _front_chart(page, result)
    _step_chart(page, result)
    page.table(
        "The best configurations",
        "Fastest first; measured ones before predicted.",
        COLUMNS,
        [row(result, c) for c in ranked[:40]],
        0,
    )
    page.table(
        "Pareto front",
        "No other configuration is at once faster, leaner and better balanced.",
        COLUMNS,
        [row(result, c) for c in pareto(ranked)],
    )
    page.table(
        "Why the others lost",
        "For each value not chosen, its best rival.",
        ("value", "because"),
        rejected(result),
    )
    if failures:
        page.table("Runs that failed", "", ("run",), [(line,) for line in failures])
    page.code("tuned.yaml", "train.py --config-dir OUT experiment=tuned", tuned_yaml(result))
    page.table(
        f"Hardware figures of {result.hardware.name}",
        "",
        ("figure", "value", "origin", "source"),
        result.hardware.source_table(),
    )
    values = dataclasses.asdict(result.config)
    values["cluster"] = result.hardware.name
    values["workload"] = {k: v for k, v in values["workload"].items() if v is not None}
    page.code("Configuration", "Every key of this run.", to_yaml(values))
    return page.render()


def _points(result: Tuning, candidates: list[Candidate], name: str, marker: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [c.gigabytes for c in candidates],
        "y": [result.measured.get(c.choice, c.tokens_per_s) for c in candidates],
        "text": [f"{describe(c)}<br>imbalance {c.imbalance:.3f}" for c in candidates],
        "marker": marker,
        "hovertemplate": "%{text}<br>%{y:,.0f} tokens/s, %{x:.1f} GB<extra></extra>",
    }


def _front_chart(page: Page, result: Tuning) -> None:
    ranked = result.feasible
    data = [
        _points(result, ranked[:4000], "fits", {"color": "#b8c4d0", "size": 6}),
        _points(result, pareto(ranked), "Pareto front", {"color": "#0072b2", "size": 9}),
        _points(result, [result.best], "chosen", {"color": "#d55e00", "size": 16, "symbol": "star"}),
    ]
    layout = {
        "xaxis": {"title": {"text": "GB a device"}},
        "yaxis": {"title": {"text": "tokens/s"}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": 1.1},
    }
    page.chart("Speed against memory", "Every configuration that fits; hover for its settings.", data, layout)


def _step_chart(page: Page, result: Tuning) -> None:
    """Parts of a step for the best candidate of each EP size and policy."""
    shown: dict[str, Candidate] = {}
    for c in result.feasible:
        name = "EP 1" if c.choice.ep == 1 else f"EP {c.choice.ep}, {c.choice.policy} tau={c.choice.tau:g}"
        shown.setdefault(name, c)
    shown = dict(list(shown.items())[:16])
    colours = {
        "dense_compute": "#0072b2",
        "expert_layers": "#009e73",
        "gradient_reduce": "#cc79a7",
        "optimizer": "#e69f00",
        "bubble": "#7f7f7f",
    }
    data = []
    for key, colour in colours.items():
        values = [c.time.to_dict()[key] * 1e3 if c.time else 0.0 for c in shown.values()]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": key.replace("_", " "),
                "y": list(shown),
                "x": values,
                "marker": {"color": colour},
                "hovertemplate": "%{y}: %{x:.2f} ms<extra></extra>",
            }
        )
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "predicted ms of a step"}},
        "yaxis": {"autorange": "reversed"},
        "legend": {"orientation": "h", "y": 1.08},
    }
    page.chart(
        "Where a step's time goes",
        "The best configuration of each EP size and policy.",
        data,
        layout,
        170 + 30 * len(shown),
    )
