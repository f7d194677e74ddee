"""The operator table against the model's parameter counts and known figures of K3; training's memory against
autograd."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from model import K3Config, K3Model
from moonep import MoonEPExperts
from moonep.errors import ConfigError
from moonep.simulate.hardware import load_profile
from moonep.simulate.operators import (
    Workpoint,
    decode_bytes,
    launches,
    operator_table,
    time_operators,
    totals,
)
from moonep.simulate.splits import fitting_splits, smallest_cluster
from moonep.simulate.training import TrainingSetup, flops_per_token, rank_parameters, training_memory

K3 = K3Config.preset("k3")


def test_decode_reads_the_active_parameters_once():
    """One token at context 1: weights read = active parameters (104.19 B), FLOPs = 2 a weight. The router
    counts twice as many bytes (fp32), norms' and gates' vectors aside."""
    _, active = K3.num_parameters()
    at = Workpoint("decode", 1, 1, "bf16")
    found = totals(operator_table(K3, at))
    router = 92 * 7168 * 896
    assert found["weight_bytes"] / 2 == pytest.approx(active + router, rel=2e-3)
    assert found["flops"] == pytest.approx(2 * active, rel=0.01)


def test_states_and_cache_are_k3s():
    """434 MB of fp32 KDA states a sequence, read and written; 27.6 KB of MLA cache a token."""
    moved = decode_bytes(K3, Workpoint("decode", 1, 1_000_000, "bf16"))
    assert moved["kda_state"] / 2 == pytest.approx(434e6, rel=0.001)
    assert moved["mla_cache"] / 1_000_000 == pytest.approx(27_648)


def test_counts_of_layers_and_sites():
    table = {f"{o.family} {o.name}": o for o in operator_table(K3, Workpoint("decode", 1, 4096, "bf16"))}
    assert table["KDA KDA state update"].count == 69
    assert table["MLA attention over the latent cache"].count == 24
    assert table["MoE routed experts: down"].count == 92
    assert table["residual Attention Residuals"].count == 186
    assert table["KDA q, k, v projections"].shape == "[1, 7168] x [7168, 36864]"


def test_residual_sources_by_walking_the_stream():
    """Snapshots grow by one every 12 layers (before the FFN of layers 0, 12, ...); the running sum is one
    more source."""
    total = sites = snapshots = 0
    for layer in range(93):
        if layer:
            total, sites = total + snapshots + 1, sites + 1
        if layer % 12 == 0:
            snapshots += 1
        total, sites = total + snapshots + 1, sites + 1
    total, sites = total + snapshots + 1, sites + 1
    assert (snapshots, sites) == (8, 186)
    from moonep.simulate.operators import _Builder

    assert _Builder(K3, Workpoint()).residual_sources() == pytest.approx(total / sites)


def test_prefill_flops_follow_parameters_and_pairs():
    """Without the head (last token only): 2 x (active - head) a token, plus attention pairs and KDA
    chunks."""
    context = 4096
    table = operator_table(K3, Workpoint("prefill", 1, context, "bf16"))
    _, active = K3.num_parameters()
    head = 163_840 * 7168
    mixers = sum(o.flops * o.count for o in table if o.kind in ("attention", "state update"))
    products = sum(o.flops * o.count for o in table if "GEMM" in o.kind)
    assert products == pytest.approx(2 * context * (active - head), rel=0.01)
    assert mixers == pytest.approx(flops_per_token(K3, context)["mixers"] / 3 * context)


def test_experts_touched_saturate():
    few = operator_table(K3, Workpoint("decode", 1, 1, "bf16"))
    many = operator_table(K3, Workpoint("decode", 4096, 1, "bf16"))
    weight = {len(t): sum(o.weight_bytes * o.count for o in t if o.kind == "grouped GEMM") for t in (few,)}
    one = next(iter(weight.values()))
    assert one == pytest.approx(92 * 16 * 3 * 3584 * 3072 * 2)
    everything = sum(o.weight_bytes * o.count for o in many if o.kind == "grouped GEMM")
    assert everything == pytest.approx(92 * 896 * 3 * 3584 * 3072 * 2, rel=1e-6)


def test_fp4_weights_and_fusion_help():
    h200 = load_profile("h200")
    wide = operator_table(K3, Workpoint("decode", 1, 4096, "bf16"))
    narrow = operator_table(K3, Workpoint("decode", 1, 4096, "mxfp4"))
    assert totals(narrow)["weight_bytes"] < 0.7 * totals(wide)["weight_bytes"]
    assert launches(wide, fused=True) < 0.3 * launches(wide, fused=False)

    def seconds(fused):
        return sum(t.seconds for t in time_operators(wide, h200, fused=fused))

    assert seconds(True) < seconds(False)


def test_bad_workpoints_name_the_key():
    for changes, message in (
        ({"phase": "train"}, "phase=train"),
        ({"batch": 0}, "batch=0"),
        ({"precision": "int8"}, "int8"),
    ):
        with pytest.raises(ConfigError, match=message):
            Workpoint(**changes)


ODD = {
    "hidden_size": 136,
    "kda_num_heads": 3,
    "kda_head_dim": 40,
    "mla_num_heads": 5,
    "q_lora_rank": 56,
    "qk_nope_head_dim": 24,
    "v_head_dim": 16,
    "dense_ffn_size": 200,
    "top_k": 3,
    "num_shared_experts": 2,
    "latent_size": 72,
    "expert_ffn_size": 88,
}


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("tiny", {}),
        ("tiny", ODD),
        ("nano", {"num_layers": 5}),
        ("k3-mini", {"num_layers": 5, "vocab_size": 2048, "num_experts": 64}),
    ],
)
def test_activations_match_what_autograd_keeps(preset, changes):
    """Saved bytes of a real forward (each storage once, parameters aside) within 10 % of the formula."""
    config = K3Config.preset(preset, **changes)
    torch.manual_seed(0)
    model = K3Model(
        config,
        lambda c, layer: MoonEPExperts(
            c.num_experts, c.latent_size, c.expert_ffn_size, c.top_k, capacity=256
        ),
    )
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: list[torch.Tensor] = []
    saved = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        kept.append(tensor)
        return tensor

    tokens = torch.randint(0, config.vocab_size, (2, 128))
    with saved_tensors_hooks(pack, lambda t: t):
        model(tokens, targets=tokens)
    setup = TrainingSetup(devices=1, ep=1, micro_batch=2, context=128, precision="fp32", token_padding=1)
    memory = training_memory(config, setup, "cpu")
    assert memory.activations == pytest.approx(sum(saved.values()), rel=0.1)


@pytest.mark.parametrize("preset", ["tiny", "nano", "k3-mini", "k3"])
def test_parameters_of_ranks_add_up(preset):
    config = K3Config.preset(preset)
    total, _ = config.num_parameters()
    dense, experts = rank_parameters(config, TrainingSetup(devices=8, ep=8))
    assert dense + 8 * experts == pytest.approx(total, rel=1e-9)


def test_zero_stages_shard_what_they_say():
    config = K3Config.preset("k3-mini")
    one, two = (training_memory(config, TrainingSetup(devices=8, ep=4, zero=z)) for z in (1, 2))
    alone = training_memory(config, TrainingSetup(devices=4, ep=4, zero=1))
    dense, experts = rank_parameters(config, TrainingSetup(devices=8, ep=4))
    assert one.optimizer == pytest.approx(12 * (dense / 8 + experts / 2))
    assert one.gradients == pytest.approx(4 * (dense + experts))
    assert two.gradients == pytest.approx(4 * (dense / 8 + experts / 2))
    assert alone.optimizer > one.optimizer


def test_recomputation_trades_memory_for_time():
    config, h200 = K3Config.preset("k3-mini"), load_profile("h200")
    base = TrainingSetup(devices=8, ep=8, micro_batch=8, context=4096)
    splits = fitting_splits(config, base, h200, 8, 262_144)
    plain = next(
        s for s in splits if not s.setup.recompute and s.setup.cp == s.setup.pp == 1 and s.setup.ep == 8
    )
    again = next(s for s in splits if s.setup.recompute and s.setup.cp == s.setup.pp == 1 and s.setup.ep == 8)
    assert again.memory.total < 0.6 * plain.memory.total and again.time.total > 1.1 * plain.time.total


@pytest.mark.slow
def test_k3_needs_hundreds_of_devices():
    """2.78 T parameters at 14 bytes (bf16 weights, fp32 master and moments) are 38.9 TB: at least 284
    H200."""
    found = smallest_cluster(K3, TrainingSetup(), load_profile("h200"), 4_194_304)
    devices = found[0].setup.devices
    assert 284 <= devices <= 640
    assert all(s.memory.total <= load_profile("h200").usable_gb * 1e9 for s in found)
    fewer = fitting_splits(K3, TrainingSetup(), load_profile("h200"), 256, 4_194_304)
    assert fewer == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ep": 3}, r"parallel\.ep=3"),
        ({"devices": 12, "pp": 5}, "devices=12"),
        ({"zero": 3}, r"parallel\.zero=3"),
        ({"precision": "fp8"}, "precision=fp8"),
        ({"devices": 14, "ep": 14}, "must divide the model's 256 experts"),
    ],
)
def test_bad_setups_name_the_key(changes, message):
    with pytest.raises(ConfigError, match=message):
        TrainingSetup(**changes).validate(K3Config.preset("k3-mini"))
