"""`tools.bench target=ep`: every step runs, is checked and counted, in the interpreter on a tiny case."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("hydra")

from kernels.exchange import experts, transfer
from moonep.command import CommandFailure
from tools.bench_ep import Bench, BenchEpConfig, run
from tools.ep_workbench import Exchange, Sizes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = {"ranks": [2], "experts": 4, "top_k": 3, "tokens": 3, "hidden": 8, "ffn_hidden": 8, "repeats": 1}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(experts, "PROGRAMS", 2)


def test_measures_and_checks_every_step(tmp_path, capsys):
    config = BenchEpConfig(**TINY, maxvio=[0.3], out=str(tmp_path), seed=3)
    run(config, DEVICE)
    summary = json.loads((tmp_path / "summary.json").read_text())
    steps = {(row["policy"], row["step"]) for row in summary["rows"]}
    for policy in ("bounded", "static"):
        assert {(policy, "dispatch"), (policy, "combine")} <= steps
    assert {("torch", "torch permute"), ("bounded", "plan")} <= steps
    assert summary["failures"] == [] and summary["copy_bytes_per_s"] > 0
    for row in summary["rows"]:
        assert row["ms"] > 0
        if row["moved_bytes"]:
            assert row["floor_bytes"] <= row["moved_bytes"]
    assert "copy within the device" in capsys.readouterr().out


def test_a_wrong_result_fails_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "replicate", lambda *a, **k: None)
    config = BenchEpConfig(**TINY, maxvio=[0.3], out=str(tmp_path), seed=3, copies=False, baselines=False)
    with pytest.raises(CommandFailure, match=r"dispatch: rows of entry"):
        run(config, DEVICE)


def test_bytes_are_counted_from_the_plan():
    """K=3 of 4 experts on 2 ranks: every token has two rows on one of them."""
    exchange = Exchange(Sizes(2, 4, 3, 3, 8, 8, 0.3, seed=3), torch.bfloat16, DEVICE)
    rows, row_bytes = exchange.rows, 16
    assert rows["tokens"] == 6 and rows["entries"] == 18 and 0 < rows["replicated"] <= rows["crossing"]
    assert rows["padding"] == sum(exchange.used_rows) - 18
    floor = (6 + 18 + rows["padding"]) * row_bytes
    assert exchange.dispatch_traffic.floor == floor
    assert exchange.dispatch_traffic.moved == floor + rows["replicated"] * row_bytes
    assert exchange.combine_traffic.moved == (6 + 18 + 2 * rows["replicated"]) * row_bytes


def test_ratios_compare_like_with_like():
    bench = Bench.__new__(Bench)
    bench.config = BenchEpConfig(ranks=[2], maxvio=[0.2, 10.0])
    bench.total = lambda ranks, maxvio, policy: {"bounded": 2.0, "torch": 5.0}[policy] + (maxvio > 1)  # type: ignore[method-assign]
    ratios = bench.ratios()
    assert ratios["R=2 ours, maxvio 10 over 0.2"] == 1.5
    assert ratios["R=2 maxvio 10, torch over ours"] == 2.0


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "target= is missing; allowed: "),
        (["target=nothing"], "target=nothing: no such target; allowed: "),
        (["target=ep", "rank=[2]"], "unknown key 'rank'; did you mean 'ranks'?"),
        (["target=ep", "policy=best"], "policy=best: choose one of"),
    ],
)
def test_wrong_input_is_one_line(words, message):
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", *words], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert message in done.stderr and len(done.stderr.strip().splitlines()) == 1
