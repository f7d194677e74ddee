"""The folder of a run: made by rank 0, never overwriting a run that is there, named on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moonep.errors import ConfigError


def choose_run_dir(wanted: Path, *, resume_from: Path | None) -> Path:
    """`wanted`, or `wanted-2`, `wanted-3`, ... when a run lies there that is not being resumed.

    Args:
        wanted: run.dir.
        resume_from: the checkpoint to continue from, if any; a run continues in its own folder.

    Raises:
        ConfigError: the path is a file.
    """
    if wanted.exists() and not wanted.is_dir():
        raise ConfigError(f"run.dir={wanted} is a file; name a folder")
    if resume_from is not None and wanted.resolve() in resume_from.resolve().parents:
        return wanted
    candidate, number = wanted, 2
    while candidate.exists() and any(candidate.iterdir()):
        candidate = wanted.with_name(f"{wanted.name}-{number}")
        number += 1
    return candidate


def write_config(folder: Path, values: dict[str, Any]) -> None:
    """`config.yaml`: every resolved value. JSON is YAML, but block style reads better."""
    import yaml

    (folder / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(values)), sort_keys=False))
