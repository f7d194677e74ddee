"""train.py as a user runs it: what a run leaves behind, resuming, signals, and wrong input in one line."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moonep.trainer.main import main

ROOT = Path(__file__).parents[2]
SMALL = [
    "model.num_layers=3",
    "model.hidden_size=32",
    "model.kda_num_heads=2",
    "model.kda_head_dim=16",
    "model.dense_ffn_size=64",
    "model.num_experts=8",
    "model.latent_size=16",
    "model.expert_ffn_size=32",
    "data.name=markov",
    "data.markov_tokens=20000",
    "train.context=32",
    "train.micro_batch=4",
    "train.tokens_per_step=512",
    "train.validate_tokens=512",
    "train.sample_tokens=8",
]
METRICS = [
    "step",
    "tokens",
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "mfu",
    "step_ms",
    "max_memory_gb",
    "moe",
]
MOE = ["maxvio", "dead_fraction", "rank_imbalance_before", "rank_imbalance_after", "moved_tokens", "copies"]


def _command(*words, ranks=1):
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launch, str(ROOT / "train.py"), *SMALL, *words]


def _train(*words, ranks=1, timeout=240):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        _command(*words, ranks=ranks), capture_output=True, text=True, timeout=timeout, env=environment
    )


def _lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.distributed
def test_a_run_leaves_everything_and_is_never_overwritten(tmp_path):
    words = ["train.steps=3", f"run.dir={tmp_path}/a", "routing.record=true", "parallel.ep=1"]
    done = _train(*words)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "a"
    for name in ("config.yaml", "metrics.jsonl", "loss.png", "sample.txt", "summary.json"):
        assert (folder / name).stat().st_size > 0, name
    assert (folder / "checkpoints" / "step_3").is_dir()
    assert list((folder / "trace").glob("*.npz"))
    lines = _lines(folder)
    training = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training] == [1, 2, 3]
    assert set(training[0]) == set(METRICS)
    assert len(training[0]["moe"]) == 2
    assert set(training[0]["moe"][0]) == set(MOE)
    assert training[0]["tokens"] == 512
    assert {"val_loss", "val_bits_per_byte"} <= set(lines[-1])
    vocabulary = 16
    assert training[0]["loss"] == pytest.approx(math.log(vocabulary), rel=0.02)
    assert "try next" in done.stdout

    again = _train(*words, "train.sample_tokens=0", "checkpoint.final=false")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "a-2" / "summary.json").exists()
    assert _lines(folder) == lines


@pytest.mark.distributed
@pytest.mark.slow
def test_resuming_equals_going_on_bitwise(tmp_path):
    """Two ranks, experts over both: 4 steps against 2 + 2; losses, norms and the final weights are equal."""
    common = ["parallel.ep=2", "train.tokens_per_step=512", "checkpoint.every=2", "train.steps=4"]
    whole = _train(*common, f"run.dir={tmp_path}/whole", ranks=2)
    assert whole.returncode == 0, whole.stderr
    half = tmp_path / "whole" / "checkpoints" / "step_2"
    rest = _train(*common, f"run.dir={tmp_path}/rest", f"checkpoint.resume={half}", ranks=2)
    assert rest.returncode == 0, rest.stderr
    keep = ("step", "loss", "grad_norm", "lr", "tokens")
    expected = [{k: line[k] for k in keep} for line in _lines(tmp_path / "whole") if "loss" in line]
    got = [{k: line[k] for k in keep} for line in _lines(tmp_path / "rest") if "loss" in line]
    assert got == expected[2:]
    for path in sorted((tmp_path / "whole" / "checkpoints" / "step_4").glob("*.safetensors")):
        assert path.read_bytes() == (tmp_path / "rest" / "checkpoints" / "step_4" / path.name).read_bytes()


@pytest.mark.distributed
def test_sigterm_saves_and_says_how_to_go_on(tmp_path):
    folder = tmp_path / "run"
    words = ["train.steps=100000", f"run.dir={folder}", "train.validate_every=0"]
    process = subprocess.Popen(
        _command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        deadline = time.monotonic() + 120
        while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        error = process.communicate(timeout=90)[1]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 128 + signal.SIGTERM
    assert f"run.dir={folder} checkpoint.resume=true" in error
    assert "Traceback" not in error
    saved = list((folder / "checkpoints").glob("step_*"))
    assert len(saved) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trian.steps=3"], "unknown key 'trian.steps'; did you mean 'train.steps'?"),
        (["model=tiny", "model.top_k=1"], "model.top_k=1 with model.renormalize=true"),
        (["model=tiny", "model.top_k=16"], "model.top_k=16 must be below model.num_experts=16"),
        (["parallel.ep=3"], "parallel.ep=3 does not divide the 1 ranks"),
        (["train.tokens_per_step=1001"], "train.tokens_per_step=1001 is not a multiple"),
        (["parallel.zero=3"], "parallel.zero=3 (ZeRO-3) is not supported"),
        (
            ["dry_run=true", "data.name=text", "data.path=/nonexistent"],
            "data.path=/nonexistent does not exist",
        ),
        (["dry_run=true", "data.name=markov", "data.markov_tokens=3000"], "lower train.tokens_per_step"),
        (["dry_run=true", "model.vocab_size=100"], "model.vocab_size=100 is below the corpus's vocabulary"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(words, says, capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert says in error


def test_other_ranks_stay_silent_about_what_all_find(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["trian.steps=3"]) == 2
    assert capsys.readouterr().err == ""


def test_dry_run_prints_the_equation_and_trains_nothing(tmp_path, capsys):
    folder = tmp_path / "never"
    words = ["dry_run=true", "data.name=markov", "parallel.ep=4", "train.tokens_per_step=8192"]
    assert main([*words, f"run.dir={folder}"]) == 0
    out = capsys.readouterr().out
    assert "8,192 tokens = 4 sequences x 256 tokens x 4 ranks x 2 accumulation" in out
    assert "active" in out and "shard" in out and "policy: bounded" in out
    assert not folder.exists()


@pytest.mark.distributed
def test_a_missing_corpus_is_one_line_on_two_ranks(tmp_path):
    done = _train("data.name=text", "data.path=/nonexistent", "data.markov_tokens=10", ranks=2)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "/nonexistent does not exist" in said[0]
