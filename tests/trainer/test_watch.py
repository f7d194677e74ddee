"""A rank that raises or dies: the others stop within seconds and name it, even inside a collective."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from moonep.trainer.watch import StopRequest

ROOT = Path(__file__).parents[2]
RANK = """
    import os, signal, sys, time
    import torch, torch.distributed as dist
    from datetime import timedelta
    from moonep.trainer.watch import FailureWatch, lost_peer
    rank, how = int(sys.argv[1]), sys.argv[3]
    store = dist.FileStore(sys.argv[2] + "/meet", 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=120))
    watch = FailureWatch(dist.FileStore(sys.argv[2] + "/watch", 3), rank, 3)
    watch.start()
    dist.barrier()
    if rank == 1 and how == "raise":
        says = watch.announce("the disk is full")
        print("first", says)
        watch.linger()
        sys.exit(1)
    if rank == 1 and how == "kill":
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "finish":
        watch.close()
        time.sleep(2.0 * rank)
        sys.exit(0)
    if how == "kill" and rank == 2:
        time.sleep(300)
    try:
        dist.all_reduce(torch.zeros(1))
    except RuntimeError as error:
        assert lost_peer(error), error
        watch.wait_for_cause()
"""


def _start(tmp_path, how):
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(script)]
    return [
        subprocess.Popen(
            [*words, str(rank), str(tmp_path), how], stderr=subprocess.PIPE, text=True, env=environment
        )
        for rank in range(3)
    ]


def _wait(processes, seconds=60):
    deadline = time.monotonic() + seconds
    try:
        return [p.communicate(timeout=max(0.1, deadline - time.monotonic()))[1] for p in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("how", "says"),
    [("raise", "rank 1 failed: the disk is full"), ("kill", "rank 1 failed: its process ended")],
)
def test_others_stop_and_name_the_culprit(tmp_path, how, says):
    processes = _start(tmp_path, how)
    errors = _wait(processes)
    for rank in (0, 2):
        assert f"rank {rank}: stopped because {says}" in errors[rank]
        assert processes[rank].returncode == 1
    assert processes[1].returncode == (1 if how == "raise" else -signal.SIGKILL)


@pytest.mark.distributed
def test_a_rank_that_finishes_is_no_failure(tmp_path):
    processes = _start(tmp_path, "finish")
    assert _wait(processes) == ["", "", ""]
    assert [p.returncode for p in processes] == [0, 0, 0]


def test_equal_faults_are_said_once():
    from moonep.trainer.watch import FailureWatch

    store = dist.HashStore()
    first, second, third = (FailureWatch(store, rank, 3) for rank in range(3))
    assert first.announce("the corpus is too short")
    assert not second.announce("the corpus is too short")
    assert third.announce("another fault")
    assert third.failure() == (0, "the corpus is too short")


def test_signals_ask_to_stop():
    stop = StopRequest()
    stop.install()
    try:
        assert stop.signal_name is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal_name == "SIGTERM"
        assert stop.exit_code == 128 + signal.SIGTERM
    finally:
        stop.restore()
