"""Measures this machine and writes its hardware profile, for simulate, tune and estimate.

    python -m tools.calibrate name=mybox
    torchrun --nproc_per_node=8 -m tools.calibrate name=mybox          # links, barriers and whole layers too
    python -m tools.simulate cluster=mybox

Writes configs/cluster/NAME.yaml (or directory=), OUT/calibration.json and OUT/predicted_against_measured.png.
"""

from __future__ import annotations

import re
from pathlib import Path

from moonep.command import command, table, write_json, write_text
from moonep.errors import ConfigError
from moonep.simulate.config import CalibrateConfig
from moonep.simulate.hardware import CLUSTER_DIR


def run(config: CalibrateConfig) -> None:
    """Measures, prints and writes (rank 0 alone writes)."""
    from moonep.simulate.calibration import profile_yaml
    from moonep.simulate.machine import calibrate, join_group

    if not re.fullmatch(r"[a-zA-Z0-9_-]+", config.name):
        raise ConfigError(f"name={config.name}: use letters, digits, - and _; it becomes cluster=NAME")
    rank, ranks = join_group()
    result = calibrate(config)
    if rank == 0:
        rows = result.comparisons()
        errors = [abs(row.error) for row in rows]
        print(
            table(
                f"{result.machine}, {ranks} rank(s)",
                ("figure", "value", "origin", "source"),
                result.hardware.source_table(),
            )
        )
        print()
        columns = ("what", "predicted us", "measured us", "error %")
        print(
            table(
                "Predicted against measured",
                columns,
                [(r.name, r.predicted_us, r.measured_us, 100 * r.error) for r in rows],
            )
        )
        print(f"mean error {100 * sum(errors) / len(errors):.1f} %, worst {100 * max(errors):.1f} %")
        for note in result.notes:
            print(f"note: {note}")
        out = Path(config.out)
        folder = Path(config.directory) if config.directory else CLUSTER_DIR
        comment = f"Measured by tools.calibrate on {result.machine}, {ranks} rank(s)."
        write_text(folder / f"{config.name}.yaml", profile_yaml(result.hardware, comment))
        write_json(
            out / "calibration.json",
            {"hardware": vars(result.hardware), "points": [{**vars(r), "error": r.error} for r in rows]},
        )
        _plot(result, out / "predicted_against_measured.png")
        print(f"wrote {folder / config.name}.yaml and {out}")
    if ranks > 1:
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()


def _plot(result: object, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result.comparisons()  # type: ignore[attr-defined]
    figure, axis = pyplot.subplots(figsize=(5.5, 5), layout="constrained")
    axis.scatter([r.measured_us for r in rows], [r.predicted_us for r in rows], s=14, color="#0072b2")
    low, high = min(r.measured_us for r in rows), max(r.measured_us for r in rows)
    axis.plot([low, high], [low, high], color="#7f7f7f", linewidth=1)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("measured us")
    axis.set_ylabel("predicted us")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


if __name__ == "__main__":
    command(run, "calibrate", CalibrateConfig)
