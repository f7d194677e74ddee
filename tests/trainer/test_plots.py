"""The loss curve: what it reads, and that a picture with content comes out."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from moonep.errors import DataError
from moonep.trainer.plots import plot_loss, read_metrics, smooth

LAYER = {"maxvio": 0.4, "rank_imbalance_before": 1.5, "rank_imbalance_after": 1.0}


def write(path, rows, tail=""):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return path


def ink(path) -> float:
    """Share of pixels that are not white."""
    from matplotlib.image import imread

    picture = imread(path)[..., :3]
    return float((picture.min(axis=-1) < 0.99).mean())


@pytest.mark.parametrize("moe", [None, [LAYER, {**LAYER, "maxvio": None}]])
@pytest.mark.parametrize("validated", [False, True])
def test_picture_has_content(tmp_path, moe, validated, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    rows = [{"step": s, "loss": 5 / s, **({"moe": moe} if moe else {})} for s in range(1, 40)]
    if validated:
        rows += [{"step": 39, "val_loss": 0.2, "val_bits_per_byte": 0.29}]
    metrics = write(tmp_path / "metrics.jsonl", rows)
    plot_loss(metrics, tmp_path / "loss.png")
    assert 0.01 < ink(tmp_path / "loss.png") < 0.5
    assert "matplotlib.pyplot" not in sys.modules


def test_one_step_and_non_finite_losses_are_drawn(tmp_path):
    metrics = write(tmp_path / "m.jsonl", [{"step": 1, "loss": 3.0}, {"step": 2, "loss": float("nan")}])
    plot_loss(str(metrics), str(tmp_path / "loss.png"))
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path):
    metrics = write(tmp_path / "m.jsonl", [{"step": 1, "loss": 3.0}], tail='{"step": 2, "lo')
    assert read_metrics(metrics) == [{"step": 1, "loss": 3.0}]


def test_bad_files_are_named(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_metrics(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"m\.jsonl:1 is not"):
        read_metrics(write(tmp_path / "m.jsonl", [], tail='oops\n{"step": 1}\n'))
    with pytest.raises(DataError, match="no losses"):
        plot_loss(write(tmp_path / "m.jsonl", []), tmp_path / "loss.png")


def test_smoothing_keeps_constants_and_lines_and_removes_noise():
    np.testing.assert_allclose(smooth([2.0] * 50, 10), 2.0)
    line = np.arange(400.0)
    np.testing.assert_allclose(smooth(line, 8)[100:300], line[100:300], atol=1e-2)
    noise = np.random.default_rng(0).normal(size=2000)
    assert smooth(noise, 50).std() < 0.25
