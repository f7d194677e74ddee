"""python -m tools.calibrate: a profile of this machine that the other commands take."""

from __future__ import annotations

import json

import pytest

from moonep.command import command
from moonep.simulate.config import CalibrateConfig
from moonep.simulate.hardware import Hardware
from tools.calibrate import run

QUICK = ["hidden=[32]", "ffn_hidden=[64]", "groups=[2,4]", "rows=[8,32]", "repeats=2"]


def call(*words):
    command(run, "calibrate", CalibrateConfig, [str(word) for word in words])


def test_writes_a_profile_that_loads(tmp_path, capsys):
    import yaml

    call("name=bench_box", *QUICK, f"directory={tmp_path}", f"out={tmp_path / 'out'}")
    out = capsys.readouterr().out
    assert "Predicted against measured" in out and "mean error" in out and "link, barrier and network" in out
    text = (tmp_path / "bench_box.yaml").read_text()
    hardware = Hardware(**yaml.safe_load(text)).validate()
    assert hardware.name == "bench_box" and text.startswith("# Measured by tools.calibrate on ")
    assert set(hardware.measured) >= {"hbm_gb_s", "bf16_tflops", "group_us", "memory_gb"}
    assert "link_gb_s" not in hardware.measured
    assert 0.1 < hardware.hbm_gb_s < 10_000 and 1e-5 < hardware.bf16_tflops < 2_000
    points = json.loads((tmp_path / "out" / "calibration.json").read_text())["points"]
    assert len(points) == 2 * 4 and all(p["measured_us"] > 0 and p["predicted_us"] > 0 for p in points)
    assert (tmp_path / "out" / "predicted_against_measured.png").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["name=a/b"], "name=a/b: use letters"),
        (["precision=int8"], "precision=int8: allowed"),
        (["reps=3"], "repeats"),
    ],
)
def test_wrong_input_is_one_line_with_the_key(tmp_path, capsys, words, message):
    with pytest.raises(SystemExit) as exit_:
        call(*words, *QUICK, f"directory={tmp_path}", f"out={tmp_path}")
    assert exit_.value.code == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
