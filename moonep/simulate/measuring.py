"""Runs candidates of the tuner as short torchrun children and reads their speed from metrics.jsonl."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from moonep.command import progress
from moonep.errors import CapabilityError
from moonep.simulate.tuning import Candidate, Tuning

ROOT = Path(__file__).resolve().parents[2]


def training_keys(result: Tuning, candidate: Candidate) -> dict[str, Any]:
    """The nested keys of train.py that make this candidate."""
    choice, train = candidate.choice, result.config.train
    return {
        "model": {"preset": result.config.model},
        "precision": {"name": result.config.precision},
        "parallel": {"ep": choice.ep, "zero": choice.zero},
        "train": {
            "micro_batch": choice.micro_batch,
            "context": train.context,
            "tokens_per_step": train.tokens_per_step,
            "activation_checkpointing": choice.recompute,
        },
        "routing": {
            "policy": choice.policy,
            "tau": choice.tau,
            "slots": choice.slots,
            **_loose(result, candidate),
        },
    }


def _loose(result: Tuning, candidate: Candidate) -> dict[str, Any]:
    """With fewer slots than exact balance may need, the shard must be sized for what may remain."""
    from moonep.planning import default_slots, guaranteed_load

    choice = candidate.choice
    experts = result.model.num_experts
    if choice.slots is None or choice.slots >= default_slots(choice.ep, experts):
        return {}
    load = guaranteed_load(1000 * choice.ep, choice.ep, experts, choice.slots, round(choice.tau * 1000))
    return {"max_imbalance": load / 1000}


def overrides(keys: dict[str, Any], prefix: str = "") -> list[str]:
    """`a.b=value` words of nested keys."""
    words: list[str] = []
    for key, value in keys.items():
        if isinstance(value, dict):
            words += overrides(value, f"{prefix}{key}.")
        else:
            text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            words.append(f"{prefix}{key}={text}")
    return words


def child_command(result: Tuning, candidate: Candidate, run_dir: Path) -> list[str]:
    """The torchrun command of one measured run: the forced routing is the one that was predicted."""
    config = result.config
    words = overrides(training_keys(result, candidate))
    words += [
        f"data={config.data}",
        f"train.steps={config.measure_steps}",
        "train.validate_every=0",
        "train.validate_tokens=256",
        "train.sample_tokens=0",
        "checkpoint.final=false",
        f"seed={config.seed}",
        f"run.dir={run_dir}",
    ]
    if config.trace is not None:
        words.append(f"routing.force={Path(config.trace).resolve()}")
    else:
        values = {k: v for k, v in vars(config.workload).items() if v is not None and k != "name"}
        words.append(f"routing.force={config.workload.name}")
        words += [f"routing.force_args.{key}={value}" for key, value in values.items()]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={config.devices}",
    ]
    return [*launcher, str(ROOT / "train.py"), *words]


def measure(result: Tuning, out: Path) -> list[str]:
    """Runs the best `measure` candidates; fills `result.measured`. Returns one line for each failed run.

    Raises:
        CapabilityError: there is no train.py to run.
    """
    if not (ROOT / "train.py").exists():
        raise CapabilityError(f"measure={result.config.measure} runs {ROOT / 'train.py'}, which is not there")
    chosen = result.feasible[: result.config.measure]
    failures = []
    for index, candidate in enumerate(progress(chosen, len(chosen), "measuring", after_s=0.0)):
        run_dir = _fresh((out / "measured" / f"{index:02d}").resolve())
        problem = _run(child_command(result, candidate, run_dir), run_dir, result.config.measure_timeout_s)
        speed = None if problem else read_speed(run_dir)
        if speed is None:
            failures.append(
                f"candidate {index} ({describe(candidate)}): {problem or 'no metrics were written'}"
            )
        else:
            result.measured[candidate.choice] = speed
    return failures


def _fresh(wanted: Path) -> Path:
    """A folder that does not exist yet (a run never writes into another's); its parent does."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    folder, number = wanted, 2
    while folder.exists():
        folder, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1
    return folder


def describe(candidate: Candidate) -> str:
    c = candidate.choice
    balance = f"ep={c.ep} {c.policy} tau={c.tau:g}"
    return f"{balance} micro_batch={c.micro_batch} zero={c.zero} recompute={c.recompute}"


def _run(command: list[str], run_dir: Path, timeout_s: float) -> str:
    """Runs a child in a process group of its own; returns what went wrong, or nothing."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    log = run_dir.with_suffix(".log")
    with open(log, "w") as file:
        child = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"still running after {timeout_s:g} s (measure_timeout_s)"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if code:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if "rror" in line]
        return f"exit code {code}: {lines[0][:160] if lines else 'see'} ({log})"
    return ""


def read_speed(run_dir: Path) -> float | None:
    """Median tokens/s of the later half of a run's steps (the first ones compile and warm up)."""
    found = sorted(run_dir.rglob("metrics.jsonl"))
    if not found:
        return None
    speeds = []
    for line in found[-1].read_text().splitlines():
        values = json.loads(line)
        if values.get("tokens_per_s"):
            speeds.append(float(values["tokens_per_s"]))
    return statistics.median(speeds[len(speeds) // 2 :]) if speeds else None
