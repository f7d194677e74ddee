"""compare_char: the yardstick GPT against a plain computation, and a comparison that runs to the end."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from moonep.command import command
from tools.compare_char import CompareConfig, CompareData, K3Recipe, Recipe, run
from tools.plain_gpt import GPTShape, PlainGPT


def test_gpt_has_the_published_size_and_starts_at_the_uniform_loss():
    torch.manual_seed(0)
    model = PlainGPT(GPTShape(65))
    # nanoGPT prints 0.80 M for this setting: token and position embeddings, 4 x (12 d^2 + 2 d), one norm
    assert (
        sum(p.numel() for p in model.parameters()) == 65 * 128 + 64 * 128 + 4 * (12 * 128**2 + 2 * 128) + 128
    )
    tokens = torch.randint(0, 65, (4, 64))
    loss, count = model(tokens, targets=tokens.roll(-1, 1))
    assert count == 256 and (loss / count).item() == pytest.approx(4.174, abs=0.05)


def test_gpt_attends_to_the_past_only():
    torch.manual_seed(0)
    model = PlainGPT(GPTShape(11, context=8, layers=2, heads=2, width=16)).double()
    tokens = torch.randint(0, 11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 11

    def first_losses(ids, upto):
        targets = torch.full_like(ids, -100)
        targets[0, :upto] = tokens[0, :upto]
        return model(ids, targets=targets)[0].item()

    assert first_losses(tokens, 5) == first_losses(changed, 5)
    assert first_losses(tokens, 6) != first_losses(changed, 6)


def test_gpt_equals_attention_written_out():
    torch.manual_seed(0)
    model = PlainGPT(GPTShape(11, context=8, layers=1, heads=2, width=16)).double()
    tokens, targets = torch.randint(0, 11, (2, 8)), torch.randint(0, 11, (2, 8))
    x, (block,) = model.embedding(tokens) + model.positions.weight, model.blocks
    q, k, v = block.qkv(F.layer_norm(x, (16,))).view(2, 8, 3, 2, 8).unbind(2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / 8**0.5
    scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf).softmax(-1)
    x = x + torch.einsum("bhts,bshd->bthd", scores, v).reshape(2, 8, 16) @ block.attention_out.weight.T
    x = x + F.gelu(F.layer_norm(x, (16,)) @ block.mlp_in.weight.T) @ block.mlp_out.weight.T
    logits = F.layer_norm(x, (16,)) @ model.embedding.weight.T
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(model(tokens, targets=targets)[0], expected)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 30)
    return path


def test_comparison_counts_both_and_finds_the_target(text, tmp_path, capsys):
    small = {"num_layers": 2, "num_experts": 4}
    config = CompareConfig(
        data=CompareData(path=str(text)),
        context=16,
        target=2.6,
        gpt=Recipe(steps=20, batch=8, lr=3e-3, warmup_steps=3, evaluate_every=10),
        k3=K3Recipe(steps=10, batch=8, warmup_steps=3, evaluate_every=5, balancer="none", model=small),
        out=str(tmp_path / "out"),
    )
    summary = run(config)
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["target"] == 2.6
    assert (tmp_path / "out" / "compare.png").stat().st_size > 5000
    for name, steps, every in (("gpt", 20, 10), ("k3", 10, 5)):
        entry = summary["contestants"][name]
        curve = entry["curve"]
        assert [step for step, _, _ in curve] == list(range(every, steps + 1, every))
        seconds = [s for _, s, _ in curve]
        assert seconds == sorted(seconds) and seconds[0] > 0 and entry["cpu_s"] == seconds[-1]
        at = [point for point in curve if point[2] <= 2.6]
        assert entry["cpu_s_to_target"] == (at[0][1] if at else None)
        assert curve[-1][2] < curve[0][2] < 3.4
    assert "CPU s to target" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["only=rnn"], "only=rnn"),
        (["data.path=/nowhere"], "data.path=/nowhere"),
        (["k3.steps=0"], "k3.steps=0"),
        (["gpt.stepz=3"], "did you mean 'gpt.steps'"),
    ],
)
def test_wrong_input_is_one_line(words, named, capsys):
    with pytest.raises(SystemExit) as stop:
        command(run, "compare_char", CompareConfig, words)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and named in error and error.count("\n") == 1
