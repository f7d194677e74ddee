"""The whole model: sizes, initial loss, losses, packing, precision."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from model import K3Config, K3Model, ModelConfigError, parameter_groups
from model.presets import PRESETS
from tests.model.small import random_tokens, small_config, small_model


@pytest.mark.parametrize("mtp", [0, 1])
@pytest.mark.parametrize("name", PRESETS)
def test_meta_model_counts_what_the_formula_says(name, mtp):
    config = K3Config.preset(name, num_mtp_layers=mtp)
    with torch.device("meta"):
        model = K3Model(config)
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters()[0]
    sizes = config.parameter_sizes()
    for block in model.layers:
        mixer = sum(p.numel() for p in block.mixer.parameters())
        assert mixer == sizes["mla" if config.is_mla(block.layer) else "kda"]
        ffn = sum(p.numel() for p in block.ffn.parameters())
        moe = sizes["moe"] + config.num_experts * sizes["expert"]
        assert ffn == (moe if config.is_moe(block.layer) else sizes["dense"])


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}])
def test_first_loss_is_that_of_a_uniform_guess(changes):
    torch.manual_seed(0)
    model = K3Model(K3Config.preset("tiny", **changes))
    tokens = random_tokens(4, 128, vocab=256)
    loss, count = model(tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous())
    assert count == 4 * 127
    assert abs(loss.item() / count.item() / math.log(256) - 1) < 0.02


def test_every_parameter_learns():
    """Zero queries and the padding of A_log excepted at the first step, each parameter gets a gradient."""
    model = small_model(num_mtp_layers=1)
    tokens = random_tokens(4, 24)
    loss, _ = model(tokens, targets=tokens.roll(-1, 1))
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    for block in model.layers:
        if hasattr(block.mixer, "A_log"):
            assert torch.all(block.mixer.A_log.grad[3:] == 0)


def test_fresh_model_starts_with_zero_queries_and_unit_decay_rates():
    torch.manual_seed(0)
    model = K3Model(small_config())
    for name, parameter in model.named_parameters():
        if name.endswith(("query", "A_log")):
            assert torch.all(parameter == 0), name
    kda = model.layers[0].mixer
    dt = F.softplus(kda.dt_bias)
    assert dt.min() >= 1e-4 and dt.max() <= 0.1 + 1e-6
    assert sum(name.endswith("query") for name, _ in model.named_parameters()) == 2 * 5


def test_loss_is_the_cross_entropy_of_the_logits():
    model = small_model(dtype=torch.float64)
    tokens, targets = random_tokens(3, 17), random_tokens(3, 17, seed=4)
    targets[0, :5] = -100
    loss, count = model(tokens, targets=targets)
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    assert count == 3 * 17 - 5
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_future_tokens_do_not_matter():
    model = small_model(dtype=torch.float64)
    tokens = random_tokens(1, 40)
    changed = tokens.clone()
    changed[0, 25:] = (changed[0, 25:] + 7) % 50
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :25], after[:, :25], rtol=0, atol=1e-12)
    assert (before[:, 25:] - after[:, 25:]).abs().max() > 1e-3


@pytest.mark.parametrize("lengths", [(1, 5, 5, 16, 2), (7,), (3, 0, 8, 0)])
def test_packed_documents_equal_documents_alone(lengths):
    """1e-12: fp64 rounding of sums taken in another order."""
    model = small_model(dtype=torch.float64)
    tokens = random_tokens(1, sum(lengths))
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    packed = model(tokens, cu_seqlens)
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        if end > start:
            alone = model(tokens[:, start:end])
            torch.testing.assert_close(packed[:, start:end], alone, rtol=0, atol=1e-12)


def test_changing_one_document_leaves_the_others_alone():
    model = small_model()
    tokens = random_tokens(1, 30)
    cu_seqlens = torch.tensor([0, 9, 21, 30])
    before = model(tokens, cu_seqlens)
    changed = tokens.clone()
    changed[0, 9:21] = (changed[0, 9:21] + 11) % 50
    after = model(changed, cu_seqlens)
    # not to the bit: the grouped FFN multiplies other numbers of rows now, and matmuls round differently
    for others in (slice(0, 9), slice(21, 30)):
        torch.testing.assert_close(before[:, others], after[:, others], rtol=0, atol=1e-6)
    assert (before[:, 9:21] - after[:, 9:21]).abs().max() > 1e-3


def test_packed_loss_and_gradients_equal_the_batch():
    model = small_model(dtype=torch.float64)
    tokens, targets = random_tokens(3, 8), random_tokens(3, 8, seed=5)
    model(tokens, targets=targets)[0].backward()
    batch = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    cu_seqlens = torch.tensor([0, 8, 16, 24], dtype=torch.int32)
    model(tokens.view(1, -1), cu_seqlens, targets.view(1, -1))[0].backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, batch[name], rtol=1e-9, atol=1e-11, msg=name)


def test_activation_checkpointing_changes_nothing():
    tokens, targets = random_tokens(2, 16), random_tokens(2, 16, seed=6)
    results = []
    for checkpointing in (False, True):
        model = small_model(num_mtp_layers=1)
        model.activation_checkpointing = checkpointing
        calls = []
        for moe in model.moe_layers():
            moe.router.route_hook = lambda layer, scores, ids, calls=calls: calls.append(layer)
        loss, _ = model(tokens, targets=targets)
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        counts = [moe.router.last_counts_E for moe in model.moe_layers()]
        results.append((loss, gradients, counts, calls))
    (loss_a, gradients_a, counts_a, calls_a), (loss_b, gradients_b, counts_b, calls_b) = results
    assert torch.equal(loss_a, loss_b)
    assert all(torch.equal(a, b) for a, b in zip(gradients_a, gradients_b, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(counts_a, counts_b, strict=True))
    assert calls_a == calls_b == [1, 2, 3, 4, 5]  # each router chose once


def test_checkpointing_keeps_fewer_activations():
    def saved_elements(checkpointing: bool) -> int:
        model = small_model()
        model.activation_checkpointing = checkpointing
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        tokens = random_tokens(4, 64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(tokens, targets=tokens)
        return sum(kept.values())

    assert saved_elements(True) < 0.6 * saved_elements(False)


def test_same_seed_same_model_whatever_the_experts():
    """One draw a layer: parameters outside the experts do not depend on how experts are made."""

    class NoExperts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            from kernels.moe import draw_expert_seed

            draw_expert_seed()

    torch.manual_seed(5)
    local = K3Model(small_config()).state_dict()
    torch.manual_seed(5)
    other = K3Model(small_config(), experts=lambda config, layer: NoExperts()).state_dict()
    assert {name for name in local if ".experts." not in name} == set(other)
    assert all(torch.equal(local[name], tensor) for name, tensor in other.items())


def test_bfloat16_keeps_the_balancer_bias_in_fp32():
    model = small_model()
    bias = torch.tensor([0.1, 1e-4, -0.3, 0.30001, 0.2, 0.0])
    for moe in model.moe_layers():
        moe.router.balancer.bias.copy_(bias)
    model.bfloat16()
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    for moe in model.moe_layers():
        assert torch.equal(moe.router.balancer.bias, bias)
        assert moe.router.last_counts_E.dtype == torch.int64
    tokens = random_tokens(2, 32)
    loss, count = model(tokens, targets=tokens)
    loss.backward()
    assert loss.dtype == torch.float32 and model(tokens).dtype == torch.bfloat16
    reference, _ = small_model()(tokens, targets=tokens)
    assert abs(loss.item() / reference.item() - 1) < 0.05  # 8 bits of mantissa through five layers
    assert count == 64


def test_parameter_groups_cover_every_parameter_once():
    model = small_model(num_mtp_layers=1)
    decay, no_decay = parameter_groups(model, 0.1)
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)
    ids = [id(p) for group in (decay, no_decay) for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())
    assert "layers.1.ffn.experts.down_weight" in decay["names"] and "head.weight" in decay["names"]
    exempt = ("A_log", "dt_bias", "conv_weight", "query", "norm_weight", "embedding.weight")
    for name in decay["names"]:
        assert not name.endswith(exempt), name
    for name in (
        "embedding.weight",
        "layers.0.mixer.A_log",
        "layers.0.mixer.conv_weight",
        "output_norm.weight",
    ):
        assert name in no_decay["names"]


def test_sizes_off_16_bytes_are_refused():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3))

    with pytest.raises(ModelConfigError, match=r"ffn\.experts\.weight has 3 elements"):
        K3Model(small_config(), experts=lambda config, layer: Odd())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tokens": random_tokens(8)}, r"tokens must be \[B, T\]"),
        ({"tokens": random_tokens(2, 8), "cu_seqlens": torch.tensor([0, 8])}, "packed into one row"),
        ({"tokens": random_tokens(2, 8), "targets": random_tokens(2, 7)}, "targets must be"),
        ({"tokens": random_tokens(2, 8), "token_mask": torch.ones(8)}, "token_mask must be"),
    ],
)
def test_bad_shapes_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        small_model()(**arguments)


@pytest.mark.parametrize("block", [1, 2, 5])
def test_block_sums_start_near_the_variance_of_the_embedding(block):
    """So that the mean over sources keeps every one of them audible; within a factor of 4 in variance."""
    torch.manual_seed(0)
    model = K3Model(small_config(hidden_size=128, attention_residual_block_size=block))
    sums = []
    model.output_residual.register_forward_pre_hook(lambda module, inputs: sums.extend(inputs[0]))
    with torch.no_grad():
        model(random_tokens(2, 32))
    variances = torch.stack([source.var() for source in sums])
    assert len(sums) == -(-5 // block) + 1
    assert variances[0] == pytest.approx(1.0, abs=0.1)
    assert torch.all((variances > 0.25) & (variances < 4)), variances


def test_a_repeated_step_is_the_same_to_the_bit():
    def step() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model = small_model(num_mtp_layers=1)
        tokens = random_tokens(1, 40)
        loss, _ = model(tokens, torch.tensor([0, 13, 40]), tokens.roll(-1, 1))
        loss.backward()
        return loss, [p.grad for p in model.parameters()]

    (loss, gradients), (again, gradients_again) = step(), step()
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))


def test_splitting_the_batch_does_not_change_the_sums():
    """What gradient accumulation relies on: sums of losses and gradients add up over micro-batches."""
    tokens, targets = random_tokens(4, 12), random_tokens(4, 12, seed=8)
    targets[1, 3:] = -100
    whole = small_model(dtype=torch.float64, num_mtp_layers=1)
    whole(tokens, targets=targets)[0].backward()
    parts = small_model(dtype=torch.float64, num_mtp_layers=1)
    for rows in (slice(0, 1), slice(1, 3), slice(3, 4)):
        parts(tokens[rows], targets=targets[rows])[0].backward()
    for (name, a), b in zip(whole.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-11, msg=name)
