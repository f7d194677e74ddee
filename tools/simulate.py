"""What a routing distribution costs under each balancing policy, without a cluster.

    python -m tools.simulate workload=lognormal workload.sigma=1 geometry.R=8 geometry.E=256 out=DIR
    python -m tools.simulate trace=runs/NAME/trace cluster=h100 policies=[static,moonep,bounded]

Prints a table; writes summary.json, records.csv, PNG plots and a self-contained report.html to out=.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from moonep.command import command
from moonep.errors import ConfigError
from moonep.simulate.config import SimulateConfig
from moonep.simulate.study import Study, run_study


def simulate(config: SimulateConfig) -> Study:
    """Runs the study, prints its table and writes its files."""
    from moonep.simulate.output import print_study, write_study

    if config.register:
        try:
            importlib.import_module(config.register)
        except ImportError as error:
            raise ConfigError(f"register={config.register}: cannot import it ({error})") from None
    study = run_study(config)
    print_study(study)
    for path in write_study(study, Path(config.out), plots=config.plots, report=config.report):
        print(f"wrote {path}")
    return study


if __name__ == "__main__":
    command(simulate, "simulate", SimulateConfig)
