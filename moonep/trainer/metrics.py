"""Numbers of a run: throughput, model FLOPs utilisation, memory; metrics.jsonl and wandb."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

# Dense bf16 tensor-core peak of one device, FLOP/s, from the vendors' data sheets; fp32 without tensor cores.
PEAKS = {
    "H200": (989e12, 67e12),
    "H100": (989e12, 67e12),
    "B200": (2250e12, 75e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "RTX 4090": (165e12, 82.6e12),
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of one device: a known GPU's by its data sheet, else the best of a few matrix products."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for key, (half, single) in PEAKS.items():
            if key in name:
                return half if dtype == torch.bfloat16 else single
    return _measured_flops(device, dtype)


def _measured_flops(device: torch.device, dtype: torch.dtype, size: int = 512, repeats: int = 8) -> float:
    a = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def model_flops_utilization(
    tokens_per_s: float, active_parameters: int, world_size: int, peak: float
) -> float:
    """MFU = 6 x active parameters x tokens/s / (ranks x peak FLOP/s of a device).

    Active parameters are those one token passes through (`K3Config.num_parameters`); 6 counts a multiply and
    an add forward and twice that backward. Attention's quadratic part and recomputation are left out.
    """
    return 6.0 * active_parameters * tokens_per_s / (world_size * peak)


def max_memory_gb(device: torch.device) -> float:
    """Highest memory of this process so far, in 1e9 bytes: allocated by torch on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


class MetricsWriter:
    """Appends one JSON object a line to `metrics.jsonl`; and gives the same numbers to wandb."""

    def __init__(self, path: Path, *, after_step: int | None = None, wandb_run: Any = None):
        """`after_step`: on resume, lines of later steps (of the interrupted run) are dropped."""
        self.path, self.wandb_run = path, wandb_run
        if after_step is not None and path.exists():
            lines = [line for line in path.read_text().splitlines() if _step_of(line) <= after_step]
            path.write_text("".join(f"{line}\n" for line in lines))
        self._file = path.open("a", encoding="utf-8")

    def write(self, values: dict[str, Any]) -> None:
        """One line; `values["step"]` is the number of optimizer steps done."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        if self.wandb_run is not None:
            self.wandb_run.log(_flat(values), step=values["step"])

    def close(self) -> None:
        self._file.close()
        if self.wandb_run is not None:
            self.wandb_run.finish()


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return float("inf")  # the half-written last line of a run that was killed


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """wandb's form: nested names joined by a slash."""
    flat = {key: value for key, value in values.items() if key not in ("step", "moe")}
    for layer, numbers in enumerate(values.get("moe", [])):
        flat.update({f"moe/{layer}/{key}": value for key, value in numbers.items()})
    return flat


def start_wandb(config: Any, folder: Path, run_id: str | None) -> Any:
    """A wandb run, or None when it is off. Called on rank 0 alone, after a checkpoint was restored.

    Raises:
        CapabilityError: wandb is missing or not logged in.
    """
    from moonep.errors import CapabilityError

    settings = config.logging.wandb
    if settings.mode == "disabled":
        return None
    try:
        import wandb

        return wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=folder.name,
            id=run_id,
            resume="allow" if run_id else None,
            dir=str(folder),
            mode=settings.mode,
            config=config.to_dict(),
            settings=wandb.Settings(silent=True),
        )
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CapabilityError(
            f"logging.wandb.mode={settings.mode}: {first}; use logging.wandb.mode=offline or disabled"
        ) from None
