"""Losses do not depend on how ranks share the work: EP 1/2/4, ZeRO 0/1/2, accumulation 1 and 8.

fp32 through DeepSpeed: sums run in another order, 1e-6 over 10 steps (past about 20 steps a routing choice
flips and runs part). fp64 in a plain loop: 1e-10 over 100 steps, see equality_fp64.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = ["1,0,1", "2,1,1", "4,0,1", "4,2,1", "4,1,8", "1,2,8"]


def run_ranks(script: str, world_size: int, *words: str, timeout: float = 300) -> str:
    """stdout of a script under torchrun; fails with its output when it fails or takes too long."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={world_size}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, str(ROOT / script), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)
    assert process.returncode == 0, f"{out[-3000:]}\n{err[-6000:]}"
    return out


def results(out: str) -> dict[str, list[float]]:
    line = next(line for line in out.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.distributed
@pytest.mark.slow
def test_losses_are_equal_for_any_arrangement():
    outcome = results(run_ranks("tests/distributed/equality.py", 4, "10", *CASES))
    reference = outcome["(1, 0, 1)"]
    assert reference[-1] < reference[0] - 0.05, "the model must learn, or equality says little"
    assert len(outcome) == len(CASES)
    for case, values in outcome.items():
        assert values == pytest.approx(reference, rel=1e-6), case


@pytest.mark.distributed
@pytest.mark.slow
def test_fp64_losses_are_equal_to_1e_10():
    """A short form; docs/results.md has 100 steps of `equality_fp64.py 100 1 2 4 4,8`."""
    outcome = results(run_ranks("tests/distributed/equality_fp64.py", 4, "12", "1", "2", "4", "4,8"))
    reference = outcome["1"]
    assert reference[-1] < reference[0] - 0.1
    for case, values in outcome.items():
        assert values == pytest.approx(reference, rel=1e-10), case
