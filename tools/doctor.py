"""What this machine offers for training and what it lacks, with what to do about each gap:

python -m tools.doctor
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moonep.command import CommandFailure, bytes_text, command, table, write_json

OK, NOTE, GAP = "ok", "note", "GAP"
# A shard of preset `tiny` takes about a megabyte; containers give 64 MB, which larger runs outgrow.
SMALL_SHARED_MEMORY = 512 << 20


@dataclass
class DoctorConfig:
    """`out`: folder for summary.json; null: print only."""

    out: str | None = None


@dataclass(frozen=True)
class Finding:
    """One line of the report. `status`: ok, note (works, with a limit) or GAP (training fails here)."""

    what: str
    status: str
    found: str
    advice: str = ""


def run(config: DoctorConfig) -> list[Finding]:
    """Prints the findings and returns them. Raises CommandFailure (exit code 1) when there is a gap."""
    findings = [finding for check in CHECKS for finding in check()]
    rows = [(finding.status, finding.what, finding.found) for finding in findings]
    print(table("Doctor", ("", "what", "found"), rows))
    for finding in findings:
        if finding.advice:
            print(f"{finding.status}: {finding.what}: {finding.advice}")
    if config.out is not None:
        print(f"wrote {write_json(f'{config.out}/summary.json', [vars(f) for f in findings])}")
    gaps = [finding.what for finding in findings if finding.status == GAP]
    if gaps:
        raise CommandFailure(f"training will not run here before this is fixed: {', '.join(gaps)}")
    print("No gaps: bash tools/quickstart.sh trains a small model here.")
    return findings


def check_python() -> list[Finding]:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {_cores()} cores"
    return [Finding("Python", OK, found)]


def check_packages() -> list[Finding]:
    needs = {
        "torch": (GAP, "pip install 'torch>=2.11'"),
        "numpy": (GAP, "pip install numpy"),
        "deepspeed": (GAP, "DS_BUILD_OPS=0 pip install 'deepspeed>=0.19.8'"),
        "hydra-core": (GAP, "pip install 'hydra-core>=1.3.8,<1.4'"),
        "safetensors": (GAP, "pip install 'safetensors>=0.5'"),
        "matplotlib": (NOTE, "no loss.png without it; pip install matplotlib"),
        "triton": (NOTE, "GPU kernels need it, on Linux; pip install 'triton>=3.6'"),
        "wandb": (NOTE, "only for logging.wandb.mode=online or offline; pip install wandb"),
        "tokenizers": (NOTE, "only for tools.prepare_data tokenizer=bpe; pip install tokenizers"),
        "pyarrow": (NOTE, "only for Parquet in tools.prepare_data; pip install pyarrow"),
    }
    return [_package(name, status, advice) for name, (status, advice) in needs.items()]


def _package(name: str, status: str, advice: str) -> Finding:
    try:
        return Finding(name, OK, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, status, "not installed", advice)


def check_kernels_name() -> list[Finding]:
    """Hugging Face has a package `kernels` too; outside the project's folder it may be imported instead of
    ours.
    """
    import importlib.util

    spec = importlib.util.find_spec("kernels")
    ours = Path(__file__).resolve().parents[1] / "kernels" / "__init__.py"
    if spec is not None and spec.origin and Path(spec.origin).resolve() == ours:
        return [Finding("kernels", OK, "this project's")]
    where = spec.origin if spec is not None else "nothing"
    advice = "another package of that name comes first; run from the project's folder, or uninstall it"
    return [Finding("kernels", GAP, str(where), advice)]


def check_gpus() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is None:
            advice = "training uses the CPU: right for preset tiny; larger models need a GPU"
            return [Finding("GPUs", NOTE, "none", advice)]
        found = f"driver {_driver()}, but torch {torch.__version__} sees none"
        advice = f"install a torch whose CUDA this driver supports (this one is for {torch.version.cuda})"
        return [Finding("GPUs", GAP, found, advice)]
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(i) for i in range(count)})
    memory, cuda = bytes_text(torch.cuda.get_device_properties(0).total_memory), torch.version.cuda
    found = f"{count} x {', '.join(names)}, {memory}, driver {_driver()}, CUDA {cuda}"
    findings = [Finding("GPUs", OK, found)]
    return findings + [*_check_bf16(), *(_check_peers(count) if count > 1 else [])]


def _check_bf16() -> list[Finding]:
    import torch

    major, minor = torch.cuda.get_device_capability(0)
    if major >= 8:
        return [Finding("bf16", OK, f"compute capability {major}.{minor}")]
    return [Finding("bf16", NOTE, f"compute capability {major}.{minor}", "use precision=fp32 on this GPU")]


def _check_peers(count: int) -> list[Finding]:
    import torch

    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    blocked = [(a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    peers = Finding("peer access", OK, f"all {len(pairs)} pairs of GPUs")
    if blocked:
        found = f"{len(blocked)} of {len(pairs)} pairs cannot, for instance {blocked[0]}"
        advice = "those GPUs cannot write into each other's memory; use parallel.memory=collective"
        peers = Finding("peer access", NOTE, found, advice)
    return [peers, _nvlink(), *_check_nccl()]


def _nvlink() -> Finding:
    links = [line for line in _output("nvidia-smi", "nvlink", "--status").splitlines() if "GB/s" in line]
    if links:
        return Finding("NVLink", OK, f"{len(links)} links up, {links[0].split(':')[-1].strip()} each")
    return Finding(
        "NVLink", NOTE, "none reported", "expert traffic goes over PCIe: expect it to dominate a step"
    )


def _check_nccl() -> list[Finding]:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return [
            Finding(
                "NCCL", GAP, "not in this torch", "pip install 'moonep[nccl-cu12]' or a CUDA build of torch"
            )
        ]
    version = torch.cuda.nccl.version()
    return [Finding("NCCL", OK, ".".join(map(str, version)))]


def check_shared_memory() -> list[Finding]:
    """CPU ranks of one host exchange tokens through files in /dev/shm."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        advice = "CPU ranks fall back to parallel.memory=collective"
        return [Finding("shared memory", NOTE, "no /dev/shm", advice)]
    usage = shutil.disk_usage(folder)
    found = f"/dev/shm: {bytes_text(usage.free)} free of {bytes_text(usage.total)}"
    if not os.access(folder, os.W_OK):
        return [
            Finding("shared memory", GAP, f"{found}, not writable", "make /dev/shm writable for this user")
        ]
    if usage.free < SMALL_SHARED_MEMORY:
        advice = "enough for preset tiny; else docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm"
        return [Finding("shared memory", NOTE, found, advice)]
    return [Finding("shared memory", OK, found)]


def check_memory() -> list[Finding]:
    """What `parallel.memory=auto` uses for the expert-parallel ranks of this host."""
    import torch

    from moonep.symmetric.shm import SHM_DIRECTORY

    between_hosts = "between hosts always collective"
    if torch.cuda.is_available():
        return [Finding("expert memory", OK, f"cuda: GPUs write into each other's memory; {between_hosts}")]
    if sys.platform == "linux" and os.access(SHM_DIRECTORY, os.W_OK):
        return [Finding("expert memory", OK, f"shm: files in {SHM_DIRECTORY}; {between_hosts}")]
    advice = f"{SHM_DIRECTORY} cannot be used, so tokens pass through gloo: slower, same results"
    return [Finding("expert memory", NOTE, "collective", advice)]


def check_compiler() -> list[Finding]:
    """Triton compiles a small launcher in C for each GPU kernel; the CPU path compiles nothing."""
    import torch

    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found:
        return [Finding("C compiler", OK, found)]
    if torch.cuda.is_available():
        advice = "Triton needs one for its kernels' launchers: apt-get install gcc (or clang)"
        return [Finding("C compiler", GAP, "none", advice)]
    return [Finding("C compiler", OK, "none, and none needed on a CPU")]


def check_writable() -> list[Finding]:
    """Runs are written below the working directory."""
    try:
        with tempfile.TemporaryFile(dir="."):
            free = shutil.disk_usage(".").free
    except OSError as error:
        return [
            Finding("working directory", GAP, str(error), "change to a folder you can write, or set run.dir=")
        ]
    if free < 1 << 30:
        advice = "checkpoints may not fit; set run.dir= to a larger disk"
        return [Finding("working directory", NOTE, f"{bytes_text(free)} free", advice)]
    return [Finding("working directory", OK, f"{bytes_text(free)} free")]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _driver() -> str:
    lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0].strip() if lines else "unknown"


def _output(*words: str) -> str:
    """What a program prints; empty when it is missing, fails, or takes more than 20 s."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _guarded(check: Callable[[], list[Finding]]) -> Callable[[], list[Finding]]:
    """A check that itself fails for want of a package is a note: the package has its own line."""

    def guarded() -> list[Finding]:
        try:
            return check()
        except ImportError as error:
            return [Finding(check.__name__.removeprefix("check_"), NOTE, f"not checked: {error}")]

    return guarded


CHECKS: list[Callable[[], list[Finding]]] = [
    check_python,
    check_packages,
    check_kernels_name,
    _guarded(check_gpus),
    check_shared_memory,
    _guarded(check_memory),
    _guarded(check_compiler),
    check_writable,
]

if __name__ == "__main__":
    command(run, "doctor", DoctorConfig)
