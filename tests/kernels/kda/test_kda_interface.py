"""`chunk_kda` and `fused_recurrent_kda` take what fla-core 0.6.0's take, in its order, and refuse the
rest by name.
"""

from __future__ import annotations

import inspect

import pytest
import torch

from kernels.kda import chunk_kda, fused_recurrent_kda

# Facts of fla-core 0.6.0: names, order and defaults of the positional parameters.
CHUNK = {
    "q": None, "k": None, "v": None, "g": None, "beta": None,
    "scale": None, "initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": False,
    "use_gate_in_kernel": False, "use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False,
    "safe_gate": False, "lower_bound": None, "disable_recompute": False, "return_intermediate_states": False,
    "state_v_first": False, "cu_seqlens": None, "cu_seqlens_cpu": None, "cp_context": None,
    "use_graph": False, "max_num_seqs": None,
}  # fmt: skip
RECURRENT = {
    "q": None, "k": None, "v": None, "g": None, "beta": None, "A_log": None, "dt_bias": None,
    "scale": None, "initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": False,
    "use_gate_in_kernel": False, "use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False,
    "lower_bound": None, "state_v_first": False, "cu_seqlens": None,
}  # fmt: skip


def tensors(batch=1, tokens=6, heads=2, value_heads=2, key=4, value=4):
    return {
        "q": torch.randn(batch, tokens, heads, key),
        "k": torch.randn(batch, tokens, heads, key),
        "v": torch.randn(batch, tokens, value_heads, value),
        "g": -torch.rand(batch, tokens, value_heads, key),
        "beta": torch.rand(batch, tokens, value_heads),
    }


@pytest.mark.parametrize("function, wanted", [(chunk_kda, CHUNK), (fused_recurrent_kda, RECURRENT)])
def test_signature(function, wanted):
    positional = [
        p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert [p.name for p in positional] == list(wanted)
    required = ("q", "k", "v", "g", "beta")
    for p in positional:
        assert p.default is p.empty if p.name in required else p.default == wanted[p.name]


@pytest.mark.parametrize(
    "function, arguments",
    [
        (chunk_kda, {"return_intermediate_states": True}),
        (chunk_kda, {"cp_context": object()}),
        (chunk_kda, {"head_first": True}),
        (fused_recurrent_kda, {"ssm_state_indices": torch.zeros(1)}),
    ],
)
def test_unsupported_arguments_are_named(function, arguments):
    with pytest.raises(NotImplementedError, match=next(iter(arguments))):
        function(**tensors(), **arguments)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"k": torch.zeros(1, 6, 2, 5)}, "q and k"),
        ({"v": torch.zeros(1, 6, 3, 4)}, "multiple of H=2"),
        ({"g": torch.zeros(1, 6, 2, 3)}, "g must have"),
        ({"beta": torch.zeros(1, 6, 1)}, "beta must have"),
        ({"initial_state": torch.zeros(2, 2, 4, 4)}, "initial_state"),
        ({"use_gate_in_kernel": True}, "A_log"),
        ({"use_gate_in_kernel": True, "A_log": torch.zeros(3)}, "A_log must have HV=2"),
        ({"use_gate_in_kernel": True, "lower_bound": -5.0, "dt_bias": torch.zeros(3)}, "dt_bias"),
        ({"allow_neg_eigval": True}, "allow_neg_eigval"),
        ({"chunk_size": 48}, "chunk_size=48"),
        ({"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -6.0, "A_log": torch.zeros(2)}, "-6"),
        ({"backend": "cuda"}, "backend='cuda'"),
        ({"cu_seqlens": torch.tensor([0, 7])}, "cu_seqlens must rise"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 6])}, "cu_seqlens must rise"),
    ],
)
def test_contradictions_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        chunk_kda(**{**tensors(), **changes})


def test_packing_needs_one_row():
    with pytest.raises(ValueError, match="B=1"):
        chunk_kda(**tensors(batch=2), cu_seqlens=torch.tensor([0, 6]))


def test_a_state_of_the_other_layout_is_refused():
    arguments = tensors(key=4, value=8)
    with pytest.raises(ValueError, match="state_v_first=True"):
        chunk_kda(**arguments, initial_state=torch.zeros(1, 2, 4, 8), state_v_first=True)


def test_old_name_of_the_state_layout():
    arguments = tensors(value=8)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        _, state = chunk_kda(**arguments, output_final_state=True, transpose_state_layout=True)
    assert state.shape == (1, 2, 8, 4)


def test_arguments_without_effect_are_accepted():
    arguments = tensors()
    plain, none = chunk_kda(**arguments)
    assert none is None
    out, _ = chunk_kda(
        **arguments, safe_gate=True, disable_recompute=True, use_graph=True, max_num_seqs=3,
        cu_seqlens=torch.tensor([0, 6]), cu_seqlens_cpu=torch.tensor([0, 6]), chunk_size=32,
    )  # fmt: skip
    torch.testing.assert_close(out, plain)
