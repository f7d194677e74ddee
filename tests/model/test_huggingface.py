"""The released names and layouts, both ways, and the released formulas computed independently."""

from __future__ import annotations

import json

import pytest
import torch

from model import K3Config, K3Model, ModelConfigError
from model.huggingface import (
    config_from_released,
    config_to_released,
    entries,
    from_released,
    load_pretrained,
    save_pretrained,
    to_released,
)
from model.presets import PRESETS
from tests.model.released import released_logits
from tests.model.small import random_tokens, small_config, small_model


def _biased(model: K3Model) -> K3Model:
    for moe in model.moe_layers():
        bias = torch.linspace(-0.3, 0.3, model.config.num_experts)
        moe.router.balancer.bias.copy_(bias)
    return model


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True, "attention_residual_block_size": 1}])
def test_model_equals_an_independent_forward_over_released_tensors(changes):
    """1e-12: two fp64 computations of the same formulas in another order."""
    model = _biased(small_model(dtype=torch.float64, **changes)).eval()
    tokens = random_tokens(21)
    tensors = {name: tensor.double() for name, tensor in to_released(model.state_dict(), model.config)}
    expected = released_logits(tensors, config_to_released(model.config), tokens)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens.unsqueeze(0))[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_config_round_trip(name):
    config = K3Config.preset(name)
    released = json.loads(json.dumps(config_to_released(config)))
    assert config_from_released(released) == config
    assert config_from_released({"text_config": released, "vision_config": {}}) == config


def test_k3_config_says_what_the_release_says():
    released = config_to_released(K3Config.preset("k3"))
    kda = released["linear_attn_config"]
    assert (len(kda["kda_layers"]), len(kda["full_attn_layers"])) == (69, 24)
    assert kda["full_attn_layers"][-3:] == [88, 92, 93]
    assert (kda["head_dim"], kda["num_heads"], kda["gate_lower_bound"]) == (128, 96, -5.0)
    assert (released["attn_res_block_size"], released["intermediate_size"]) == (12, 33792)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mla_use_nope": False}, "mla_use_nope=False"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax'"),
        ({"num_experts": None}, "num_experts"),
    ],
)
def test_other_architectures_are_refused(change, words):
    released = config_to_released(small_config())
    released.update(change)
    if change.get("num_experts", 0) is None:
        del released["num_experts"]
    with pytest.raises(ModelConfigError, match=words):
        config_from_released(released)


def test_irregular_layer_patterns_are_refused():
    released = config_to_released(small_config())
    released["linear_attn_config"]["full_attn_layers"] = [2, 3, 5]
    with pytest.raises(ModelConfigError, match=r"MLA in layers \[2, 3, 5\]"):
        config_from_released(released)


def test_every_tensor_is_mapped_and_shaped_as_released():
    model = small_model()
    mapped = [entry.ours for entry in entries(model.config)]
    assert sorted(mapped) == sorted(model.state_dict())
    tensors = dict(to_released(model.state_dict(), model.config))
    assert tensors["model.layers.0.self_attn.A_log"].shape == (128,)
    assert torch.all(tensors["model.layers.0.self_attn.A_log"][3:] == 0)
    assert tensors["model.layers.0.self_attn.q_conv1d.weight"].shape == (24, 1, 4)
    assert tensors["model.layers.3.mlp_res_proj.weight"].shape == (1, 32)
    assert tensors["model.layers.1.block_sparse_moe.experts.5.w2.weight"].shape == (16, 24)
    assert tensors["model.layers.0.mlp.gate_proj.weight"].shape == (40, 32)


@pytest.mark.parametrize("shard_bytes", [5 << 30, 20_000])
def test_save_and_load_give_identical_logits(tmp_path, shard_bytes):
    model = _biased(small_model()).eval()
    written = save_pretrained(model, tmp_path / "export", max_shard_bytes=shard_bytes)
    assert all(path.exists() for path in written)
    assert (len(written) > 3) == (shard_bytes < 1 << 30)
    loaded = load_pretrained(tmp_path / "export").eval()
    tokens = random_tokens(2, 9)
    assert torch.equal(loaded(tokens), model(tokens))


def test_wrapped_names_load_and_missing_or_packed_tensors_are_named(tmp_path):
    from safetensors.torch import load_file, save_file

    model = small_model()
    save_pretrained(model, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({f"language_model.{name}": tensor for name, tensor in tensors.items()}, path)
    tokens = random_tokens(1, 9)
    assert torch.equal(load_pretrained(tmp_path).eval()(tokens), model.eval()(tokens))
    expert = "model.layers.2.block_sparse_moe.experts.3.w1.weight"
    packed = dict(tensors)
    packed[expert + "_packed"] = packed.pop(expert)
    save_file(packed, path)
    with pytest.raises(ValueError, match=f"{expert} is stored in MXFP4"):
        load_pretrained(tmp_path)
    del packed[expert + "_packed"]
    save_file(packed, path)
    with pytest.raises(ValueError, match=f"{expert} is missing"):
        load_pretrained(tmp_path)


def test_a_rank_reads_only_its_own_experts():
    model = small_model()
    tensors = dict(to_released(model.state_dict(), model.config))
    asked = []

    def read(name: str) -> torch.Tensor:
        asked.append(name)
        return tensors[name]

    part = dict(from_released(read, model.config, range(2, 4)))
    full = model.state_dict()
    name = "layers.1.ffn.experts.up_weight"
    assert torch.equal(part[name], full[name][2:4])
    assert {n.split("experts.")[1].split(".")[0] for n in asked if ".experts." in n} == {"2", "3"}
