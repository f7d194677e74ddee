"""Metrics: the MFU formula by hand, lines that survive a resume, folders that are never overwritten."""

from __future__ import annotations

import json

import pytest
import torch

from model.config import K3Config
from moonep.errors import ConfigError
from moonep.trainer.metrics import (
    MetricsWriter,
    max_memory_gb,
    model_flops_utilization,
    peak_flops,
)
from moonep.trainer.run_dir import choose_run_dir


def test_mfu_by_hand():
    """k3 on 8 devices of 989 TFLOP/s at 1000 tokens/s: 6 x 104.2e9 x 1000 / (8 x 989e12) = 7.9 %."""
    active = K3Config.preset("k3").num_parameters()[1]
    assert model_flops_utilization(1000, active, 8, 989e12) == pytest.approx(0.0790, abs=1e-4)


def test_peak_is_of_this_machine():
    peak = peak_flops(torch.device("cpu"), torch.float32)
    assert 1e8 < peak < 1e15
    assert max_memory_gb(torch.device("cpu")) > 0.01


def test_resume_drops_lines_after_the_checkpoint_and_a_torn_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in range(1, 6):
        writer.write({"step": step, "loss": 1.0 / step})
    writer.close()
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    writer = MetricsWriter(path, after_step=3)
    writer.write({"step": 4, "loss": 9.0})
    writer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 9.0)]


def test_folders_are_numbered_and_resumed_in_place(tmp_path):
    wanted = tmp_path / "run"
    assert choose_run_dir(wanted, resume_from=None) == wanted
    (wanted / "checkpoints" / "step_3").mkdir(parents=True)
    assert choose_run_dir(wanted, resume_from=None) == tmp_path / "run-2"
    (tmp_path / "run-2").mkdir()
    assert choose_run_dir(wanted, resume_from=None) == tmp_path / "run-2", "an empty folder may be used"
    (tmp_path / "run-2" / "config.yaml").write_text("")
    assert choose_run_dir(wanted, resume_from=None) == tmp_path / "run-3"
    inside = wanted / "checkpoints" / "step_3"
    assert choose_run_dir(wanted, resume_from=inside) == wanted
    assert choose_run_dir(tmp_path / "new", resume_from=inside) == tmp_path / "new"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        choose_run_dir(tmp_path / "file", resume_from=None)
