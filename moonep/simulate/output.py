"""Tables, files and plots of a finished study."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np

from moonep.command import bytes_text, table, write_json, write_text
from moonep.simulate.study import Study

PHASES = (
    ("plan", "plan"),
    ("dispatch", "dispatch"),
    ("copies", "weight copies"),
    ("products", "expert products"),
    ("combine", "combine"),
    ("dispatch_backward", "dispatch (backward)"),
    ("copies_backward", "weight copies (backward)"),
    ("products_backward", "expert products (backward)"),
    ("combine_backward", "combine (backward)"),
    ("gradient_return", "gradient return"),
)
# Colour-blind safe; forward and backward of a phase share a hue.
COLOURS = (
    "#7f7f7f",
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#56b4e9",
    "#4a9fd0",
    "#e08b4f",
    "#5cc4a4",
    "#9ad0f0",
    "#cc79a7",
)


def balance_rows(study: Study) -> list[tuple[Any, ...]]:
    """One row a policy: balance, movement, copies."""
    rows: list[tuple[Any, ...]] = []
    for label, s in study.summary.items():
        share = 100 * s["moved_tokens"] / s["tokens"]
        over = s["moved_tokens"] / s["moved_bound"] if s["moved_bound"] and s["moved_tokens"] else None
        rows.append(
            (
                label,
                s["imbalance_after"],
                s["imbalance_after_max"],
                share,
                over,
                s["copies"],
                s["copies_bound"],
                s["copy_egress"],
                s["copy_ingress"],
                s["fan_out"],
                s["remote_rows"] / s["tokens"] * study.geometry.K,
                s["row_ingress"],
                s["padding_rows"],
            )
        )
    return rows


BALANCE_COLUMNS = (
    "policy",
    "imbalance",
    "worst",
    "moved %",
    "x bound",
    "copies",
    "bound",
    "egress",
    "ingress",
    "fan-out",
    "remote rows/token",
    "row ingress",
    "padding",
)


def time_rows(study: Study) -> list[tuple[Any, ...]]:
    """One row a policy: predicted phases in microseconds, speed-up, memory verdict."""
    rows: list[tuple[Any, ...]] = []
    for label, s in study.summary.items():
        m = study.memory[label]
        copies = s["copies_us"] + s["copies_backward_us"]
        exchange = s["dispatch_us"] + s["combine_us"] + s["dispatch_backward_us"] + s["combine_backward_us"]
        products = s["products_us"] + s["products_backward_us"]
        rows.append(
            (
                label,
                s["plan_us"],
                exchange,
                copies,
                products,
                s["gradient_return_us"],
                s["forward_us"],
                s["total_us"],
                s["speedup"],
                bytes_text(m["reserved"]),
                bytes_text(m["peak"]),
                m["verdict"],
                s["plan_cpu_us"],
            )
        )
    return rows


TIME_COLUMNS = (
    "policy",
    "plan us",
    "exchange us",
    "copies us",
    "products us",
    "grad return us",
    "forward us",
    "fwd+bwd us",
    "speed-up",
    "reserved",
    "peak",
    "memory",
    "plan on this CPU us",
)


def headline(study: Study) -> str:
    """The answer in a sentence."""
    first = next(iter(study.summary.values()))
    best = min(study.summary, key=lambda label: study.summary[label]["total_us"])
    base = "static" if "static" in study.summary else next(iter(study.summary))
    gain = study.summary[best]["speedup"]
    text = (
        f"Without balancing the fullest rank has {first['imbalance_before']:.2f} x the mean "
        f"(expert maxvio {first['expert_maxvio']:.2f})."
    )
    chip = study.spec.hardware.name
    if best == base:
        return f"{text} On {chip}, {best} is already the fastest here: balancing does not pay."
    return f"{text} On {chip}, {best} is fastest: {gain:.2f} x {base} for the expert layer."


def print_study(study: Study) -> None:
    """The tables on standard output."""
    g, spec = study.geometry, study.spec
    print(
        f"{study.title}: R={g.R} E={g.E} K={g.K} S={g.S} H={g.H} Hi={g.Hi}, {spec.steps} steps x "
        f"{spec.layers} layers, "
        f"seed {study.config.seed}, cluster {spec.hardware.name} ({confidence(study)}), {study.seconds:.1f} s"
    )
    print()
    print(table("Balance and movement (means; 'worst' is the maximum)", BALANCE_COLUMNS, balance_rows(study)))
    print()
    print(
        table("Predicted time of one layer, and memory of the fullest rank", TIME_COLUMNS, time_rows(study))
    )
    print()
    print(headline(study))


def confidence(study: Study) -> str:
    """Which terms of the cost model were measured."""
    measured = study.spec.hardware.measured
    return (
        f"measured: {', '.join(measured)}" if measured else "nothing measured: specifications and assumptions"
    )


def records_csv(study: Study) -> str:
    """Every record as a CSV table."""
    rows = [record.flat() for record in study.records]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, keys, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    return text.getvalue()


def write_study(study: Study, out: Path, *, plots: bool = True, report: bool = True) -> list[Path]:
    """summary.json, records.csv, PNG plots, report.html."""
    paths = [
        write_json(out / "summary.json", study.to_dict()),
        write_text(out / "records.csv", records_csv(study)),
    ]
    if plots:
        paths += write_plots(study, out)
    if report:
        from moonep.simulate.report import study_report

        paths.append(write_text(out / "report.html", study_report(study)))
    return paths


def write_plots(study: Study, out: Path) -> list[Path]:
    """layer_time.png (stacked phases) and balance.png (imbalance over steps)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    out.mkdir(parents=True, exist_ok=True)
    labels = list(study.summary)
    figure, axis = pyplot.subplots(figsize=(9, 0.6 + 0.45 * len(labels) + 1.2), layout="constrained")
    left = np.zeros(len(labels))
    for (key, name), colour in zip(PHASES, COLOURS, strict=True):
        width = np.array([study.summary[label][f"{key}_us"] / 1e3 for label in labels])
        axis.barh(labels, width, left=left, label=name, color=colour)
        left += width
    axis.invert_yaxis()
    axis.set_xlabel("predicted ms of one expert layer, forward and backward")
    axis.set_title(study.title, fontsize=10)
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(out / "layer_time.png", dpi=140)
    pyplot.close(figure)
    figure, axis = pyplot.subplots(figsize=(9, 4), layout="constrained")
    steps = range(study.spec.steps)
    for label in labels:
        axis.plot(steps, imbalance_by_step(study, label), label=label, linewidth=1.4)
    axis.set_xlabel("step")
    axis.set_ylabel("rank imbalance, max/mean (worst layer)")
    axis.set_title(study.title, fontsize=10)
    axis.legend(fontsize=7)
    figure.savefig(out / "balance.png", dpi=140)
    pyplot.close(figure)
    return [out / "layer_time.png", out / "balance.png"]


def imbalance_by_step(study: Study, label: str) -> np.ndarray:
    """Worst rank imbalance over layers, [steps]."""
    worst = np.zeros(study.spec.steps)
    for record in study.records:
        if record.policy == label:
            worst[record.step] = max(worst[record.step], record.values["imbalance_after"])
    return worst
