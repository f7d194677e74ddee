"""The Triton KDA kernels against the fp64 recurrence: values, gradients and the edges.

Tolerances are RMS error over RMS reference. Rounding an output to bfloat16 alone costs 1.7e-3; the kernels'
fp16 operands under a row scale add less than that to o and the state. Gradients pass a bfloat16 Z, X and
state besides; dbeta = X.Z shows it most, where few tokens of a short case carry the gradient of the final
state.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.kda import segments
from kernels.kda.launch import Problem
from tests.kernels.kda_cases import (
    DEVICE,
    Case,
    error,
    make_inputs,
    output_gradients,
    replace,
    triton,
    truth,
    with_gradients,
)

TOLERANCE = {
    "o": 2.5e-3,
    "final_state": 2.5e-3,
    "dq": 5e-3,
    "dk": 5e-3,
    "dv": 5e-3,
    "dg": 6e-3,
    "dbeta": 1.2e-2,
}
# Over one or two heads a sum that happens to cancel shows its noise: 1e-2 is the aim over 8 heads or more.
TOLERANCE |= {"dA_log": 3e-2, "ddt_bias": 1e-2, "dinitial_state": 3.5e-3}
CASES = {
    "whole chunk and a ragged one": Case(),
    "K != V, grouped heads, softplus, 2 sigmoid, V first": Case(
        T=21, HV=2, K=72, V=40, gate="softplus", beta=2, v_first=True
    ),
    "given gate and beta, no norm, fp16, batch": Case(
        T=17, B=2, gate="given", beta=0, l2_norm=False, dtype=torch.float16
    ),
    "packed sequences, empty ones between": Case(T=100, cu_seqlens=(0, 0, 5, 5, 70, 100)),
    "fp32": Case(T=33, dtype=torch.float32),
    "saturated gate": Case(T=40, raw_gate=8.0),
    "hardly any decay": Case(T=40, raw_gate=-8.0),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    case = CASES[name]
    inputs = make_inputs(case)
    gradients = output_gradients(case)
    actual = with_gradients(triton, case, inputs, *gradients)
    expected = with_gradients(truth, case, inputs, *gradients)
    errors = {key: error(actual[key], expected[key]) for key in expected}
    assert {key: e for key, e in errors.items() if not e <= TOLERANCE[key]} == {}, errors


@pytest.mark.parametrize("gate", ["bounded", "given"])
def test_a_suffix_changes_no_bit_of_the_prefix(gate):
    """Scales, anchors and paths must not look ahead: outputs and gradients of P tokens know nothing of the
    rest."""
    case = Case(T=41, gate=gate, beta=1)
    P = 22
    first = make_inputs(case)
    second = {name: x.clone() for name, x in first.items()}
    other = make_inputs(replace(case, seed=9))
    for name in ("q", "k", "v", "g", "beta"):
        second[name][:, P:] = other[name][:, P:] * (30 if name == "g" and gate == "given" else 1)
    gradients = output_gradients(case, tokens=P)
    results = [with_gradients(triton, case, inputs, *gradients) for inputs in (first, second)]
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(results[0][name][:, :P], results[1][name][:, :P]), name


def test_is_bitwise_repeatable():
    case = Case(T=40)
    inputs, gradients = make_inputs(case), output_gradients(case)
    first, second = (with_gradients(triton, case, inputs, *gradients) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("beta_mode", "beta_logit", "raw_gate", "limit"),
    [(1, 8.0, -12.0, 2e-2), (2, 8.0, -4.0, 2e-2), (2, 8.0, -12.0, None)],
)
def test_identical_keys(beta_mode, beta_logit, raw_gate, limit):
    """One key repeated for all q = k: the inverse is a telescoping sum. Beta -> 2 without decay is a
    reflection that
    amplifies rounding: there, finite is what 16-bit operands can promise."""
    case = Case(T=128, beta=beta_mode, raw_gate=raw_gate)
    inputs = make_inputs(case)
    inputs["k"] = inputs["q"] = inputs["k"][:, :1].expand_as(inputs["k"]).contiguous()
    inputs["beta"] = torch.full_like(inputs["beta"], beta_logit)
    inputs["A_log"], inputs["dt_bias"] = (torch.zeros_like(inputs[name]) for name in ("A_log", "dt_bias"))
    o, final = triton(case, inputs)
    assert o.isfinite().all() and final.isfinite().all()
    if limit is not None:
        expected = truth(case, inputs)
        assert error(o, expected[0]) <= limit and error(final, expected[1]) <= limit


@pytest.mark.parametrize("A_log", [-20.0, 100.0])
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_extreme_gate_rates_stay_finite(A_log, gate):
    case = Case(T=20, gate=gate)
    inputs = make_inputs(case)
    inputs["A_log"].fill_(A_log)
    results = with_gradients(triton, case, inputs, *output_gradients(case))
    assert all(x.isfinite().all() for x in results.values())


def test_a_gate_of_minus_thousand_forgets():
    case = Case(T=40, gate="given", beta=1)
    inputs = make_inputs(case)
    inputs["g"][:, 20] = -1000.0
    results = with_gradients(triton, case, inputs, *output_gradients(case))
    expected = with_gradients(truth, case, inputs, *output_gradients(case))
    assert error(results["o"], expected["o"]) <= TOLERANCE["o"]
    assert error(results["dg"], expected["dg"]) <= TOLERANCE["dg"]
    assert error(results["dinitial_state"], expected["dinitial_state"]) <= TOLERANCE["dinitial_state"]


def test_zero_beta_has_a_gradient():
    case = Case(T=20, gate="given", beta=0)
    inputs = make_inputs(case)
    inputs["beta"][:, ::2] = 0
    gradients = output_gradients(case)
    actual = with_gradients(triton, case, inputs, *gradients)
    expected = with_gradients(truth, case, inputs, *gradients)
    assert error(actual["dbeta"], expected["dbeta"]) <= TOLERANCE["dbeta"]


@pytest.mark.parametrize("case", [Case(T=0), Case(T=0, cu_seqlens=(0, 0, 0)), Case(T=1)])
def test_nothing_or_one_token(case):
    inputs = make_inputs(case)
    o, final = triton(case, inputs)
    assert o.shape == inputs["v"].shape
    if case.T == 0:
        assert torch.equal(final, inputs["initial_state"])
    else:
        assert error(o, truth(case, inputs)[0]) <= TOLERANCE["o"]


def test_tokens_after_the_last_sequence_read_as_zero():
    """A buffer of a static size, as a captured graph has: what no sequence owns is never read, its results
    are zero."""
    case = Case(T=30, cu_seqlens=(0, 9, 20))
    inputs = make_inputs(case)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][:, 20:] = float("nan")
    results = with_gradients(triton, case, inputs, *output_gradients(case))
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert results[name].isfinite().all() and results[name][:, 20:].abs().max() == 0, name


def test_strided_inputs_and_poisoned_padding():
    """q, k, v, g as slices of one wide row, as a fused projection leaves them, with NaN around every
    slice."""
    case = Case(T=20, K=72, V=40)
    inputs = make_inputs(case)
    expected = triton(case, inputs)
    strided = dict(inputs)
    for name in ("q", "k", "v", "g", "beta"):
        x = inputs[name]
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 8), float("nan"), dtype=x.dtype, device=DEVICE)
        wide[..., 8 : 8 + x.shape[-1]] = x
        strided[name] = wide[..., 8 : 8 + x.shape[-1]]
    actual = triton(case, strided)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


def test_any_scale_of_the_values():
    case = Case(T=20)
    inputs = make_inputs(case)
    inputs["initial_state"].zero_()
    o = triton(case, inputs)[0]
    inputs["v"] = inputs["v"] * 2.0**60
    assert torch.equal(triton(case, inputs)[0], o * 2.0**60)


def test_a_retained_graph_can_go_backward_twice():
    """The first backward frees the operands of the scans; the second makes them again, bit for bit."""
    case = Case(T=20)
    leaves = {name: x.requires_grad_() for name, x in make_inputs(case).items()}
    outputs = triton(case, leaves)
    gradients = output_gradients(case)
    first, second = (
        torch.autograd.grad(outputs, list(leaves.values()), gradients, retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_segments_equal_one_scan(monkeypatch):
    """A long sequence cut into parallel segments gives the values and gradients of the serial scan."""
    case = Case(T=130, v_first=True)
    inputs, gradients = make_inputs(case), output_gradients(case)
    serial = with_gradients(triton, case, inputs, *gradients)
    monkeypatch.setattr(segments, "MIN_CHUNKS", 1)
    monkeypatch.setattr(segments, "MIN_SEGMENTS", 2)
    assert segments.split(Problem(1, 130, 1, 1, 1, 64, 64, 1.0), inputs["q"].device)[0].N == 3
    parallel = with_gradients(triton, case, inputs, *gradients)
    assert {name for name in serial if error(parallel[name], serial[name]) > 2.5e-3} == set()


def test_refuses_what_it_cannot_run():
    case = Case(T=4)
    inputs = {name: x.double() for name, x in make_inputs(case).items()}
    with pytest.raises(NotImplementedError, match="float64"):
        triton(case, inputs)
    wide = make_inputs(Case(T=4, K=264))
    with pytest.raises(NotImplementedError, match="K=264"):
        triton(Case(T=4, K=264), wide)
    with pytest.raises(ValueError, match="initial_state"):
        triton(Case(T=4, K=64, V=32), make_inputs(Case(T=4, K=64, V=32, v_first=True)))


@pytest.mark.gpu
def test_captures_into_a_graph_with_device_cu_seqlens():
    case = Case(T=300, H=2, HV=2, cu_seqlens=(0, 100, 100, 300))
    inputs = make_inputs(case)
    gradients = output_gradients(case)
    expected = with_gradients(triton, case, inputs, *gradients)
    flags = case.flags()
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()

    def step():
        o, final = triton(case, leaves, **flags)
        return o, *torch.autograd.grad([o, final], list(leaves.values()), gradients)

    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        outputs = step()
    graph.replay()
    torch.cuda.synchronize()
    names = ["o", *(f"d{name}" for name in leaves)]
    assert all(torch.equal(x, expected[name]) for name, x in zip(names, outputs, strict=True))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    """T x H x K beyond int32: the end of the long tensor equals a short run that starts from the same
    state."""
    T, H = 600_000, 32
    generator = torch.Generator(device="cuda").manual_seed(0)
    q, k, v, g = (torch.randn(1, T, H, 128, generator=generator, device="cuda").bfloat16() for _ in range(4))
    beta = torch.randn(1, T, H, generator=generator, device="cuda").bfloat16()
    flags = Case().flags() | {
        "A_log": torch.zeros(H, device="cuda"),
        "dt_bias": torch.zeros(H, 128, device="cuda"),
    }
    cut = T - 640
    tensors = (q, k, v, g, beta)
    from kernels.kda import chunk_kda

    o, final = chunk_kda(*tensors, **flags)
    _, middle = chunk_kda(*(x[:, :cut] for x in tensors), **flags)
    tail, last = chunk_kda(*(x[:, cut:] for x in tensors), initial_state=middle, **flags)
    assert torch.equal(o[:, cut:], tail) and torch.equal(final, last)
