"""Every operator of a K3 forward, with shapes, FLOPs and bytes: what someone who brings the model to a chip
needs.

n tokens in this call (prefill: batch x context; decode: batch), c context, d hidden size, C = KDA heads x
head_dim, and K = V = head_dim; MLA: h heads, q query rank, l latent rank, r shared key part; MoE: E experts,
k choices, H latent width, Hi expert width. A multiply-add is 2 FLOPs. Dimensions come from `K3Config`;
formulas from reference implementations named in `formula`. Numbers are of one device out of `chips`:
sequences and experts are spread, all else is replicated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from model.config import K3Config
from moonep.errors import ConfigError
from moonep.simulate.cost import PAYLOAD_BYTES
from moonep.simulate.hardware import Hardware

KDA_CHUNK = 64  # tokens of a chunk in the chunkwise form
PRECISIONS = ("bf16", "fp8", "mxfp4", "fp32")


@dataclass(frozen=True)
class Operator:
    """One operator; flops and bytes are of one instance, `count` instances run in a forward."""

    name: str
    family: str  # KDA | MLA | MoE | dense FFN | residual | embedding and head
    kind: str  # GEMM, grouped GEMM, state update, attention, ...
    count: int
    shape: str
    flops: float
    weight_bytes: float
    activation_bytes: float
    state_bytes: float  # recurrent state or cache, read and written
    link_bytes: float  # sent to other devices
    precision: str  # that picks the FLOP rate
    launches: int  # kernels when every primitive is its own
    fused_launches: int  # kernels with the fusions this project (or a good port) has; 0: part of a neighbour
    formula: str
    inner: float = 0.0  # inner dimension of a product; 0: not a product

    @property
    def memory_bytes(self) -> float:
        return self.weight_bytes + self.activation_bytes + self.state_bytes

    @property
    def intensity(self) -> float:
        """FLOPs a byte of memory traffic."""
        return self.flops / self.memory_bytes if self.memory_bytes else 0.0


@dataclass(frozen=True)
class Workpoint:
    """What is asked of the chip. `precision`: bf16, fp8 (all weights of products) or mxfp4 (routed experts
    MXFP4 with FP8 activations, as K3 is released; the rest bf16)."""

    phase: str = "decode"
    batch: int = 1
    context: int = 4096
    precision: str = "bf16"
    chips: int = 1
    state_bytes: float = 4.0  # of one number of a KDA state
    cache_bytes: float = 2.0  # of one number of the MLA cache

    def __post_init__(self) -> None:
        if self.phase not in ("prefill", "decode"):
            raise ConfigError(f"phase={self.phase}: allowed: prefill, decode")
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision={self.precision}: allowed: {', '.join(PRECISIONS)}")
        for key in ("batch", "context", "chips"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}={getattr(self, key)} must be at least 1")

    @property
    def sequences(self) -> float:
        """Sequences on one device."""
        return self.batch / self.chips

    @property
    def tokens(self) -> float:
        """Tokens of one call on one device (dense operators)."""
        return self.sequences * (self.context if self.phase == "prefill" else 1)

    @property
    def dense(self) -> str:
        """Precision of products outside the routed experts."""
        return "bf16" if self.precision == "mxfp4" else self.precision


def operator_table(config: K3Config, at: Workpoint) -> list[Operator]:
    """All operators of one forward, in the order in which they run."""
    layers = range(config.num_layers)
    mla = sum(config.is_mla(layer) for layer in layers)
    moe = sum(config.is_moe(layer) for layer in layers)
    build = _Builder(config, at)
    table = [build.embedding()]
    table += build.residuals()
    if config.num_layers - mla:
        table += build.kda(config.num_layers - mla)
    if mla:
        table += build.mla(mla)
    if config.num_layers - moe:
        table += build.dense_ffn(config.num_layers - moe)
    if moe:
        table += build.moe(moe)
    table += build.head()
    return table


class _Builder:
    """Builds operators from the dimensions of one model at one workpoint."""

    def __init__(self, config: K3Config, at: Workpoint):
        self.c, self.at, self.n = config, at, at.tokens
        self.width = 4.0 if at.precision == "fp32" else 2.0  # of activations

    def gemm(
        self,
        name: str,
        family: str,
        count: int,
        rows_in: float,
        rows_out: float,
        *,
        precision: str = "",
        fused: int = 1,
    ) -> Operator:
        """y = x W, W [in, out]."""
        precision = precision or self.at.dense
        return Operator(
            name,
            family,
            "GEMM",
            count,
            f"[{self.n:g}, {rows_in:g}] x [{rows_in:g}, {rows_out:g}]",
            2 * self.n * rows_in * rows_out,
            rows_in * rows_out * PAYLOAD_BYTES[precision],
            self.n * (rows_in + rows_out) * self.width,
            0.0,
            0.0,
            precision,
            1,
            fused,
            f"2 n in out = 2 x {self.n:g} x {rows_in:g} x {rows_out:g}",
            rows_in,
        )

    def pointwise(
        self,
        name: str,
        family: str,
        kind: str,
        count: int,
        width: float,
        flops: float,
        passes: float,
        launches: int,
        fused: int,
        formula: str,
        *,
        weights: float = 0.0,
    ) -> Operator:
        """An operator of O(1) FLOPs a value: `flops` a value, `passes` values moved a value."""
        return Operator(
            name,
            family,
            kind,
            count,
            f"[{self.n:g}, {width:g}]",
            self.n * width * flops,
            weights * self.width,
            self.n * width * passes * self.width,
            0.0,
            0.0,
            "vector",
            launches,
            fused,
            formula,
        )

    def norm(self, name: str, family: str, count: int, width: float, fused: int = 1) -> Operator:
        return self.pointwise(
            name,
            family,
            "RMSNorm",
            count,
            width,
            4,
            2,
            4,
            fused,
            "square, sum, scale, weight: 4 a value",
            weights=width,
        )

    # embedding, residual path, head

    def embedding(self) -> Operator:
        d = self.c.hidden_size
        return self.pointwise(
            "embedding", "embedding and head", "look-up", 1, d, 0, 2, 1, 1, "n rows of d read, written"
        )

    def head(self) -> list[Operator]:
        d, vocab = self.c.hidden_size, self.c.vocab_size
        rows = self.at.sequences
        # Prefill needs the logits of each sequence's last token only.
        product = Operator(
            "language-model head",
            "embedding and head",
            "GEMM",
            1,
            f"[{rows:g}, {d}] x [{d}, {vocab}]",
            2 * rows * d * vocab,
            d * vocab * PAYLOAD_BYTES[self.at.dense],
            rows * (d + vocab) * self.width,
            0.0,
            0.0,
            self.at.dense,
            1,
            1,
            "2 x sequences x d x vocabulary (the last token of each sequence)",
            d,
        )
        softmax = Operator(
            "softmax over the vocabulary",
            "embedding and head",
            "softmax",
            1,
            f"[{rows:g}, {vocab}]",
            5 * rows * vocab,
            0.0,
            2 * rows * vocab * 4.0,
            0.0,
            0.0,
            "vector",
            3,
            1,
            "maximum, exponential, sum, division in fp32: 5 a logit",
        )
        return [self.norm("final norm", "embedding and head", 1, d), product, softmax]

    def residual_sources(self) -> float:
        """Sources over all sites, on average: block sums below and the running sum (Attention Residuals)."""
        block, total, sites = self.c.attention_residual_block_size, 0, 0
        for layer in range(self.c.num_layers):
            below = -(-layer // block)
            opened = layer // block + 1
            if layer:
                # At a block's first mixer the block just ended is still the running sum.
                total += below + 1
                sites += 1
            total += opened + 1
            sites += 1
        total += -(-self.c.num_layers // block) + 1
        return total / (sites + 1)

    def residuals(self) -> list[Operator]:
        d, mean = self.c.hidden_size, self.residual_sources()
        sites = 2 * self.c.num_layers
        mix = Operator(
            "Attention Residuals",
            "residual",
            "depth attention",
            sites,
            f"[{self.n:g}, {mean:.2f} sources, {d}]",
            6 * self.n * mean * d,
            2 * d * self.width,
            self.n * d * (mean + 1) * self.width,
            0.0,
            0.0,
            "vector",
            8,
            1,
            "rms 2, dot 2, weighted sum 2 a source and channel; mean number of sources over all sites",
        )
        add = self.pointwise(
            "residual addition", "residual", "add", sites, d, 1, 3, 1, 0, "running sum + output: 1 a channel"
        )
        return [mix, self.norm("pre-norms", "residual", sites, d, 0), add]

    # KDA

    def kda(self, count: int) -> list[Operator]:
        c, d, channels = self.c, self.c.hidden_size, self.c.kda_size
        heads, k = c.kda_num_heads, c.kda_head_dim
        family = "KDA"
        conv = self.pointwise(
            "short convolution and SiLU",
            family,
            "convolution",
            count,
            3 * channels,
            2 * c.conv_kernel_size + 4,
            2,
            6,
            1,
            f"{c.conv_kernel_size} taps x 2 + SiLU 4, on q, k and v",
            weights=3 * channels * c.conv_kernel_size,
        )
        gate = self.pointwise(
            "decay gate",
            family,
            "gate",
            count,
            channels,
            8,
            2,
            4,
            0,
            "g = bound x sigmoid(exp(A) (z + bias)), exp: 8",
        )
        l2 = self.pointwise(
            "L2 norm of q and k", family, "norm", count, 2 * channels, 4, 2, 8, 0, "4 a value"
        )
        out_norm = self.pointwise(
            "gated RMSNorm of the output",
            family,
            "norm",
            count,
            channels,
            9,
            3,
            6,
            1,
            "norm 4, sigmoid 4, product 1",
        )
        return [
            self.gemm("q, k, v projections", family, count, d, 3 * channels),
            self.gemm("decay down-projection", family, count, d, k),
            self.gemm("decay up-projection", family, count, k, channels),
            self.gemm("beta projection", family, count, d, heads),
            self.gemm("output-gate projection", family, count, d, channels),
            conv,
            gate,
            l2,
            self._kda_state(count),
            out_norm,
            self.gemm("output projection", family, count, channels, d),
        ]

    def _kda_state(self, count: int) -> Operator:
        heads, k = self.c.kda_num_heads, self.c.kda_head_dim
        state = self.at.sequences * heads * k * k * self.at.state_bytes
        if self.at.phase == "decode":
            each, name = 7 * k * k, "KDA state update"
            formula = "a token and head: decay K V, S'k 2 K V, outer product 2 K V, S'q 2 K V = 7 K V"
            traffic = self.n * heads * 5 * k * self.width
        else:
            chunk = KDA_CHUNK
            each, name = 4 * chunk * k + 2 * chunk * 2 * k + 2 * chunk * k + 6 * k * k, "KDA chunkwise"
            formula = (
                f"a token and head, chunk C={chunk}: two C x C products 4 C K, W and U 2 C (K + V), output "
                f"2 C V, "
                "three products with the state 6 K V"
            )
            traffic = self.n * heads * (5 * k * self.width)
        return Operator(
            name,
            "KDA",
            "state update",
            count,
            f"{heads} heads x [{k}, {k}] x {self.at.sequences:g} sequences",
            self.n * heads * each,
            0.0,
            traffic,
            2 * state,
            0.0,
            "vector" if self.at.phase == "decode" else "bf16",
            12 if self.at.phase == "decode" else 20,
            1 if self.at.phase == "decode" else 2,
            formula,
        )

    # Gated MLA

    def mla(self, count: int) -> list[Operator]:
        c, d, h = self.c, self.c.hidden_size, self.c.mla_num_heads
        values = h * c.v_head_dim
        family = "MLA"
        table = [
            self.gemm("q down-projection", family, count, d, c.q_lora_rank),
            self.norm("q latent norm", family, count, c.q_lora_rank),
            self.gemm("q up-projection", family, count, c.q_lora_rank, h * c.qk_head_dim),
            self.gemm("kv down-projection", family, count, d, c.kv_lora_rank + c.qk_rope_head_dim),
            self.norm("kv latent norm", family, count, c.kv_lora_rank),
        ]
        table += self._mla_decode(count) if self.at.phase == "decode" else self._mla_prefill(count)
        gate = self.pointwise(
            "sigmoid output gate", family, "gate", count, values, 5, 3, 2, 0, "sigmoid 4, product 1"
        )
        return [
            *table,
            self.gemm("output-gate projection", family, count, d, values),
            gate,
            self.gemm("output projection", family, count, values, d),
        ]

    def _mla_decode(self, count: int) -> list[Operator]:
        """Absorbed: queries go into the latent space, so the cache is read once for all heads."""
        c, h, context = self.c, self.c.mla_num_heads, self.at.context
        latent, shared = c.kv_lora_rank, c.qk_rope_head_dim
        cache = self.at.sequences * context * (latent + shared) * self.at.cache_bytes
        attend = Operator(
            "attention over the latent cache",
            "MLA",
            "attention",
            count,
            f"{self.at.sequences:g} x {h} heads x {context} x {latent + shared}",
            self.n * h * context * (2 * (latent + shared) + 2 * latent + 5),
            0.0,
            self.n * h * (2 * latent + shared) * self.width,
            cache,
            0.0,
            "bf16",
            4,
            1,
            "scores 2 h c (l + r), softmax 5 h c, weighted latents 2 h c l; cache c (l + r) numbers a "
            "sequence",
        )
        absorb = self._per_head("query into latent space", count, c.qk_nope_head_dim, latent)
        expand = self._per_head("values out of latent space", count, latent, c.v_head_dim)
        return [absorb, attend, expand]

    def _per_head(self, name: str, count: int, wide: int, out: int) -> Operator:
        h = self.c.mla_num_heads
        return Operator(
            name,
            "MLA",
            "GEMM",
            count,
            f"{h} heads x [{self.n:g}, {wide}] x [{wide}, {out}]",
            2 * self.n * h * wide * out,
            h * wide * out * PAYLOAD_BYTES[self.at.dense],
            self.n * h * (wide + out) * self.width,
            0.0,
            0.0,
            self.at.dense,
            1,
            1,
            "2 n h in out (the absorbed half of the kv up-projection)",
            wide,
        )

    def _mla_prefill(self, count: int) -> list[Operator]:
        c, h, context = self.c, self.c.mla_num_heads, self.at.context
        up = self.gemm(
            "kv up-projection", "MLA", count, c.kv_lora_rank, h * (c.qk_nope_head_dim + c.v_head_dim)
        )
        pairs = self.at.sequences * context * (context + 1) / 2
        attend = Operator(
            "causal attention",
            "MLA",
            "attention",
            count,
            f"{self.at.sequences:g} x {h} heads x {context}^2/2 x ({c.qk_head_dim}, {c.v_head_dim})",
            pairs * h * (2 * c.qk_head_dim + 2 * c.v_head_dim + 5),
            0.0,
            self.n * h * (2 * c.qk_head_dim + 2 * c.v_head_dim) * self.width,
            self.n * (c.kv_lora_rank + c.qk_rope_head_dim) * self.at.cache_bytes,
            0.0,
            "bf16",
            4,
            1,
            "pairs c (c + 1) / 2 a sequence and head: scores 2 qk, softmax 5, values 2 v",
        )
        return [up, attend]

    # feed-forward

    def dense_ffn(self, count: int) -> list[Operator]:
        d, width = self.c.hidden_size, self.c.dense_ffn_size
        return [
            self.gemm("gate and up projections", "dense FFN", count, d, 2 * width),
            self._situ("SiTU", "dense FFN", count, self.n, width),
            self.gemm("down-projection", "dense FFN", count, width, d),
        ]

    def _situ(self, name: str, family: str, count: int, rows: float, width: float) -> Operator:
        return Operator(
            name,
            family,
            "SiTU",
            count,
            f"[{rows:g}, {width:g}] x 2",
            rows * width * 20,
            0.0,
            rows * width * 3 * self.width,
            0.0,
            0.0,
            "vector",
            8,
            0,
            "two tanh, one sigmoid, products: about 20 a value",
        )

    def experts_touched(self) -> float:
        """Experts of one device with at least one token, expected under balanced routing."""
        total = self.at.tokens * self.at.chips
        return self.c.num_experts / self.at.chips * (1 - (1 - self.c.top_k / self.c.num_experts) ** total)

    def moe(self, count: int) -> list[Operator]:
        c, d = self.c, self.c.hidden_size
        shared = c.num_shared_experts * c.expert_ffn_size
        router = self.gemm("router (fp32)", "MoE", count, d, c.num_experts, precision="fp32")
        top_k = self.pointwise(
            f"sigmoid, bias, top-{c.top_k}",
            "MoE",
            "top-k",
            count,
            c.num_experts,
            8,
            2,
            5,
            1,
            "sigmoid 4, bias 1, selection about 3 a score",
        )
        table = [router, top_k, self.gemm("latent down-projection", "MoE", count, d, c.latent_size)]
        table += self._exchange("dispatch all-to-all", count)
        table += self._grouped(count)
        table += self._exchange("combine all-to-all", count)
        table += [
            self.pointwise(
                "weighted sum of the experts",
                "MoE",
                "residual",
                count,
                c.latent_size,
                2 * c.top_k,
                c.top_k + 1,
                2,
                1,
                "2 k a latent channel",
            ),
            self.norm("latent norm", "MoE", count, c.latent_size),
            self.gemm("latent up-projection", "MoE", count, c.latent_size, d),
        ]
        if shared:
            table += [
                self.gemm("shared experts: gate and up", "MoE", count, d, 2 * shared),
                self._situ("shared experts: SiTU", "MoE", count, self.n, shared),
                self.gemm("shared experts: down", "MoE", count, shared, d),
            ]
        return table

    def _grouped(self, count: int) -> list[Operator]:
        c = self.c
        rows, experts = self.n * c.top_k, self.experts_touched()
        weight = PAYLOAD_BYTES[self.at.precision]
        out = []
        for name, wide, narrow in (
            ("routed experts: gate and up", c.latent_size, 2 * c.expert_ffn_size),
            ("routed experts: down", c.expert_ffn_size, c.latent_size),
        ):
            out.append(
                Operator(
                    name,
                    "MoE",
                    "grouped GEMM",
                    count,
                    f"{experts:.1f} experts, [{rows:g}, {wide}] x [{wide}, {narrow}]",
                    2 * rows * wide * narrow,
                    experts * wide * narrow * weight,
                    rows * (wide + narrow) * (1.0 if self.at.precision in ("fp8", "mxfp4") else self.width),
                    0.0,
                    0.0,
                    "fp8" if self.at.precision == "mxfp4" else self.at.precision,
                    1,
                    1,
                    "2 n k in out; weights of the experts touched, E (1 - (1 - k/E)^n)",
                    wide,
                )
            )
        return [out[0], self._situ("routed experts: SiTU", "MoE", count, rows, c.expert_ffn_size), out[1]]

    def _exchange(self, name: str, count: int) -> list[Operator]:
        """Rows to other devices, one for each (token, device) pair."""
        chips = self.at.chips
        if chips == 1:
            return []
        reached = chips * (1 - (1 - 1 / chips) ** self.c.top_k)
        rows = self.n * reached * (chips - 1) / chips
        bytes_ = rows * self.c.latent_size * self.width
        return [
            Operator(
                name,
                "MoE",
                "all-to-all",
                count,
                f"[{rows:g}, {self.c.latent_size}]",
                0.0,
                0.0,
                2 * bytes_,
                0.0,
                bytes_,
                "vector",
                4,
                2,
                "n P (1 - (1 - 1/P)^k) (P - 1)/P rows of the latent width on P devices",
            )
        ]


@dataclass(frozen=True)
class Timed:
    """An operator on a chip: seconds of all its instances and what bounds them."""

    operator: Operator
    seconds: float
    bound: str  # compute | memory | link | launch


def vector_flops(hardware: Hardware) -> float:
    """FLOP/s of the non-matrix units: about a fifteenth of the dense bf16 rate on current accelerators (H200:
    67 of 989 TFLOP/s in fp32)."""
    share = 1.0 if hardware.device == "cpu" else 67 / 989
    return hardware.peak_bf16_tflops * 1e12 * share


def time_operators(table: list[Operator], hardware: Hardware, *, fused: bool = True) -> list[Timed]:
    """Roofline time of each operator: the longest of its FLOPs, its bytes, its link and its launches."""
    return [_timed(operator, hardware, fused) for operator in table]


def _timed(operator: Operator, hardware: Hardware, fused: bool) -> Timed:
    if operator.precision == "vector":
        rate = vector_flops(hardware)
    else:
        rate = hardware.tflops(operator.precision) * 1e12 * hardware.depth_factor(operator.inner)
    launches = operator.fused_launches if fused else operator.launches
    memory = operator.memory_bytes / (hardware.hbm_gb_s * 1e9)
    if fused and operator.fused_launches == 0:
        # Part of a neighbouring kernel: its values pass through registers.
        memory = 0.0
    parts = {
        "compute": operator.flops / rate,
        "memory": memory,
        "link": operator.link_bytes / (hardware.link_gb_s * 1e9),
        "launch": launches * hardware.launch_us * 1e-6,
    }
    bound = max(parts, key=lambda key: parts[key])
    return Timed(operator, parts[bound] * operator.count, bound)


def launches(table: list[Operator], *, fused: bool) -> int:
    """Kernel launches of one forward."""
    return sum(o.count * (o.fused_launches if fused else o.launches) for o in table)


def totals(table: list[Operator]) -> dict[str, float]:
    """FLOPs and bytes of one forward on one device."""
    out = {"flops": 0.0, "weight_bytes": 0.0, "activation_bytes": 0.0, "state_bytes": 0.0, "link_bytes": 0.0}
    for operator in table:
        for key in out:
            out[key] += operator.count * getattr(operator, key)
    return out


def decode_bytes(config: K3Config, at: Workpoint) -> dict[str, float]:
    """Bytes a decode step must move on one device: active weights, KDA states (read and written), MLA
    cache."""
    table = operator_table(config, at)
    state: Iterator[float] = (o.count * o.state_bytes for o in table if o.family == "KDA")
    cache = (o.count * o.state_bytes for o in table if o.family == "MLA")
    return {
        "weights": sum(o.count * o.weight_bytes for o in table),
        "kda_state": sum(state),
        "mla_cache": sum(cache),
    }


def weight_gigabytes(config: K3Config, precision: str) -> float:
    """All weights of the model, GB: routed experts in `precision`, the rest in bf16 when it is mxfp4."""
    total, _ = config.num_parameters()
    sizes = config.parameter_sizes()
    routed = len(config.moe_layers) * config.num_experts * sizes["expert"]
    dense = "bf16" if precision == "mxfp4" else precision
    return (routed * PAYLOAD_BYTES[precision] + (total - routed) * PAYLOAD_BYTES[dense]) / 1e9
