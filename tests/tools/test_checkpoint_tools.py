"""generate, evaluate and export from a checkpoint: what they compute, and one line for each wrong input."""

from __future__ import annotations

import json
import math

import pytest
import torch

from model import K3Model
from model.huggingface import load_pretrained
from moonep.command import command
from moonep.errors import CheckpointError
from moonep.trainer.checkpoint_model import load_model
from moonep.trainer.data import DataConfig, build_corpus
from tools.evaluate import EvaluateConfig, EvaluateData
from tools.evaluate import run as evaluate
from tools.export import ExportConfig
from tools.export import run as export
from tools.generate import GenerateConfig
from tools.generate import main as generate_main
from tools.generate import run as generate

TOOLS = {
    "generate": (generate, GenerateConfig),
    "evaluate": (evaluate, EvaluateConfig),
    "export": (export, ExportConfig),
}


def main(name: str, *words: str) -> int:
    """The command line's exit code."""
    run, schema = TOOLS[name]
    try:
        command(run, name, schema, words)
    except SystemExit as stop:
        return stop.code
    return 0


def test_load_model_restores_weights_and_routing_biases(run_folder):
    expected = torch.load(run_folder / "expected.pt")
    loaded = load_model(run_folder)
    assert loaded.path == run_folder / "checkpoints" / "step_3" and not loaded.model.training
    state = loaded.model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_bf16_keeps_routing_biases_exact(run_folder):
    expected = torch.load(run_folder / "expected.pt")
    state = load_model(run_folder, dtype=torch.bfloat16).model.state_dict()
    biases = [name for name in state if name.endswith("balancer.bias")]
    assert biases and all(torch.equal(state[name], expected[name]) for name in biases)
    assert state["embedding.weight"].dtype == torch.bfloat16


def test_generate_is_repeatable_and_continues_the_prompt(run_folder, tmp_path, capsys):
    config = GenerateConfig(
        checkpoint=str(run_folder), prompt="def ", tokens=12, samples=2, out=str(tmp_path)
    )
    first, again = generate(config), generate(config)
    assert first == again and first[0] != first[1]
    assert all(text.startswith("def ") and len(text) > 4 for text in first)
    assert (tmp_path / "sample.txt").read_text().startswith(first[0])
    assert first[0] in capsys.readouterr().out


def test_generate_from_nothing_begins_a_document(run_folder):
    assert len(generate(GenerateConfig(checkpoint=str(run_folder), tokens=3, temperature=0))) == 1


@pytest.mark.parametrize("prompt", ["def f(x, y=[1]): ", "a: ${b} 'c' \"", "x = {1: 2}\n\t"])
def test_a_prompt_is_taken_as_it_stands(run_folder, capsys, prompt):
    generate_main([f"checkpoint={run_folder}", f"prompt={prompt}", "tokens=2"])
    assert f"seed 1\n{prompt}" in capsys.readouterr().out


def test_evaluate_equals_a_plain_computation(run_folder, corpus_folder, tmp_path):
    config = EvaluateConfig(checkpoint=str(run_folder), context=64, batch_tokens=200, out=str(tmp_path))
    summary = evaluate(config)
    corpus = build_corpus(DataConfig(path=str(corpus_folder), validation_fraction=0.4))
    split, model = corpus.split("val"), load_model(run_folder).model
    total = count = 0.0
    for start in range(0, len(split) - 1, 64):
        window = torch.from_numpy(split.window(start, 65))
        borders = set((split.starts_within(start + 1, start + 65) - start).tolist())
        first = 0
        for end in sorted(borders | {len(window) - 1}):
            piece = window[first : end + 1]
            if end in borders:
                piece = piece[:-1]
            with torch.no_grad():
                logits = model(window[None, first : first + len(piece) - (end not in borders)])
            n = len(piece) - 1
            losses = torch.nn.functional.cross_entropy(logits[0, :n], piece[1:], reduction="sum")
            total, count, first = total + float(losses), count + n, end
    assert summary["tokens"] == count
    # fp32 sums of about a thousand losses near 5, added in another order
    assert summary["loss"] == pytest.approx(total / count, rel=1e-5)
    assert summary["bits_per_byte"] == pytest.approx(total / math.log(2) / split.text_bytes, rel=1e-5)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["loss"] == summary["loss"] and written["step"] == 3


def test_evaluate_reads_another_text_with_the_runs_tokenizer(run_folder, tmp_path):
    (tmp_path / "other.txt").write_text("quite another text, " * 100)
    data = EvaluateData(path=str(tmp_path / "other.txt"), validation_fraction=0.5)
    summary = evaluate(EvaluateConfig(checkpoint=str(run_folder), data=data, max_tokens=128))
    assert summary["tokens"] == 128 and "other.txt" in summary["corpus"]


def test_export_loads_as_the_same_model(run_folder, tmp_path):
    files = export(ExportConfig(checkpoint=str(run_folder), out=str(tmp_path / "hf"), dtype="fp32"))
    assert {"config.json", "model.safetensors", "moonep_tokenizer.json"} == {path.name for path in files}
    exported, ours = load_pretrained(tmp_path / "hf").eval(), load_model(run_folder).model
    tokens = torch.randint(0, 257, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(exported(tokens), ours(tokens))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["generate"], "checkpoint= is not set"),
        (["generate", "checkpoint=/nowhere"], "/nowhere does not exist"),
        (["generate", "checkpoint=RUN", "tokens=0"], "tokens=0"),
        (["generate", "checkpoint=RUN", "top_k=0"], "top_k=0"),
        (["generate", "checkpoint=RUN", "temprature=1"], "did you mean 'temperature'"),
        (["generate", "checkpoint=RUN", "device=tpu"], "device=tpu"),
        (["generate", "checkpoint=RUN", "dtype=fp8"], "dtype=fp8"),
        (["evaluate", "checkpoint=RUN", "split=test"], "split=test"),
        (["evaluate", "checkpoint=RUN", "data.path=/nowhere"], "data.path=/nowhere"),
        (["evaluate", "checkpoint=RUN", "context=-1"], "context=-1"),
        (["export", "checkpoint=RUN"], "out= is not set"),
        (["export", "checkpoint=RUN", "out=RUN"], "is not an empty folder"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(run_folder, capsys, words, named):
    name, *rest = [word.replace("RUN", str(run_folder)) for word in words]
    assert main(name, *rest) == 2
    error = capsys.readouterr().err
    assert named in error and error.startswith("error: ") and error.count("\n") == 1


def test_damaged_checkpoint_is_one_line(run_folder, tmp_path, capsys):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run_folder / "checkpoints" / "step_3", copy)
    file = next(copy.glob("weights_*"))
    file.write_bytes(file.read_bytes()[:-1])
    assert main("generate", f"checkpoint={copy}") == 2
    assert f"{file} is truncated" in capsys.readouterr().err


def test_help_lists_the_keys(capsys):
    for name in TOOLS:
        assert main(name, "--help") == 0
        assert "checkpoint: null" in capsys.readouterr().out


def test_weights_of_another_model_version_are_named(run_folder, monkeypatch):
    renamed = {"renamed.weight": torch.zeros(8)}.items()
    monkeypatch.setattr(K3Model, "named_parameters", lambda self: renamed)
    with pytest.raises(CheckpointError, match=r"no parameter renamed\.weight"):
        load_model(run_folder)
