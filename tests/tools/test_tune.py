"""python -m tools.tune: the search, the Pareto front, the tuned file train.py takes, measured runs, wrong
input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moonep.command import command
from moonep.simulate.config import TuneConfig, load_model
from moonep.simulate.hardware import load_profile
from moonep.simulate.measuring import child_command, overrides, read_speed, training_keys
from moonep.simulate.tuning import pareto, tune
from moonep.trainer.compose import compose
from moonep.trainer.config import Config
from tools.tune import run

SMALL = ["model=nano", "devices=4", "plans=2", "layers=1", "train.context=256", "train.tokens_per_step=8192"]


def call(*words):
    command(run, "tune", TuneConfig, [str(word) for word in words])


def refused(capsys, *words, code=2):
    with pytest.raises(SystemExit) as exit_:
        call(*words)
    assert exit_.value.code == code
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "\n" not in error
    return error


def config(**changes):
    base = TuneConfig(model="nano", devices=4, plans=2, layers=1, cluster=load_profile("h200"))
    base.train.context, base.train.tokens_per_step = 256, 8192
    for key, value in changes.items():
        setattr(base, key, value)
    return base


def test_files_and_the_tuned_experiment(tmp_path, capsys):
    call(*SMALL, "workload=hot_rank", f"out={tmp_path}")
    out = capsys.readouterr().out
    assert "Pareto front" in out and "Why the others lost" in out and "Confidence" in out
    found = json.loads((tmp_path / "summary.json").read_text())
    best = found["best"]
    composed, _ = compose("train", Config, ["--config-dir", str(tmp_path), "experiment=tuned"])
    assert composed.model.preset == "nano" and composed.precision.name == "bf16"
    assert (composed.parallel.ep, composed.parallel.zero) == (best["ep"], best["zero"])
    assert (composed.routing.policy, composed.routing.tau) == (best["policy"], best["tau"])
    assert composed.train.micro_batch == best["micro_batch"] and composed.train.tokens_per_step == 8192
    assert composed.train.activation_checkpointing == best["recompute"]
    assert best["micro_batch"] * 256 * 4 * best["accumulation"] == 8192
    assert {row["value"].split("=")[0] for row in found["rejected"]} >= {"ep", "micro_batch"}
    page = (tmp_path / "report.html").read_text()
    assert "Speed against memory" in page and "plotly.js v" in page
    assert (tmp_path / "pareto.png").exists()


def test_the_front_is_a_front():
    result = tune(config())
    front = pareto(result.feasible)
    assert result.best.tokens_per_s == front[0].tokens_per_s == max(c.tokens_per_s for c in result.feasible)
    for a in front:
        assert not any(
            b.tokens_per_s > a.tokens_per_s and b.gigabytes < a.gigabytes and b.imbalance < a.imbalance
            for b in result.feasible
        )
    assert min(c.gigabytes for c in front) == min(c.gigabytes for c in result.feasible)


def test_a_memory_limit_moves_the_choice():
    free = tune(config())
    tight = tune(config(memory_limit_gb=0.8 * free.best.gigabytes))
    assert tight.best.gigabytes <= 0.8 * free.best.gigabytes
    assert tight.best.tokens_per_s <= free.best.tokens_per_s
    assert any("GB" in c.problem for c in tight.candidates if c.problem)


def test_skew_makes_balancing_pay():
    """On a link-rich node with one rank four times as loaded, a balanced plan must beat static at the same
    EP."""
    skewed = config(ep=[4], policies=["static", "bounded"], taus=[1.0])
    skewed.workload.name, skewed.workload.ratio = "hot_rank", 3.5
    skewed.train.context, skewed.train.tokens_per_step = 4096, 262_144
    result = tune(skewed)
    speed = {c.choice.policy: c.tokens_per_s for c in reversed(result.feasible)}
    assert speed["bounded"] > speed["static"]


def test_optuna_finds_what_exhaustion_finds():
    """Seeded; half the space in trials: within 2 % of the optimum, and the same twice."""
    whole = tune(config(search="exhaustive"))
    part = tune(config(search="optuna", trials=80))
    assert part.best.tokens_per_s >= 0.98 * whole.best.tokens_per_s
    assert tune(config(search="optuna", trials=80)).best == part.best


def test_a_trace_is_dealt_to_any_number_of_ranks(tmp_path):
    import numpy as np

    from moonep.simulate.traces import make_trace, save_trace

    counts = np.random.default_rng(0).multinomial(400, np.full(64, 1 / 64), size=(2, 3, 2))
    path = save_trace(tmp_path / "t.npz", make_trace(counts, top_k=4, source="t"))
    result = tune(config(trace=str(path)))
    assert {c.choice.ep for c in result.feasible} == {1, 2, 4}
    assert result.routing.startswith("trace")


def test_keys_and_child_command(tmp_path):
    result = tune(config(slots=[2]))
    candidate = next(c for c in result.feasible if c.choice.slots == 2)
    keys = training_keys(result, candidate)
    assert keys["routing"]["slots"] == 2 and keys["routing"]["max_imbalance"] > 1
    assert "routing.slots=2" in overrides(keys)
    command_ = child_command(result, candidate, tmp_path)
    assert "--nproc_per_node=4" in command_ and "routing.force=lognormal" in command_
    words = [word for word in command_ if "=" in word and not word.startswith("-")]
    composed, _ = compose("train", Config, words)
    assert composed.train.steps == 12 and composed.routing.force == "lognormal"


def test_speed_is_read_from_the_later_steps(tmp_path):
    lines = [{"step": i, "tokens_per_s": v} for i, v in enumerate([1.0, 2.0, 30.0, 40.0, 50.0])]
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join(json.dumps(line) for line in lines) + '\n{"val_loss": 3}\n'
    )
    assert read_speed(tmp_path) == 40.0
    assert read_speed(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train.tokens_per_step=1000"],
            "train.tokens_per_step=1000 must be a multiple of train.context x devices",
        ),
        (["ep=[3]"], "ep=3 must divide devices=4"),
        (["policies=[ultraep]"], "lives in the simulator only"),
        (["policies=[nothing]"], "'nothing' is unknown"),
        (["search=random"], "search=random: allowed"),
        (["devices=0"], "devices=0"),
        (["train.micro_batch=5"], "train.micro_batch=5 must divide"),
        (["payloads=[int2]"], "int2"),
    ],
)
def test_wrong_input_is_one_line_with_the_key(tmp_path, capsys, words, message):
    assert message in refused(capsys, *SMALL, *words, f"out={tmp_path}")


def test_nothing_fits_says_what_the_leanest_needs(tmp_path, capsys):
    error = refused(capsys, *SMALL, "memory_limit_gb=0.01", f"out={tmp_path}", code=1)
    assert "the leanest" in error and "GB of 0.0 GB" in error


@pytest.mark.slow
@pytest.mark.distributed
def test_measured_candidates_are_run_and_ranked(tmp_path, capsys):
    """Two CPU ranks train for real; the tuned file is the faster of the two measured."""
    pytest.importorskip("deepspeed")
    root = Path(__file__).resolve().parents[2]
    if not (root / "train.py").exists():
        pytest.skip("no train.py")
    words = [
        "model=tiny",
        "cluster=cpu",
        "devices=2",
        "precision=fp32",
        "train.context=64",
        "train.tokens_per_step=512",
    ]
    call(
        *words,
        "zero=[1]",
        "plans=1",
        "layers=1",
        "measure=2",
        "measure_steps=4",
        "report=false",
        f"out={tmp_path}",
    )
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["failures"] == [] and len(found["measured"]) == 2
    speeds = [row["measured_tokens_per_s"] for row in found["measured"]]
    assert found["best"]["measured_tokens_per_s"] == max(speeds) > 0
    assert "2 candidates measured" in found["confidence"]


def test_presets_load():
    assert load_model("nano") is not None and load_model(None) is None
