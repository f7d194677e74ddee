"""Published sizes, and one clear line for each bad value."""

from __future__ import annotations

import pytest

from model import K3Config, ModelConfigError
from model.presets import PRESETS


def test_k3_counts_are_the_published_ones():
    total, active = K3Config.preset("k3").num_parameters()
    assert round(total / 1e9, 1) == 2779.5
    assert round(active / 1e9, 1) == 104.2


def test_k3_mini_is_the_published_reproduction():
    total, active = K3Config.preset("k3-mini").num_parameters()
    assert round(total / 1e9, 2) == 1.02
    assert round(active / 1e6) == 145
    assert round((active - 163_840 * 512) / 1e6) == 61


@pytest.mark.parametrize(
    ("block", "millions"), [("kda", 443.74), ("mla", 232.20), ("moe", 189.93), ("expert", 33.03)]
)
def test_k3_layer_sizes(block, millions):
    assert round(K3Config.preset("k3").parameter_sizes()[block] / 1e6, 2) == millions


def test_k3_layout():
    config = K3Config.preset("k3")
    mla = [layer + 1 for layer in range(93) if config.is_mla(layer)]
    assert mla == [*range(4, 93, 4), 93]  # 1-based, as released: 92 and 93 are both MLA
    assert [layer for layer in range(93) if not config.is_moe(layer)] == [0]


def test_tiny_is_three_kda_and_one_mla():
    config = K3Config.preset("tiny")
    assert [config.is_mla(layer) for layer in range(config.num_layers)] == [False, False, False, True]
    assert config.num_experts == 16


@pytest.mark.parametrize("name", PRESETS)
def test_dict_round_trip(name):
    config = K3Config.preset(name)
    assert K3Config.from_dict(config.to_dict()) == config
    assert K3Config.preset(name, num_mtp_layers=1).moe_layers[-1] == config.num_layers


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 16}, ["model.top_k=16", "num_experts=16"]),
        ({"top_k": 1}, ["model.top_k=1", "renormalize=false"]),
        ({"hidden_size": 100}, ["model.hidden_size=100", "multiple of 8"]),
        ({"hidden_size": 0}, ["model.hidden_size=0"]),
        ({"num_layers": 0}, ["model.num_layers=0", "at least 1"]),
        ({"num_layers": 2.0}, ["model.num_layers=2.0", "int"]),
        ({"num_layers": True}, ["model.num_layers=True", "int"]),
        ({"tie_embeddings": 1}, ["model.tie_embeddings=1", "bool"]),
        ({"gate_lower_bound": -6.0}, ["model.gate_lower_bound=-6.0", "[-5, 0)"]),
        ({"num_mtp_layers": 2}, ["model.num_mtp_layers=2", "0 or 1"]),
        ({"num_dense_layers": 5}, ["model.num_dense_layers=5", "num_layers=4"]),
        ({"rms_norm_eps": 0.0}, ["model.rms_norm_eps=0.0", "positive"]),
        ({"hiden_size": 128}, ["model.hiden_size", "hidden_size"]),
    ],
)
def test_bad_values_name_the_key(changes, words):
    with pytest.raises(ModelConfigError) as error:
        K3Config.preset("tiny", **changes)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_one_expert_a_token_is_allowed_where_its_weight_is_the_score():
    assert K3Config.preset("tiny", top_k=1, renormalize=False).top_k == 1


def test_unknown_preset_and_missing_field():
    with pytest.raises(ModelConfigError, match="did you mean 'nano'"):
        K3Config.preset("nanno")
    values = K3Config.preset("tiny").to_dict()
    del values["top_k"]
    with pytest.raises(ModelConfigError, match=r"model\.top_k has no value"):
        K3Config.from_dict(values)
