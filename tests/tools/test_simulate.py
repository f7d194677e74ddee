"""python -m tools.simulate: files, numbers, determinism over workers, traces, and wrong input in one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moonep.command import command
from moonep.simulate.config import SimulateConfig
from moonep.simulate.traces import make_trace, save_trace
from tools.simulate import simulate

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["geometry.R=4", "geometry.E=32", "geometry.K=4", "geometry.S=256", "geometry.H=64", "geometry.Hi=64"]
FAST = [*SMALL, "steps=3", "layers=2", "plots=false", "report=false"]


def call(*words):
    command(simulate, "simulate", SimulateConfig, [str(word) for word in words])


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def refused(capsys, *words, code=2):
    with pytest.raises(SystemExit) as exit_:
        call(*words)
    assert exit_.value.code == code
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "\n" not in error
    return error


def test_table_and_files(tmp_path, capsys):
    call("workload=lognormal", "workload.sigma=1", *SMALL, "steps=2", "layers=1", f"out={tmp_path}")
    out = capsys.readouterr().out
    assert "Balance and movement" in out and "bounded tau=1.02" in out and "memory" in out
    found = summary(tmp_path)
    assert list(found["policies"]) == [
        "static", "eplb", "llep", "ultraep", "moonep", "bounded tau=1", "bounded tau=1.02", "bounded "
        "tau=1.05",
    ]  # fmt: skip
    exact = found["policies"]["bounded tau=1"]
    assert exact["imbalance_after"] == 1.0 and exact["moved_tokens"] == exact["moved_bound"]
    assert found["policies"]["static"]["copies"] == 0
    assert exact["total_us"] == pytest.approx(sum(v for k, v in exact.items() if k in PHASES))
    assert exact["memory"]["verdict"] == "fits"
    rows = (tmp_path / "records.csv").read_text().splitlines()
    assert len(rows) == 1 + 8 * 2 and rows[0].startswith("policy,layer,step,")
    assert (tmp_path / "layer_time.png").stat().st_size > 10_000
    assert (tmp_path / "balance.png").stat().st_size > 10_000
    page = (tmp_path / "report.html").read_text()
    assert "plotly.js v" in page and "http" not in page.split("</head>")[1].split("<script>const CHARTS")[0]


PHASES = [
    f"{name}_us"
    for name in (
        "plan", "dispatch", "copies", "products", "combine", "dispatch_backward", "copies_backward",
        "products_backward", "combine_backward", "gradient_return",
    )
]  # fmt: skip


def without_clock(found):
    for values in found["policies"].values():
        for key in ("plan_cpu_us", "plans_per_second"):
            values.pop(key)
    return found


@pytest.mark.distributed
def test_workers_do_not_change_the_numbers(tmp_path):
    words = ["workload=drift", *FAST, "policies=[static,eplb,bounded]", "seed=7"]
    call(*words, f"out={tmp_path / 'one'}")
    call(*words, "workers=2", f"out={tmp_path / 'two'}")
    assert without_clock(summary(tmp_path / "one")) == without_clock(summary(tmp_path / "two"))


def test_the_seed_matters_and_suffices(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        call(*FAST, "policies=[static]", f"seed={seed}", f"out={tmp_path / name}")
    a, b, c = (without_clock(summary(tmp_path / name)) for name in "abc")
    assert a == b
    assert a["policies"]["static"]["imbalance_after"] != c["policies"]["static"]["imbalance_after"]


def test_a_trace_sets_the_geometry(tmp_path, capsys):
    counts = np.random.default_rng(0).multinomial(40, np.full(8, 1 / 8), size=(3, 2, 2))
    path = save_trace(tmp_path / "t.npz", make_trace(counts, top_k=2, source="t"))
    call(f"trace={path}", "policies=[static,bounded]", "plots=false", "report=false", f"out={tmp_path}")
    found = summary(tmp_path)
    assert (found["geometry"]["R"], found["geometry"]["E"], found["geometry"]["K"]) == (2, 8, 2)
    assert (found["steps"], found["layers"]) == (3, 2)
    loads = counts.sum(2).reshape(3, 2, 2, 4).sum(-1)
    before = (loads.max(-1) / loads.mean(-1)).mean()
    assert found["policies"]["static"]["imbalance_before"] == pytest.approx(before)
    capsys.readouterr()
    assert "set geometry.R=2" in refused(capsys, f"trace={path}", "geometry.R=4", f"out={tmp_path}")
    assert "the trace has 3 steps" in refused(capsys, f"trace={path}", "steps=9", f"out={tmp_path}")


def test_model_sets_the_layer(tmp_path):
    words = ["model=k3-mini", "geometry.R=4", "steps=1", "layers=1", "policies=[static]"]
    call(*words, "plots=false", "report=false", f"out={tmp_path}")
    g = summary(tmp_path)["geometry"]
    assert (g["E"], g["K"], g["H"], g["Hi"]) == (256, 6, 256, 416)


def test_the_oracle_bounds_everyone(tmp_path):
    """HiGHS on a small case: nobody at tau = 1 uses fewer copies than the proved bound."""
    words = [
        "geometry.R=4",
        "geometry.E=16",
        "geometry.K=2",
        "geometry.S=128",
        "steps=2",
        "layers=1",
        "taus=[1.0]",
    ]
    call(*words, "policies=[moonep,bounded,exact]", "plots=false", "report=false", f"out={tmp_path}")
    found = summary(tmp_path)["policies"]
    bound = found["exact tau=1"]["copies_bound"]
    assert bound >= 3 - 1e-9  # generic counts: R - 1
    assert all(values["copies_bound"] == bound and values["copies"] >= bound for values in found.values())
    assert found["exact tau=1"]["copies"] <= found["moonep"]["copies"]


def test_memory_verdicts_follow_the_reservation(tmp_path):
    """Static needs R x S x K rows; on a small enough device only the balanced policy has room."""
    words = [
        "geometry.R=8",
        "geometry.E=64",
        "geometry.K=8",
        "geometry.S=8192",
        "geometry.H=2048",
        "geometry.Hi=1024",
    ]
    call(*words, "steps=1", "layers=1", "policies=[static,bounded]", "taus=[1.0]", "cluster.memory_gb=12",
         "workload.sigma=0.1", "plots=false", "report=false", f"out={tmp_path}")  # fmt: skip
    found = summary(tmp_path)["policies"]
    assert found["static"]["memory"]["verdict"] == "fits if sized after the counts"
    assert found["bounded tau=1"]["memory"]["verdict"] == "fits"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["geometry.R=3", "geometry.E=256"], "geometry.E=256 must be a multiple of geometry.R=3"),
        (["geometry.K=400"], "geometry.K=400"),
        (["workload=lognormall"], "did you mean 'lognormal'"),
        (["workload.sigma=big"], "workload.sigma=big: must be a number"),
        (["workload=zipf", "workload.domains=3"], "workload zipf has no such key"),
        (["geometrie.R=8"], "unknown key 'geometrie.R'; did you mean 'geometry.R'"),
        (["cluster=h2000"], "did you mean 'h200'"),
        (["policies=[static,moonepp]"], "known: bounded"),
        (["policies=[]"], "name at least one policy"),
        (["taus=[0.5]", "policies=[bounded]"], "taus: 0.5"),
        (["model=k4"], "model=k4"),
        (["trace=/nowhere/t.jsonl"], "no such file"),
        (["steps=0"], "steps=0"),
        (["layer.payload=int3"], "layer.payload=int3"),
        (["workload.maxvio=1000"], "workload.maxvio=1000"),
        (["--steps=3"], "did you mean steps"),
        (["register=no_such_module_anywhere"], "register=no_such_module_anywhere"),
    ],
)
def test_wrong_input_is_one_line_with_the_key(tmp_path, capsys, words, message):
    assert message in refused(capsys, *words, f"out={tmp_path}")


def test_a_policy_that_breaks_an_invariant_is_named(tmp_path, capsys, monkeypatch):
    """A registered policy that loses a token: named, exit code not zero."""
    (tmp_path / "lossy_policy.py").write_text(
        "import moonep.planning as planning\n"
        "@planning.register_policy('lossy')\n"
        "def lossy(tokens_per_expert, *, tau_thousandths, slots):\n"
        "    alloc = planning.plan_allocation(tokens_per_expert, policy='static')\n"
        "    alloc[..., 0, :] = 0\n"
        "    return alloc\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        call(*FAST, "register=lossy_policy", "policies=[lossy]", f"out={tmp_path}")
    assert exit_.value.code != 0
    assert "lossy" in capsys.readouterr().err


def test_help_lists_the_keys(capsys):
    call("--help")
    out = capsys.readouterr().out
    assert "geometry:" in out and "workload:" in out and "python -m tools.simulate" in out


def test_the_module_runs():
    done = subprocess.run(
        [sys.executable, "-m", "tools.simulate", "geometry.R=3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2 and done.stderr.startswith("error: geometry.E=256 must be a multiple")


@pytest.mark.slow
def test_the_page_draws_its_charts_without_a_network(tmp_path):
    """Headless Chromium with every host unreachable (skipped where there is no Chromium)."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium")
    call(*SMALL, "steps=2", "layers=1", "policies=[static,bounded]", "plots=false", f"out={tmp_path}")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    offline = "--host-resolver-rules=MAP * ~NOTFOUND"
    page = subprocess.run(
        [browser, *flags, offline, "--dump-dom", (tmp_path / "report.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert page.stdout.count('class="main-svg"') >= 5  # every chart is drawn
