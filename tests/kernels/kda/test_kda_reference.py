"""KDA on CPU: recurrence, plain chunks and the fast path agree; gradients; packing; gates and keys at
the edge.

Tolerances: fp64 1e-10 and fp32 1e-5 relative RMS, the project's bound for chunkwise against recurrent;
both hold with two or more digits to spare, so a wrong term cannot hide. Gradients are compared in fp64
with the same 1e-10.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from kernels.kda import chunk_kda, fused_recurrent_kda, kda_gate, naive_chunk_kda, naive_recurrent_kda
from kernels.kda.reference import naive_kda_gate
from kernels.kda.reference_intra import unit_inverse

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
FORMS = {"plain": naive_chunk_kda, "fast": chunk_kda}


def case(
    batch, tokens, heads=2, value_heads=4, key=8, value=6, gate=-0.5, sequences=None, dtype=torch.float64
):
    torch.manual_seed(tokens + int(-gate))
    q = torch.randn(batch, tokens, heads, key, dtype=dtype)
    k = F.normalize(torch.randn(batch, tokens, heads, key, dtype=dtype), dim=-1)
    v = torch.randn(batch, tokens, value_heads, value, dtype=dtype)
    g = gate * torch.rand(batch, tokens, value_heads, key, dtype=dtype)
    beta = torch.rand(batch, tokens, value_heads, dtype=dtype)
    state = torch.randn(sequences or batch, value_heads, key, value, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v, g, beta, state)]


def run(function, inputs, cu=None, **arguments):
    q, k, v, g, beta, state = inputs
    return function(
        q, k, v, g, beta, initial_state=state, output_final_state=True, cu_seqlens=cu, **arguments
    )


def results_and_gradients(function, inputs, cu=None):
    """[o, final state, gradients of the six inputs] of a random linear functional of both results."""
    out, final = run(function, inputs, cu)
    generator = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in (out, final))
    return [out, final, *torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)]


def relative(a, b):
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item() if b.numel() else 0.0


def assert_close(got, want, tolerance):
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape
        assert relative(a, b) < tolerance, f"result {index}: {relative(a, b):.2e}"


# -0.5: 32-token chunks factor; -5: K3's bound, 16-token chunks; -30 and -1000: pairwise; 0: no decay.
@pytest.mark.parametrize("gate", [-0.5, -5.0, -30.0, -1000.0, 0.0])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_chunks_equal_recurrence_with_gradients(gate, form, dtype):
    inputs = case(2, 37, gate=gate, dtype=dtype)
    want = results_and_gradients(naive_recurrent_kda, inputs)
    assert_close(results_and_gradients(FORMS[form], inputs), want, TOLERANCE[dtype])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [0, 1, 5, 16, 33])
def test_lengths(form, tokens):
    inputs = case(1, tokens, heads=1, value_heads=1, key=3, value=7)
    want = results_and_gradients(naive_recurrent_kda, inputs)
    assert_close(results_and_gradients(FORMS[form], inputs), want, 1e-10)
    if tokens == 0:
        assert torch.equal(want[1], inputs[5])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate", [-0.5, -30.0])
def test_packed_equals_sequence_by_sequence(form, gate):
    bounds = [0, 0, 5, 5, 38, 41, 57, 57]  # empty at both ends and between
    inputs = case(1, bounds[-1], gate=gate, sequences=len(bounds) - 1)
    packed = results_and_gradients(FORMS[form], inputs, torch.tensor(bounds))
    assert_close(packed, results_and_gradients(naive_recurrent_kda, inputs, torch.tensor(bounds)), 1e-10)
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        alone = [x[:, start:end] for x in inputs[:5]] + [inputs[5][i : i + 1]]
        out, final = run(naive_recurrent_kda, alone)
        assert relative(packed[0][:, start:end], out) < 1e-10
        assert relative(packed[1][i : i + 1], final) < 1e-10


def test_no_sequences_and_tokens_of_no_sequence():
    inputs = case(1, 9, sequences=1)
    poisoned = [x.detach().clone() for x in inputs]
    for x in poisoned[:5]:
        x[:, 6:] = torch.nan
    out, final = run(chunk_kda, poisoned, torch.tensor([0, 6]))
    want, want_final = run(chunk_kda, [x[:, :6] for x in inputs[:5]] + inputs[5:])
    assert torch.equal(out[:, :6], want) and torch.equal(final, want_final)
    assert not out[:, 6:].any()
    empty = run(chunk_kda, [x[:, :0] for x in inputs[:5]] + [inputs[5][:0]], torch.tensor([0]))
    assert empty[0].shape == (1, 0, 4, 6) and empty[1].shape == (0, 4, 8, 6)


def test_gradcheck_of_the_fast_path_with_every_flag():
    torch.manual_seed(0)
    d = torch.float64
    q, k, g = (torch.randn(1, 18, 1, 3, dtype=d).requires_grad_() for _ in range(3))
    v = torch.randn(1, 18, 1, 2, dtype=d).requires_grad_()
    beta = torch.randn(1, 18, 1, dtype=d).requires_grad_()
    A_log, dt_bias = torch.randn(1, dtype=d).requires_grad_(), torch.randn(3, dtype=d).requires_grad_()
    state = torch.randn(2, 1, 2, 3, dtype=d).requires_grad_()

    def run_all(q, k, v, g, beta, A_log, dt_bias, state):
        return chunk_kda(
            q, k, v, g, beta,
            A_log=A_log, dt_bias=dt_bias, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=True, lower_bound=-5.0, state_v_first=True, cu_seqlens=torch.tensor([0, 1, 18]),
        )  # fmt: skip

    assert gradcheck(run_all, (q, k, v, g, beta, A_log, dt_bias, state))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_flags_equal_the_same_steps_outside(lower_bound):
    q, k, v, g, beta, state = case(2, 21, gate=-3.0)
    A_log, dt_bias = torch.randn(4, dtype=torch.float64), torch.randn(32, dtype=torch.float64)
    gate = naive_kda_gate(g, A_log, dt_bias, lower_bound)
    unit = [x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k)]
    want = naive_recurrent_kda(*unit, v, gate, 2 * beta.sigmoid(), 0.3, state, True)
    flags = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
        "lower_bound": lower_bound,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "scale": 0.3,
        "output_final_state": True,
    }
    assert_close(chunk_kda(q, k, v, g, beta, initial_state=state, **flags), want, 1e-10)
    flipped = {"initial_state": state.mT, "state_v_first": True, **flags}
    for function in (chunk_kda, fused_recurrent_kda):
        out, final = function(q, k, v, g, beta, **flipped)
        assert_close((out, final.mT), want, 1e-10)


def test_token_by_token_equals_all_at_once():
    inputs = case(2, 9)
    want, want_state = run(chunk_kda, inputs)
    state, outs = inputs[5], []
    for t in range(9):
        out, state = run(fused_recurrent_kda, [x[:, t : t + 1] for x in inputs[:5]] + [state])
        outs.append(out)
    assert_close((torch.cat(outs, 1), state), (want, want_state), 1e-12)


@pytest.mark.parametrize("strength", [1.0, 2.0])
def test_identical_keys(strength):
    """The case in which a power series for (I + A)^-1 loses every digit. With beta -> 2 and no decay the
    state does not contract, so rounding grows with T: 1e-4 there, 1e-5 below.
    """
    q, k, v, g, beta, state = case(1, 64, heads=1, value_heads=1, dtype=torch.float32)
    k = F.normalize(torch.ones_like(k) + 1e-3 * k, dim=-1)
    beta = torch.full_like(beta, strength - 1e-4)
    inputs = [q, k, v, 0.0 * g, beta, state]
    got = run(chunk_kda, inputs)
    want = run(naive_recurrent_kda, [x.double() for x in inputs])
    assert_close([x.double() for x in got], want, 1e-5 if strength == 1 else 1e-4)


def test_unit_inverse_of_every_block_size():
    torch.manual_seed(0)
    for size in (16, 32, 64):
        A = torch.randn(3, size, size, dtype=torch.float64).tril(-1) / size**0.5
        eye = torch.eye(size, dtype=torch.float64)
        torch.testing.assert_close(unit_inverse(A) @ (eye + A), eye.expand(3, -1, -1), rtol=0, atol=1e-12)


def test_later_tokens_do_not_reach_back():
    inputs = case(1, 40)
    out, _ = run(chunk_kda, inputs)
    changed = [x.detach().clone() for x in inputs]
    for x in changed[:5]:
        x[:, 25:] *= 0.5
    again, _ = run(chunk_kda, changed)
    assert torch.equal(out[:, :25], again[:, :25])
    grads = torch.autograd.grad(out[:, :25].sum(), inputs[:5])
    assert not any(x[:, 25:].any() for x in grads)


@pytest.mark.parametrize("value", [0.0, -1000.0])
def test_beta_zero_and_dead_or_perfect_memory(value):
    inputs = case(1, 20)
    inputs[3] = torch.full_like(inputs[3], value).requires_grad_()
    inputs[4] = torch.zeros_like(inputs[4]).requires_grad_()
    want = results_and_gradients(naive_recurrent_kda, inputs)
    got = results_and_gradients(chunk_kda, inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_strides_and_half_precision():
    buffer = torch.randn(2, 19, 3, 2, 10)
    q, k, v = (buffer[:, :, i, :, 1:9] for i in range(3))
    g, beta = -torch.rand(2, 2, 19, 8).transpose(1, 2), torch.rand(2, 2, 19).transpose(1, 2)
    want, _ = chunk_kda(*(x.contiguous() for x in (q, k, v, g, beta)), use_qk_l2norm_in_kernel=True)
    got, _ = chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    assert torch.equal(got, want)
    half = [x.bfloat16() for x in (q, k, v, g, beta)]
    out, state = chunk_kda(*half, output_final_state=True, use_qk_l2norm_in_kernel=True)
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
    exact, _ = chunk_kda(*(x.double() for x in half), use_qk_l2norm_in_kernel=True)
    assert relative(out.double(), exact) < 2**-8  # one rounding of the output to bf16


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gate_values_and_gradients(lower_bound):
    torch.manual_seed(0)
    raw = (3 * torch.randn(2, 3, 2, 4, dtype=torch.float64)).requires_grad_()
    A_log, dt_bias = torch.randn(2).double().requires_grad_(), torch.randn(8).double().requires_grad_()
    got = kda_gate(raw, A_log, dt_bias, lower_bound)
    torch.testing.assert_close(got, naive_kda_gate(raw, A_log, dt_bias, lower_bound), rtol=1e-14, atol=0)
    assert gradcheck(lambda *a: kda_gate(*a, lower_bound), (raw, A_log, dt_bias))
    assert gradcheck(lambda raw: kda_gate(raw, None, None, lower_bound), (raw,))


@pytest.mark.parametrize("rate", [-20.0, 100.0])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_everything_is_finite_for_any_rate(rate, lower_bound):
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, 20, 2, 4, requires_grad=True) for _ in range(4))
    beta, A_log = torch.randn(1, 20, 2, requires_grad=True), torch.full((2,), rate, requires_grad=True)
    with torch.no_grad():
        g[:, 3] = 0
    out, _ = chunk_kda(
        q, k, v, g, beta, A_log=A_log, lower_bound=lower_bound,
        use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip
    out.sum().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in (q, k, v, beta))
    if lower_bound is not None:
        assert g.grad.isfinite().all() and A_log.grad.isfinite().all()


def test_inference_then_training_share_index_arrays():
    inputs = case(1, 23)
    with torch.inference_mode():
        run(chunk_kda, [x.detach() for x in inputs])
    results_and_gradients(chunk_kda, inputs)
