"""Memory, FLOPs and time of training a K3 model on a cluster, by rank and part, without allocating anything.

Ranks = dp x pp x cp; experts are spread over `ep` ranks of a pipeline stage and repeated over edp = ranks /
(pp ep). Dense parameters are repeated over ranks / pp. P parameters of a rank; width = 2 bytes in bf16, 4 in
fp32:

    parameters   width P
    gradients    4 P in fp32 (sharded over the repeats under ZeRO-2)
    optimizer    bf16: 12 P (fp32 master, two moments); fp32: 8 P, and 4 P of master under ZeRO; sharded under
    ZeRO-1, 2 activations  what autograd keeps for backward (`saved_values`), of every micro-batch in flight
    shard        rows received by the experts, their gradients and what passes between the products, shared by
    all
                 layers: the runtime keeps no row, backward sends and computes them again
    pools        copied experts, weights and fp32 gradients, shared by all layers
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from model.config import K3Config
from moonep.errors import ConfigError
from moonep.simulate.cost import LayerShape
from moonep.simulate.hardware import Hardware
from moonep.simulate.memory import expert_memory, reserved_rows
from moonep.simulate.operators import Workpoint, operator_table, time_operators

# Values of one KDA channel that autograd keeps: the CPU reference (measured: 22), the GPU kernels (inputs of
# the
# convolution, of the core and of the gated norm 9, chunk states and factors 3).
KDA_SAVED = {"cpu": 22.0, "cuda": 12.0, "npu": 12.0}
# Values of one channel between the products of a gated FFN: the reference keeps each tanh and the sigmoid.
SITU_SAVED = {"cpu": 3.0, "cuda": 2.0, "npu": 2.0}


@dataclass(frozen=True)
class TrainingSetup:
    """How a model is trained. `tau` None: no balancing (static). Tokens of a step = micro_batch x context x
    dp x accumulation."""

    devices: int = 8
    ep: int = 8
    pp: int = 1
    cp: int = 1
    zero: int = 1
    micro_batch: int = 1
    context: int = 4096
    accumulation: int = 1
    precision: str = "bf16"
    recompute: bool = False
    tau: float | None = 1.0
    slots: int | None = None
    token_padding: int = 8
    overlap: bool = False

    @property
    def dp(self) -> int:
        return self.devices // (self.pp * self.cp)

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage: over them dense parameters are repeated and experts spread."""
        return self.devices // self.pp

    @property
    def edp(self) -> int:
        return self.stage_ranks // self.ep

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank (S)."""
        return -(-self.micro_batch * self.context // self.cp)

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batch * self.context * self.dp * self.accumulation

    def validate(self, config: K3Config) -> TrainingSetup:
        """Raises ConfigError naming the key that contradicts another."""
        for key in ("devices", "ep", "pp", "cp", "micro_batch", "context", "accumulation"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}={getattr(self, key)} must be at least 1")
        if self.devices % (self.pp * self.cp):
            raise ConfigError(f"devices={self.devices} must be a multiple of pp x cp = {self.pp * self.cp}")
        if self.stage_ranks % self.ep:
            raise ConfigError(
                f"parallel.ep={self.ep} must divide the {self.stage_ranks} ranks of a stage (devices / pp)"
            )
        if config.num_experts % self.ep:
            raise ConfigError(f"parallel.ep={self.ep} must divide the model's {config.num_experts} experts")
        if self.pp > config.num_layers:
            raise ConfigError(f"parallel.pp={self.pp} exceeds the model's {config.num_layers} layers")
        if self.zero not in (0, 1, 2):
            raise ConfigError(f"parallel.zero={self.zero}: allowed: 0, 1, 2")
        if self.precision not in ("bf16", "fp32"):
            raise ConfigError(f"precision={self.precision}: training runs in bf16 or fp32")
        return self


def saved_values(config: K3Config, device: str = "cuda") -> dict[str, float]:
    """Values (not bytes) that autograd keeps for each token: of one layer of each kind, and once a model.

    residual: both sub-layers' running sums, mixed inputs and normed inputs; mixers and FFNs: inputs of
    products and of pointwise operators; `experts` is kept for each routed row instead and counted by the
    shard.
    """
    d, channels, heads = config.hidden_size, config.kda_size, config.kda_num_heads
    values = config.mla_num_heads * config.v_head_dim
    wide = max(config.qk_head_dim, config.v_head_dim)
    shared = config.num_shared_experts * config.expert_ffn_size
    gated = SITU_SAVED[device] + 1
    kda = KDA_SAVED[device] * channels + config.kda_head_dim
    if device == "cpu":
        kda += 96 * heads + channels * config.kda_head_dim / 32
    return {
        "residual": 6 * d,
        "kda": kda,
        "mla": 4 * config.mla_num_heads * wide + 3 * values + 2 * config.q_lora_rank + 2 * config.kv_lora_rank
        + config.qk_rope_head_dim,
        "dense": gated * config.dense_ffn_size,
        "moe": gated * shared + 3 * config.latent_size + config.num_experts + 12 * config.top_k,
        "ends": 2.5 * d,
    }  # fmt: skip


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of the fullest rank."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    shard: float
    pools: float
    logits: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())

    def to_dict(self) -> dict[str, float]:
        return {**asdict(self), "total": self.total}


def rank_parameters(config: K3Config, setup: TrainingSetup) -> tuple[float, float]:
    """(dense, expert) parameters of the fullest rank: layers spread evenly over stages, head or embedding on
    one."""
    sizes = config.parameter_sizes()
    total, _ = config.num_parameters()
    routed = len(config.moe_layers) * config.num_experts * sizes["expert"]
    ends = sizes["embedding"] * (1 if config.tie_embeddings else 2)
    body = total - routed - ends
    share = math.ceil(config.num_layers / setup.pp) / config.num_layers
    end = ends if setup.pp == 1 else sizes["embedding"]
    return body * share + end, routed * share / setup.ep


def _optimizer_bytes(setup: TrainingSetup, parameters: float, repeats: int) -> float:
    if setup.precision == "fp32":
        each = 8.0 if setup.zero == 0 else 12.0
    else:
        each = 12.0
    return parameters * each / (repeats if setup.zero else 1)


def training_memory(config: K3Config, setup: TrainingSetup, device: str = "cuda") -> TrainingMemory:
    """Bytes of the fullest rank, part by part."""
    width = 2.0 if setup.precision == "bf16" else 4.0
    dense, experts = rank_parameters(config, setup)
    repeats = setup.stage_ranks
    shard_gradients = setup.zero == 2
    layers = math.ceil(config.num_layers / setup.pp)
    moe_layers = math.ceil(len(config.moe_layers) / setup.pp)
    shape = expert_shape(config, setup)
    rows, slots = reserved_rows(
        num_ranks=setup.ep,
        num_experts=config.num_experts,
        capacity=setup.tokens,
        top_k=config.top_k,
        tau=setup.tau,
        slots=setup.slots,
        padding=setup.token_padding,
    )
    expert = expert_memory(
        shape,
        epn=config.num_experts // setup.ep,
        layers=moe_layers,
        copies_held=slots,
        rows_reserved=rows,
        rows_peak=rows,
    )
    in_flight = min(
        setup.pp, setup.accumulation
    )  # 1F1B: the first stage holds one micro-batch for each stage
    return TrainingMemory(
        parameters=(dense + experts) * width,
        gradients=4.0
        * (dense / (repeats if shard_gradients else 1) + experts / (setup.edp if shard_gradients else 1)),
        optimizer=_optimizer_bytes(setup, dense, repeats) + _optimizer_bytes(setup, experts, setup.edp),
        activations=_activation_values(config, setup, layers, device) * setup.tokens * width * in_flight,
        # One layer's expert gradients in fp32 pass on their way to the accumulator.
        shard=expert.shard_reserved + 4.0 * shape.expert_parameters * (config.num_experts // setup.ep),
        pools=expert.pools,
        logits=min(setup.tokens, 4096) * config.vocab_size * 4.0 * 2 / 16,
    )


def _activation_values(config: K3Config, setup: TrainingSetup, layers: int, device: str) -> float:
    """Values a token keeps over the layers of one stage, routed rows excluded."""
    saved = saved_values(config, device)
    mla_share = sum(config.is_mla(layer) for layer in range(config.num_layers)) / config.num_layers
    moe_share = len(config.moe_layers) / config.num_layers
    mixer = mla_share * saved["mla"] + (1 - mla_share) * saved["kda"]
    ffn = moe_share * saved["moe"] + (1 - moe_share) * saved["dense"]
    if not setup.recompute:
        return layers * (saved["residual"] + mixer + ffn) + saved["ends"]
    # Checkpointed regions keep their inputs: two running sums, the latent input and output of the experts.
    # One layer
    # at a time is recomputed in full.
    kept = 2 * config.hidden_size + moe_share * (3 * config.latent_size + 12 * config.top_k)
    working = (
        saved["residual"]
        + max(saved["mla"], saved["kda"])
        + max(saved["moe"], saved["dense"] * (1 - moe_share))
    )
    return layers * kept + working + saved["ends"]


# Time


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step."""

    dense_compute: float
    expert_layers: float
    gradient_reduce: float
    optimizer: float
    bubble: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())

    def to_dict(self) -> dict[str, float]:
        return {**asdict(self), "total": self.total}


def flops_per_token(config: K3Config, context: int) -> dict[str, float]:
    """Training FLOPs a token. `parameters`: 6 x active parameters (what MFU counts); `mixers`: three
    forwards' worth of attention and KDA recurrences, which parameters do not count."""
    _, active = config.num_parameters()
    table = operator_table(config, Workpoint("prefill", 1, context, "bf16"))
    mixers = sum(o.flops * o.count for o in table if o.kind in ("attention", "state update")) / context
    return {"parameters": 6.0 * active, "mixers": 3.0 * mixers, "total": 6.0 * active + 3.0 * mixers}


def dense_seconds(config: K3Config, setup: TrainingSetup, hardware: Hardware) -> float:
    """Forward and backward of one micro-batch on one rank without its expert layers: operators' roofline
    times, three times (four with recomputation), the head on every token."""
    sequences = setup.tokens / setup.context
    at = Workpoint("prefill", 1, setup.context, setup.precision)
    # CPUs run the reference, operator by operator.
    times = time_operators(operator_table(config, at), hardware, fused=hardware.device != "cpu")
    seconds = 0.0
    for timed in times:
        operator = timed.operator
        if operator.kind in ("grouped GEMM", "all-to-all") or operator.name == "routed experts: SiTU":
            continue
        if operator.name in ("language-model head", "softmax over the vocabulary"):
            continue
        seconds += timed.seconds
    head = (
        2 * setup.context * config.hidden_size * config.vocab_size / (hardware.tflops(setup.precision) * 1e12)
    )
    share = math.ceil(config.num_layers / setup.pp) / config.num_layers
    passes = 4 if setup.recompute else 3
    return sequences * (passes * seconds * share + 4 * head / setup.pp)


def expert_shape(config: K3Config, setup: TrainingSetup, **changes: object) -> LayerShape:
    """The expert layer as the runtime runs it under this setup."""
    precision = setup.precision
    shape = LayerShape(
        config.latent_size,
        config.expert_ffn_size,
        precision=precision,
        payload=precision,
        combine_payload=precision,
        copy_payload=precision,
        overlap=setup.overlap,
    )
    return replace(shape, **changes)  # type: ignore[arg-type]


def step_time(config: K3Config, setup: TrainingSetup, hardware: Hardware, expert_layer_s: float) -> StepTime:
    """One optimizer step, given the time of one expert layer (forward and backward, `cost.layer_time`)."""
    dense_p, expert_p = rank_parameters(config, setup)
    moe_layers = math.ceil(len(config.moe_layers) / setup.pp)
    compute = dense_seconds(config, setup, hardware) * setup.accumulation
    experts = moe_layers * expert_layer_s * setup.accumulation
    reduce = _reduce_seconds(dense_p, setup.stage_ranks, hardware) + _reduce_seconds(
        expert_p, setup.edp, hardware
    )
    sharded = dense_p / (setup.stage_ranks if setup.zero else 1) + expert_p / (setup.edp if setup.zero else 1)
    # Gradients, master and moments read; master, moments and parameters written.
    optimizer = sharded * 30.0 / (hardware.hbm_gb_s * 1e9)
    if setup.cp > 1:
        # One exchange a mixer and direction: KDA states, or keys and values of the other fragments.
        exchanges = 2 * config.num_layers / setup.pp * setup.accumulation
        compute += exchanges * (hardware.barrier_us + 2 * hardware.launch_us) * 1e-6
    bubble = (compute + experts) * (setup.pp - 1) / setup.accumulation if setup.pp > 1 else 0.0
    return StepTime(compute, experts, reduce, optimizer, bubble)


def _reduce_seconds(parameters: float, repeats: int, hardware: Hardware) -> float:
    """Ring all-reduce of fp32 gradients (or reduce-scatter of them and all-gather of weights): 2 (n - 1)/n of
    them."""
    if repeats <= 1:
        return 0.0
    rate = hardware.link_gb_s if repeats <= hardware.domain_size else hardware.network_gb_s
    return 2 * parameters * 4.0 * (repeats - 1) / repeats / (rate * 1e9)
