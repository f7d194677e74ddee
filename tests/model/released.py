"""A second, naive K3 forward, written from the report over *released* tensor names: token by token, expert
by expert.

It shares no code with the model, so that agreement checks the formulas and the checkpoint mapping
together. One sequence, fp64.
"""

from __future__ import annotations

import math

import torch

Tensors = dict[str, torch.Tensor]


def released_logits(tensors: Tensors, config: dict, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] of one sequence [T]."""
    eps, block = config["rms_norm_eps"], config["attn_res_block_size"]
    prefix: torch.Tensor | None = tensors["model.embed_tokens.weight"][tokens]
    snapshots: list[torch.Tensor] = []
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."

        hidden = site(tensors, f"{name}self_attention", [*snapshots, prefix], eps) if snapshots else prefix
        if layer % block == 0:
            snapshots.append(prefix)
            prefix = None
        is_mla = layer + 1 in config["linear_attn_config"]["full_attn_layers"]
        x = norm(hidden, tensors[f"{name}input_layernorm.weight"], eps)
        out = (mla if is_mla else kda)(tensors, f"{name}self_attn.", config, x)
        prefix = out if prefix is None else prefix + out
        mixed = site(tensors, f"{name}mlp", [*snapshots, prefix], eps)
        x = norm(mixed, tensors[f"{name}post_attention_layernorm.weight"], eps)
        if layer < config["first_k_dense_replace"]:
            prefix = prefix + ffn(tensors, f"{name}mlp.", config, x)
        else:
            prefix = prefix + moe(tensors, f"{name}block_sparse_moe.", config, x)
    final = mix(
        [*snapshots, prefix],
        tensors["model.output_attn_res_norm.weight"],
        tensors["model.output_attn_res_proj.weight"],
        eps,
    )
    head = tensors["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return norm(final, tensors["model.norm.weight"], eps) @ head.T


def site(tensors: Tensors, name: str, sources: list[torch.Tensor], eps: float) -> torch.Tensor:
    return mix(sources, tensors[f"{name}_res_norm.weight"], tensors[f"{name}_res_proj.weight"], eps)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def mix(sources: list[torch.Tensor], weight: torch.Tensor, proj_1D: torch.Tensor, eps: float) -> torch.Tensor:
    scores = torch.stack([norm(source, weight, eps) @ proj_1D[0] for source in sources])
    return sum(p.unsqueeze(-1) * source for p, source in zip(scores.softmax(0), sources, strict=True))


def situ(gate: torch.Tensor, up: torch.Tensor, config: dict) -> torch.Tensor:
    b1, b2 = config["activation_situ_beta"], config["activation_situ_linear_beta"]
    return b1 * torch.tanh(gate / b1) / (1 + torch.exp(-gate)) * b2 * torch.tanh(up / b2)


def ffn(tensors: Tensors, name: str, config: dict, x: torch.Tensor) -> torch.Tensor:
    gate, up = x @ tensors[f"{name}gate_proj.weight"].T, x @ tensors[f"{name}up_proj.weight"].T
    return situ(gate, up, config) @ tensors[f"{name}down_proj.weight"].T


def moe(tensors: Tensors, name: str, config: dict, x: torch.Tensor) -> torch.Tensor:
    scores = 1 / (1 + torch.exp(-(x @ tensors[f"{name}gate.weight"].T)))
    chosen = (
        (scores + tensors[f"{name}gate.e_score_correction_bias"])
        .topk(config["num_experts_per_token"])
        .indices
    )
    z = x @ tensors[f"{name}routed_expert_down_proj.weight"].T
    u = torch.zeros_like(z)
    for t in range(x.shape[0]):
        total = scores[t, chosen[t]].sum()
        for expert in chosen[t].tolist():
            w1, w2, w3 = (tensors[f"{name}experts.{expert}.w{i}.weight"] for i in (1, 2, 3))
            u[t] += scores[t, expert] / total * (w2 @ situ(w1 @ z[t], w3 @ z[t], config))
    routed = norm(u, tensors[f"{name}routed_expert_norm.weight"], config["rms_norm_eps"])
    routed = routed @ tensors[f"{name}routed_expert_up_proj.weight"].T
    return routed + ffn(tensors, f"{name}shared_experts.", config, x)


def kda(tensors: Tensors, name: str, config: dict, x: torch.Tensor) -> torch.Tensor:
    heads, dim = config["linear_attn_config"]["num_heads"], config["linear_attn_config"]["head_dim"]
    lower_bound = config["linear_attn_config"]["gate_lower_bound"]
    q, k, v = (
        convolved(x @ tensors[f"{name}{n}_proj.weight"].T, tensors[f"{name}{n}_conv1d.weight"]) for n in "qkv"
    )
    z = (
        x @ tensors[f"{name}f_a_proj.weight"].T @ tensors[f"{name}f_b_proj.weight"].T
        + tensors[f"{name}dt_bias"]
    )
    beta = torch.sigmoid(x @ tensors[f"{name}b_proj.weight"].T)
    gate = torch.sigmoid(x @ tensors[f"{name}g_proj.weight"].T)
    y = torch.zeros_like(q)
    for h in range(heads):
        part = slice(h * dim, (h + 1) * dim)
        log_decay = lower_bound * torch.sigmoid(tensors[f"{name}A_log"][h].exp() * z[:, part])
        state = torch.zeros(dim, dim, dtype=x.dtype)
        for t in range(x.shape[0]):
            q_t, k_t, v_t = q[t, part], k[t, part], v[t, part]
            q_t, k_t = (u / (u.pow(2).sum() + 1e-6).sqrt() for u in (q_t, k_t))
            state = log_decay[t].exp().unsqueeze(1) * state
            state = state + beta[t, h] * torch.outer(k_t, v_t - state.T @ k_t)
            o = norm(state.T @ q_t / math.sqrt(dim), tensors[f"{name}o_norm.weight"], config["rms_norm_eps"])
            y[t, part] = gate[t, part] * o
    return y @ tensors[f"{name}o_proj.weight"].T


def convolved(x: torch.Tensor, weight_C1W: torch.Tensor) -> torch.Tensor:
    width = weight_C1W.shape[-1]
    padded = torch.cat([x.new_zeros(width - 1, x.shape[1]), x])
    y = sum(padded[i : i + x.shape[0]] * weight_C1W[:, 0, i] for i in range(width))
    return y / (1 + torch.exp(-y))


def mla(tensors: Tensors, name: str, config: dict, x: torch.Tensor) -> torch.Tensor:
    heads, nope, rope = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    value, rank, T = config["v_head_dim"], config["kv_lora_rank"], x.shape[0]
    q = norm(x @ tensors[f"{name}q_a_proj.weight"].T, tensors[f"{name}q_a_layernorm.weight"], 1e-6)
    q = (q @ tensors[f"{name}q_b_proj.weight"].T).view(T, heads, nope + rope)
    c = x @ tensors[f"{name}kv_a_proj_with_mqa.weight"].T
    c, k_rope = norm(c[:, :rank], tensors[f"{name}kv_a_layernorm.weight"], 1e-6), c[:, rank:]
    kv = (c @ tensors[f"{name}kv_b_proj.weight"].T).view(T, heads, nope + value)
    y = torch.zeros(T, heads, value, dtype=x.dtype)
    for h in range(heads):
        k = torch.cat([kv[:, h, :nope], k_rope], dim=1)
        for t in range(T):
            p = (k[: t + 1] @ q[t, h] / math.sqrt(nope + rope)).softmax(0)
            y[t, h] = p @ kv[: t + 1, h, nope:]
    gate = torch.sigmoid(x @ tensors[f"{name}g_proj.weight"].T)
    return (gate * y.flatten(1)) @ tensors[f"{name}o_proj.weight"].T
