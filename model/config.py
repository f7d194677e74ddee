"""The shape of a K3 text model: one frozen dataclass, and exact parameter counts without allocation."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from model.presets import PRESETS


class ModelConfigError(ValueError):
    """A field of K3Config is outside its range or contradicts another. One line that names the field."""


_POSITIVE = (
    "vocab_size",
    "num_layers",
    "kda_num_heads",
    "conv_kernel_size",
    "mla_num_heads",
    "num_experts",
    "top_k",
    "attention_residual_block_size",
    "max_context",
)
# DeepSpeed lays parameters end to end; GPU kernels need each to start on 16 bytes, hence 8 elements (bf16).
_MULTIPLE_OF_8 = (
    "hidden_size",
    "kda_head_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "dense_ffn_size",
    "latent_size",
    "expert_ffn_size",
)
_STRICTLY_POSITIVE = (
    "situ_beta_gate",
    "situ_beta_up",
    "rms_norm_eps",
    "mla_norm_eps",
    "routed_scaling_factor",
)
_NON_NEGATIVE = ("mla_every", "num_dense_layers", "num_shared_experts", "num_mtp_layers")


@dataclass(frozen=True, kw_only=True)
class K3Config:
    """Sizes and constants of a K3 text model (K3 technical report, table 1, and the released config).

    Layers are counted from 0. A layer is a token mixer (KDA, or Gated MLA every `mla_every` layers and in the
    last layer) followed by an FFN (dense in the first `num_dense_layers` layers, else Stable LatentMoE).

    Raises:
        ModelConfigError: a field is outside its range or contradicts another.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    mla_every: int = 4  # every 4th layer and the last are MLA; 1: all layers; 0: none
    # KDA
    kda_num_heads: int
    kda_head_dim: int = 128  # of keys and values; also the rank of the decay projection
    conv_kernel_size: int = 4
    gate_lower_bound: float = -5.0  # of the log decay of one token
    # Gated MLA, without positions; "rope" dimensions exist and are never rotated
    mla_num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    # FFN
    num_dense_layers: int = 1
    dense_ffn_size: int
    num_experts: int
    top_k: int
    num_shared_experts: int = 2
    latent_size: int  # width dispatched to routed experts
    expert_ffn_size: int
    renormalize: bool = True  # route weights: raw scores divided by their sum over the top-k
    routed_scaling_factor: float = 1.0
    situ_beta_gate: float = 4.0
    situ_beta_up: float = 25.0
    # residuals, norms, embeddings
    attention_residual_block_size: int = 12  # layers of a block
    rms_norm_eps: float = 1e-5
    mla_norm_eps: float = 1e-6  # of the norms on the MLA latents
    tie_embeddings: bool = False
    max_context: int = 1_048_576
    # multi-token prediction
    num_mtp_layers: int = 0  # 0 or 1
    mtp_weight: float = 0.1

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_routing()

    @classmethod
    def preset(cls, name: str, **changes: Any) -> K3Config:
        """The configuration `name` (k3, k3-mini, nano, tiny) with fields replaced by `changes`.

        Raises:
            ModelConfigError: unknown preset or field, or a value out of range.
        """
        if name not in PRESETS:
            near = difflib.get_close_matches(str(name), PRESETS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ModelConfigError(f"model preset {name!r} is unknown; allowed: {', '.join(PRESETS)}{hint}")
        return cls.from_dict({**PRESETS[name], **changes})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> K3Config:
        """The configuration with these fields. Inverse of `to_dict`.

        Raises:
            ModelConfigError: unknown or missing field, or a value out of range.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name in values:
            if name not in fields:
                near = difflib.get_close_matches(name, fields, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ModelConfigError(f"model.{name} is no field of K3Config{hint}")
        missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
        if missing:
            raise ModelConfigError(f"model.{missing[0]} has no value; K3Config needs {', '.join(missing)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name."""
        return dataclasses.asdict(self)

    # layout

    def is_mla(self, layer: int) -> bool:
        """Whether layer `layer` (from 0; an MTP layer follows the last) mixes tokens by MLA, not KDA."""
        if self.mla_every == 0:
            return False
        return layer >= self.num_layers - 1 or (layer + 1) % self.mla_every == 0

    def is_moe(self, layer: int) -> bool:
        """Whether the FFN of layer `layer` (from 0) is a LatentMoE."""
        return layer >= self.num_dense_layers

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts, an MTP layer (index `num_layers`) included."""
        return tuple(layer for layer in range(self.num_layers + self.num_mtp_layers) if self.is_moe(layer))

    @property
    def qk_head_dim(self) -> int:
        """Width of an MLA query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kda_size(self) -> int:
        """Channels of a KDA layer: heads x head_dim."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def output_gain(self) -> float:
        """Initial gain of every projection that writes to the residual stream: a block sums two outputs a
        layer, and the sum then starts with about the unit variance of the embedding beside it."""
        return (2 * min(self.attention_residual_block_size, self.num_layers)) ** -0.5

    @property
    def padded_kda_heads(self) -> int:
        """Length of the parameter `A_log`: heads rounded up to 8, so that it fills 16 bytes in bf16."""
        return -(-self.kda_num_heads // 8) * 8

    # parameter counts

    def parameter_sizes(self) -> dict[str, int]:
        """Parameters of each building block, norms before it excluded:
        kda, mla, dense, moe (what every token passes: router, latent projections and norm, shared experts),
        expert (one routed expert), attention_residual (one site), norm (an RMSNorm of the hidden size),
        embedding.
        """
        d, kda = self.hidden_size, self.kda_size
        decay = (d + kda) * self.kda_head_dim + kda + self.padded_kda_heads
        beta_conv_norm = d * self.kda_num_heads + 3 * kda * self.conv_kernel_size + self.kda_head_dim
        heads, rank = self.mla_num_heads, self.q_lora_rank + self.kv_lora_rank
        mla = d * (rank + self.qk_rope_head_dim) + rank
        mla += heads * self.q_lora_rank * self.qk_head_dim
        mla += heads * self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        mla += 2 * d * heads * self.v_head_dim
        shared = 3 * d * self.num_shared_experts * self.expert_ffn_size
        return {
            "kda": 5 * d * kda + decay + beta_conv_norm,
            "mla": mla,
            "dense": 3 * d * self.dense_ffn_size,
            "moe": d * self.num_experts + 2 * d * self.latent_size + self.latent_size + shared,
            "expert": 3 * self.latent_size * self.expert_ffn_size,
            "attention_residual": 2 * d,
            "norm": d,
            "embedding": self.vocab_size * d,
        }

    def num_parameters(self) -> tuple[int, int]:
        """(total, active) parameters, exactly those of K3Model, without allocating.

        Active: what one token passes through. Of the routed experts top_k count; the head counts, tied or
        not; an untied input embedding (a table look-up) does not. An MTP layer counts in both.
        """
        size = self.parameter_sizes()
        layers = self.num_layers + self.num_mtp_layers
        num_mla = sum(self.is_mla(layer) for layer in range(layers))
        num_moe = len(self.moe_layers)
        always = num_mla * size["mla"] + (layers - num_mla) * size["kda"]
        always += num_moe * size["moe"] + (layers - num_moe) * size["dense"]
        always += 2 * layers * size["norm"] + size["norm"]
        # layer 0 has nothing to mix before its mixer; the output has a site; so has an MTP layer's output
        always += 2 * self.num_layers * size["attention_residual"]
        if self.num_mtp_layers:
            always += 2 * size["attention_residual"] + 3 * size["norm"] + 2 * self.hidden_size**2
        always += size["embedding"]
        embedding = 0 if self.tie_embeddings else size["embedding"]
        total = always + embedding + num_moe * self.num_experts * size["expert"]
        return total, always + num_moe * self.top_k * size["expert"]

    # validation

    def _check_numbers(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kind = str(field.type)
            allowed = {"int": (int,), "float": (int, float), "bool": (bool,)}[kind]
            if not isinstance(value, allowed) or isinstance(value, bool) != (kind == "bool"):
                raise ModelConfigError(f"model.{field.name}={value!r} must be of type {kind}")
        for name in _POSITIVE:
            self._require(getattr(self, name) >= 1, name, "must be at least 1")
        for name in _NON_NEGATIVE:
            self._require(getattr(self, name) >= 0, name, "must not be negative")
        for name in _MULTIPLE_OF_8:
            value = getattr(self, name)
            self._require(value >= 8 and value % 8 == 0, name, "must be a multiple of 8 (16-byte alignment)")
        for name in _STRICTLY_POSITIVE:
            self._require(getattr(self, name) > 0, name, "must be positive")
        self._require(self.mtp_weight >= 0, "mtp_weight", "must not be negative")
        self._require(self.num_mtp_layers <= 1, "num_mtp_layers", "must be 0 or 1")
        self._require(self.kda_head_dim <= 256, "kda_head_dim", "must be at most 256 (KDA kernels' limit)")
        self._require(
            self.v_head_dim <= self.qk_head_dim,
            "v_head_dim",
            f"must be at most qk_nope_head_dim + qk_rope_head_dim = {self.qk_head_dim}",
        )
        self._require(-5 <= self.gate_lower_bound < 0, "gate_lower_bound", "must lie in [-5, 0)")
        self._require(
            self.num_dense_layers <= self.num_layers,
            "num_dense_layers",
            f"must be at most model.num_layers={self.num_layers}",
        )

    def _check_routing(self) -> None:
        self._require(
            self.top_k < self.num_experts,
            "top_k",
            f"must be below model.num_experts={self.num_experts} (balancing needs the (top_k+1)-th score)",
        )
        self._require(
            self.top_k > 1 or not self.renormalize,
            "top_k",
            "with model.renormalize=true gives every route the weight 1 and the router no gradient; "
            "use model.top_k>=2 or model.renormalize=false",
        )

    def _require(self, condition: bool, name: str, rule: str) -> None:
        if not condition:
            raise ModelConfigError(f"model.{name}={getattr(self, name)!r} {rule}")
