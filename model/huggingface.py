"""Names and layouts of the released Hugging Face checkpoint, both ways.

The release keeps separate what this model fuses (q, k, v; gate, up) and one tensor an expert; its
convolutions are [C, 1, W], its pseudo-queries [1, D], its `A_log` is padded with zeros to a multiple of
128 entries, and layer 0 has an attention-residual site that has nothing to mix. The text part may carry
the prefix `language_model.`. MTP layers are not part of the release and are not exported.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from model.config import K3Config, ModelConfigError
from model.k3 import K3Model
from model.latent_moe import BalancerFactory, ExpertsFactory

RELEASED_A_LOG_MULTIPLE = 128
_WRAPPER = "language_model."

# K3Config field -> field of config.json; the first group stands at the top, the second in linear_attn_config.
_TOP_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "mla_num_heads": "num_attention_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "num_dense_layers": "first_k_dense_replace",
    "dense_ffn_size": "intermediate_size",
    "num_experts": "num_experts",
    "top_k": "num_experts_per_token",
    "num_shared_experts": "num_shared_experts",
    "latent_size": "routed_expert_hidden_size",
    "expert_ffn_size": "moe_intermediate_size",
    "renormalize": "moe_renormalize",
    "routed_scaling_factor": "routed_scaling_factor",
    "situ_beta_gate": "activation_situ_beta",
    "situ_beta_up": "activation_situ_linear_beta",
    "attention_residual_block_size": "attn_res_block_size",
    "rms_norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "max_context": "max_position_embeddings",
}
_KDA_FIELDS = {
    "kda_num_heads": "num_heads",
    "kda_head_dim": "head_dim",
    "conv_kernel_size": "short_conv_kernel_size",
    "gate_lower_bound": "gate_lower_bound",
}
# What this model always does; a checkpoint that says otherwise is refused.
_CONSTANTS = {
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "moe_router_activation_func": "sigmoid",
    "latent_moe_use_norm": True,
    "moe_layer_freq": 1,
    "num_expert_group": 1,
    "topk_group": 1,
}


def config_to_released(config: K3Config) -> dict[str, Any]:
    """The text part of a `config.json` for this configuration; layers are counted from 1 there."""
    mla = [layer + 1 for layer in range(config.num_layers) if config.is_mla(layer)]
    return {
        "model_type": "kimi_linear",
        **{theirs: getattr(config, ours) for ours, theirs in _TOP_FIELDS.items()},
        "num_key_value_heads": config.mla_num_heads,
        "hidden_act": "situ",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        **_CONSTANTS,
        "linear_attn_config": {
            **{theirs: getattr(config, ours) for ours, theirs in _KDA_FIELDS.items()},
            "use_full_rank_gate": True,
            "full_attn_layers": mla,
            "kda_layers": [layer + 1 for layer in range(config.num_layers) if not config.is_mla(layer)],
        },
    }


def config_from_released(values: Mapping[str, Any]) -> K3Config:
    """The configuration a `config.json` describes (its `text_config` where it has one).

    Raises:
        ModelConfigError: a field is missing, or asks for something this model does not do.
    """
    values = values.get("text_config", values)
    kda = values.get("linear_attn_config", {})
    fields: dict[str, Any] = {}
    for table, source in ((_TOP_FIELDS, values), (_KDA_FIELDS, kda)):
        for ours, theirs in table.items():
            if theirs not in source:
                raise ModelConfigError(f"config.json has no {theirs!r}; it is not a K3 configuration")
            fields[ours] = source[theirs]
    for name, wanted in {**_CONSTANTS, "use_full_rank_gate": True}.items():
        found = {**values, **kda}.get(name, wanted)
        if found != wanted:
            raise ModelConfigError(f"config.json says {name}={found!r}; only {wanted!r} is supported")
    for name in ("situ_beta_gate", "situ_beta_up", "routed_scaling_factor", "gate_lower_bound"):
        fields[name] = float(fields[name])
    return _with_layer_pattern(fields, [int(layer) for layer in kda.get("full_attn_layers", [])])


def _with_layer_pattern(fields: dict[str, Any], full_attn_layers: list[int]) -> K3Config:
    """The configuration whose rule (every n-th layer and the last) gives these MLA layers, counted from 1."""
    wanted = sorted(full_attn_layers)
    config = K3Config.from_dict({**fields, "mla_every": wanted[0] if wanted else 0})
    found = [layer + 1 for layer in range(config.num_layers) if config.is_mla(layer)]
    if found != wanted:
        raise ModelConfigError(
            f"config.json has MLA in layers {wanted}; supported: every n-th layer and the last, here {found}"
        )
    return config


@dataclass(frozen=True)
class Entry:
    """One tensor here and the tensors of the release that hold it, in order; `kind` says how they are
    joined.
    """

    ours: str
    released: tuple[str, ...]
    kind: str = "rows"  # rows: concatenated | conv | query | a_log | experts: stacked


def entries(config: K3Config) -> Iterator[Entry]:
    """Every tensor of a K3Model's state (an MTP layer's excepted) with its released names."""
    yield Entry("embedding.weight", ("model.embed_tokens.weight",))
    for layer in range(config.num_layers):
        yield from _layer_entries(config, layer)
    yield Entry("output_residual.norm_weight", ("model.output_attn_res_norm.weight",))
    yield Entry("output_residual.query", ("model.output_attn_res_proj.weight",), "query")
    yield Entry("output_norm.weight", ("model.norm.weight",))
    if not config.tie_embeddings:
        yield Entry("head.weight", ("lm_head.weight",))


def _layer_entries(config: K3Config, layer: int) -> Iterator[Entry]:
    ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
    if layer > 0:
        yield Entry(f"{ours}mixer_residual.norm_weight", (f"{theirs}self_attention_res_norm.weight",))
        yield Entry(f"{ours}mixer_residual.query", (f"{theirs}self_attention_res_proj.weight",), "query")
    yield Entry(f"{ours}ffn_residual.norm_weight", (f"{theirs}mlp_res_norm.weight",))
    yield Entry(f"{ours}ffn_residual.query", (f"{theirs}mlp_res_proj.weight",), "query")
    yield Entry(f"{ours}mixer_norm.weight", (f"{theirs}input_layernorm.weight",))
    yield Entry(f"{ours}ffn_norm.weight", (f"{theirs}post_attention_layernorm.weight",))
    mixer = _MLA_NAMES if config.is_mla(layer) else _KDA_NAMES
    for name, released, kind in mixer:
        yield Entry(f"{ours}mixer.{name}", tuple(f"{theirs}self_attn.{r}" for r in released), kind)
    if not config.is_moe(layer):
        yield from _ffn_entries(f"{ours}ffn.", f"{theirs}mlp.")
        return
    ours, theirs = f"{ours}ffn.", f"{theirs}block_sparse_moe."
    for name, moe_name in _MOE_NAMES:
        yield Entry(ours + name, (theirs + moe_name,))
    if config.num_shared_experts:
        yield from _ffn_entries(f"{ours}shared_experts.", f"{theirs}shared_experts.")
    for name, matrix in (("gate_weight", "w1"), ("up_weight", "w3"), ("down_weight", "w2")):
        names = tuple(f"{theirs}experts.{expert}.{matrix}.weight" for expert in range(config.num_experts))
        yield Entry(f"{ours}experts.{name}", names, "experts")


def _ffn_entries(ours: str, theirs: str) -> Iterator[Entry]:
    yield Entry(f"{ours}gate_up_proj.weight", (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight"))
    yield Entry(f"{ours}down_proj.weight", (f"{theirs}down_proj.weight",))


_KDA_NAMES = (
    ("qkv_proj.weight", ("q_proj.weight", "k_proj.weight", "v_proj.weight"), "rows"),
    ("conv_weight", ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"), "conv"),
    ("decay_down_proj.weight", ("f_a_proj.weight",), "rows"),
    ("decay_up_proj.weight", ("f_b_proj.weight",), "rows"),
    ("dt_bias", ("dt_bias",), "rows"),
    ("A_log", ("A_log",), "a_log"),
    ("beta_proj.weight", ("b_proj.weight",), "rows"),
    ("gate_proj.weight", ("g_proj.weight",), "rows"),
    ("out_norm_weight", ("o_norm.weight",), "rows"),
    ("out_proj.weight", ("o_proj.weight",), "rows"),
)
_MLA_NAMES = (
    ("q_down_proj.weight", ("q_a_proj.weight",), "rows"),
    ("q_norm.weight", ("q_a_layernorm.weight",), "rows"),
    ("q_up_proj.weight", ("q_b_proj.weight",), "rows"),
    ("kv_down_proj.weight", ("kv_a_proj_with_mqa.weight",), "rows"),
    ("kv_norm.weight", ("kv_a_layernorm.weight",), "rows"),
    ("kv_up_proj.weight", ("kv_b_proj.weight",), "rows"),
    ("gate_proj.weight", ("g_proj.weight",), "rows"),
    ("out_proj.weight", ("o_proj.weight",), "rows"),
)
_MOE_NAMES = (
    ("router.score_proj.weight", "gate.weight"),
    ("router.balancer.bias", "gate.e_score_correction_bias"),
    ("latent_down_proj.weight", "routed_expert_down_proj.weight"),
    ("latent_norm.weight", "routed_expert_norm.weight"),
    ("latent_up_proj.weight", "routed_expert_up_proj.weight"),
)


def to_released(state: Mapping[str, torch.Tensor], config: K3Config) -> Iterator[tuple[str, torch.Tensor]]:
    """(released name, tensor) of every tensor, from a K3Model's full state (all experts)."""
    for entry in entries(config):
        yield from zip(entry.released, _split(entry, state[entry.ours], config), strict=True)
    # layer 0's site, which the release stores though nothing reads it
    like = state["output_norm.weight"]
    yield "model.layers.0.self_attention_res_norm.weight", torch.ones_like(like)
    yield "model.layers.0.self_attention_res_proj.weight", torch.zeros_like(like).unsqueeze(0)


def _split(entry: Entry, tensor: torch.Tensor, config: K3Config) -> Iterable[torch.Tensor]:
    if entry.kind == "experts":
        return tensor.unbind(0)
    if entry.kind == "conv":
        return tensor.unsqueeze(1).chunk(len(entry.released))
    if entry.kind == "query":
        return [tensor.unsqueeze(0)]
    if entry.kind == "a_log":
        heads = tensor[: config.kda_num_heads]
        return [F.pad(heads, (0, -heads.numel() % RELEASED_A_LOG_MULTIPLE))]
    return tensor.chunk(len(entry.released))


def from_released(
    read: Callable[[str], torch.Tensor], config: K3Config, local_experts: range | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of a K3Model's state, one at a time.

    Args:
        read: a released tensor by its name, without the prefix `language_model.`.
        local_experts: global ids of the experts to read (a rank's home experts); None: all.
    """
    for entry in entries(config):
        names = entry.released
        if entry.kind == "experts" and local_experts is not None:
            names = tuple(names[expert] for expert in local_experts)
        parts = [read(name) for name in names]
        yield entry.ours, _join(entry, parts, config)


def _join(entry: Entry, parts: list[torch.Tensor], config: K3Config) -> torch.Tensor:
    if entry.kind == "experts":
        return torch.stack(parts)
    if entry.kind == "conv":
        return torch.cat(parts).squeeze(1)
    if entry.kind == "query":
        return parts[0].reshape(-1)
    if entry.kind == "a_log":
        heads = parts[0].flatten()[: config.kda_num_heads]
        return F.pad(heads, (0, config.padded_kda_heads - heads.numel()))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def save_pretrained(model: K3Model, folder: str | Path, max_shard_bytes: int = 5 << 30) -> list[Path]:
    """Write `config.json` and safetensors under released names. Needs all experts in this process.

    Returns:
        The files written. Several shards come with `model.safetensors.index.json`.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "config.json"]
    written[0].write_text(json.dumps(config_to_released(model.config), indent=2) + "\n")
    state = model.state_dict()
    shard_of = _assign_shards(to_released(state, model.config), max_shard_bytes)
    count = max(shard_of.values()) + 1
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    if count == 1:
        names = ["model.safetensors"]
    tensors = to_released(state, model.config)
    for name in names:
        # one shard in memory at a time
        shard = dict(itertools.islice(tensors, sum(names[i] == name for i in shard_of.values())))
        save_file(
            {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in shard.items()},
            folder / name,
            {"format": "pt"},
        )
        written.append(folder / name)
    if count > 1:
        index = {"metadata": {}, "weight_map": {name: names[i] for name, i in shard_of.items()}}
        written.append(folder / "model.safetensors.index.json")
        written[-1].write_text(json.dumps(index, indent=2) + "\n")
    return written


def _assign_shards(tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int) -> dict[str, int]:
    """Shard of each tensor, in order, each shard as full as `max_shard_bytes` allows."""
    shard_of: dict[str, int] = {}
    shard = used = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if used and used + nbytes > max_shard_bytes:
            shard, used = shard + 1, 0
        shard_of[name] = shard
        used += nbytes
    return shard_of


def load_pretrained(
    folder: str | Path,
    experts: ExpertsFactory | None = None,
    balancer: BalancerFactory | None = None,
    local_experts: range | None = None,
) -> K3Model:
    """A K3Model from a folder in the released format.

    Args:
        experts, balancer: as for K3Model.
        local_experts: global ids of the experts this rank holds, where `experts` makes fewer than all.

    Raises:
        ModelConfigError: config.json describes another architecture.
        ValueError: a tensor is missing, has another shape, or is quantised.
    """
    from safetensors import safe_open

    folder = Path(folder)
    config = config_from_released(json.loads((folder / "config.json").read_text()))
    model = K3Model(config, experts, balancer)
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        handle = safe_open(path, framework="pt")
        files.update({name.removeprefix(_WRAPPER): (handle, name) for name in handle.keys()})  # noqa: SIM118

    def read(name: str) -> torch.Tensor:
        if name in files:
            handle, stored = files[name]
            return handle.get_tensor(stored)
        if name.replace(".weight", ".weight_packed") in files:
            raise ValueError(f"{folder}: {name} is stored in MXFP4; dequantise the checkpoint first")
        raise ValueError(f"{folder}: tensor {name} is missing")

    own = model.state_dict()
    for name, tensor in from_released(read, config, local_experts):
        if name not in own or own[name].shape != tensor.shape:
            found = tuple(own[name].shape) if name in own else "no such tensor"
            raise ValueError(f"{folder}: {name} has shape {tuple(tensor.shape)}; this model has {found}")
        own[name].copy_(tensor)
    return model
