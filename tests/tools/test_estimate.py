"""python -m tools.estimate: K3's published sizes, splits that fit, chips, explanations, and wrong input in
one line."""

from __future__ import annotations

import json

import pytest

from moonep.command import command
from moonep.simulate.config import EstimateConfig
from tools.estimate import run


def call(*words):
    command(run, "estimate", EstimateConfig, [str(word) for word in words])


def refused(capsys, *words, code=2):
    with pytest.raises(SystemExit) as exit_:
        call(*words)
    assert exit_.value.code == code
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "\n" not in error
    return error


def test_operators_of_k3(tmp_path, capsys):
    words = ["what=operators", "inference.batch=4", "inference.context=8192", "explain=true"]
    call(*words, f"out={tmp_path}")
    out = capsys.readouterr().out
    assert "2,779.5 B parameters, 104.19 B active" in out
    assert "a token and head: decay K V" in out and "kernel launches" in out
    found = json.loads((tmp_path / "summary.json").read_text())
    assert set(found) >= {"prefill", "decode", "chips"}
    shares = [o["% of time"] for o in found["decode"]["operators"]]
    assert sum(shares) == pytest.approx(100)
    chips = {row["chip"]: row for row in found["chips"]}
    assert set(chips) >= {"h200", "h100", "h800", "h20", "b200", "gb200_nvl72", "a100", "ascend_910c"}
    # K3 in MXFP4: 1.45 TB of routed experts and 0.11 TB of the rest.
    assert chips["h200"]["chips for the weights"] == pytest.approx(12, abs=1)
    order = sorted(chips, key=lambda name: chips[name]["bandwidth TB/s"])
    speeds = [chips[name]["bandwidth only tokens/s"] for name in order]
    assert speeds == sorted(speeds)
    row = chips["h200"]
    assert row["TB/s for the target"] * row["bandwidth only tokens/s"] / 50 == pytest.approx(
        row["bandwidth TB/s"] * 4
    )
    assert (tmp_path / "operators_decode.png").exists()
    assert "Where decode spends its time" in (tmp_path / "report.html").read_text()


def test_training_of_a_small_model(tmp_path, capsys):
    words = [
        "model=k3-mini",
        "what=training",
        "devices=8",
        "train.micro_batch=8",
        "train.tokens_per_step=262144",
    ]
    call(*words, "tokens=5e9", "compare=false", "report=false", f"out={tmp_path}")
    assert "splits fit" in capsys.readouterr().out
    found = json.loads((tmp_path / "summary.json").read_text())["training"]
    assert found["devices"] == 8
    memory = found["memory"]
    assert memory["total"] == pytest.approx(sum(v for k, v in memory.items() if k != "total"))
    assert found["days"] == pytest.approx(5e9 / found["tokens_per_s"] / 86400)
    assert found["device_hours"] == pytest.approx(found["days"] * 24 * 8)
    assert 0.01 < found["mfu"] < 0.6


def test_a_fixed_split_is_respected(tmp_path):
    words = ["model=k3-mini", "what=training", "devices=8", "parallel.ep=4", "parallel.pp=1", "parallel.cp=1"]
    call(*words, "compare=false", "report=false", f"out={tmp_path}")
    setup = json.loads((tmp_path / "summary.json").read_text())["training"]["setup"]
    assert (setup["ep"], setup["pp"], setup["cp"]) == (4, 1, 1)


@pytest.mark.slow
def test_a_model_that_cannot_fit_names_the_smallest_cluster(tmp_path, capsys):
    words = ["model=k3", "what=training", "devices=64", "compare=false"]
    error = refused(capsys, *words, f"out={tmp_path}", code=1)
    assert "does not fit 64 h200" in error and "smallest cluster that can is devices=" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=k33"], "model=k33"),
        (["cluster=mi300"], "no such choice"),
        (["what=everything"], "what=everything: allowed"),
        (["what=operators", "inference.phase=sleep"], "phase=sleep: allowed: prefill, decode"),
        (["what=operators", "inference.precision=int4"], "precision=int4"),
        (["what=operators", "inference.batch=0"], "batch=0"),
        (["what=training", "routing.tau=0.5"], "routing.tau=0.5"),
        (["train.contxt=3"], "did you mean 'train.context'"),
    ],
)
def test_wrong_input_is_one_line_with_the_key(tmp_path, capsys, words, message):
    assert message in refused(capsys, *words, f"out={tmp_path}")
