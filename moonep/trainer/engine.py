"""The only file that knows DeepSpeed: groups, marks on expert parameters, ZeRO 0/1/2, fp32 and bf16.

What has to be arranged for experts that DeepSpeed did not build (deepspeed 0.19.8):
- Each expert parameter carries `allreduce = False` and `group_name`; and some module of the tree must be an
  instance of DeepSpeed's `MoE`, or the engine never looks at the marks. `_Marker` is that module, and empty.
- Gradients of every parameter are divided by the whole world, experts included, so a loss of (sum over this
  rank's tokens) x ranks x accumulation / global tokens gives the same update at any expert-parallel size.
- Clipping: fp32 + ZeRO-0 averages the norms of different experts and clips wrongly, so that case clips here.
- bf16 all-reduces its fp32 accumulators in bf16 unless `communication_data_type` says otherwise.
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moonep.errors import CapabilityError, ContractError
from moonep.trainer.optimizer import build_adamw, parameter_groups

MOMENTS = ("exp_avg", "exp_avg_sq")
State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class EngineSettings:
    """What the engine needs of the configuration. `clip` 0 means none; `ep` must divide the world size."""

    micro_batch: int
    accumulation: int
    ep: int = 1
    zero: int = 1
    bf16: bool = False
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0


def _import_deepspeed() -> Any:
    """DeepSpeed, told to compile nothing and to say nothing."""
    os.environ.setdefault("DS_BUILD_OPS", "0")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    try:
        import deepspeed
    except ImportError as error:
        raise CapabilityError(f"training needs deepspeed ({error}); pip install deepspeed") from None
    from deepspeed.utils import logger

    # DeepSpeed 0.19.8 calls the older names of torch's collectives; nothing the user could change.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*deprecated")
    logger.setLevel(logging.ERROR)
    # Its shared-memory all-reduce for CPUs is compiled on first use and needs a C++ compiler; gloo does.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def init_distributed() -> torch.device:
    """Joins the process group that torchrun describes, or makes one of one rank. Returns the device."""
    deepspeed = _import_deepspeed()
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(key, value)
    os.environ.setdefault("MASTER_PORT", str(_free_port()))
    cuda = torch.cuda.is_available()
    local = int(os.environ["LOCAL_RANK"])
    if cuda:
        if local >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise CapabilityError(f"local rank {local} has no GPU (there are {count}); start one rank a GPU")
        torch.cuda.set_device(local)
    backend = "nccl" if cuda else "gloo"
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return torch.device("cuda", local) if cuda else torch.device("cpu")


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of expert parallelism: `ep` exchanges tokens, `replicas` holds copies of the same experts."""

    name: str
    ep: dist.ProcessGroup
    replicas: dist.ProcessGroup


def create_expert_groups(ep: int) -> ExpertGroups:
    """Groups of `ep` consecutive ranks, and the strided groups that replicate their experts. Collective."""
    _import_deepspeed()
    from deepspeed.utils import groups

    world = dist.get_world_size()
    if ep < 1 or world % ep:
        raise ContractError(f"parallel.ep={ep} does not divide the {world} ranks; choose a divisor")
    name = f"ep_size_{ep}"
    if name not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(ep)
    exchange, replicas = groups._get_expert_parallel_group, groups._get_expert_data_parallel_group
    return ExpertGroups(name, exchange(name), replicas(name))


def _marker(num_experts: int, ep: int, group_name: str) -> nn.Module:
    """An empty module by which DeepSpeed recognises that the model has experts."""
    from deepspeed.moe.layer import MoE

    class _Marker(MoE):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts, self.num_local_experts = num_experts, num_experts // ep
            self.ep_size, self.expert_group_name = ep, group_name

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            """The groups exist already."""

    return _Marker()


class _Root(nn.Module):
    """The model and the marker under one root."""

    def __init__(self, model: nn.Module, marker: nn.Module | None):
        super().__init__()
        self.model = model
        self.marker = marker

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether a parameter belongs to this rank's home experts (and is not replicated over all ranks)."""
    return not getattr(parameter, "allreduce", True)


class Engine:
    """A model under DeepSpeed.

    Args:
        model: called as `model(tokens, cu_seqlens=, targets=)`, returns (sum of token losses, count).
        settings: see `EngineSettings`.
        groups: what `create_expert_groups(settings.ep)` returned.
        expert_modules: the modules of `model` whose parameters are this rank's home experts.
        num_experts: routed experts of a layer.

    Attributes:
        model: the module passed in; its parameters are the live ones.
        rank, world_size, ep_rank, ep_size: this rank's place.
        optimizer_steps: updates applied so far.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: EngineSettings,
        groups: ExpertGroups,
        *,
        expert_modules: list[nn.Module],
        num_experts: int,
    ):
        if settings.bf16 and settings.zero == 0:
            raise ContractError("parallel.zero=0 cannot accumulate bf16 in fp32; use parallel.zero=1")
        if settings.zero not in (0, 1, 2):
            raise ContractError(f"parallel.zero={settings.zero} is not supported; use 0, 1 or 2")
        self.model, self.settings, self.groups = model, settings, groups
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.ep_size, self.ep_rank = settings.ep, dist.get_rank() % settings.ep
        self.optimizer_steps = 0
        self.grad_norm = 0.0
        for module in expert_modules:
            for parameter in module.parameters():
                parameter.allreduce = False  # type: ignore[attr-defined]
                parameter.group_name = groups.name  # type: ignore[attr-defined]
        self._shapes = {n: (tuple(p.shape), is_expert(p)) for n, p in model.named_parameters()}
        self._deepspeed = self._initialize(num_experts if expert_modules else 0)

    def _initialize(self, num_experts: int) -> Any:
        deepspeed = _import_deepspeed()
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = parameter_groups(self.model.named_parameters(), self.settings.weight_decay)
        if num_experts:
            groups = split_params_into_different_moe_groups_for_optimizer(groups)
            groups = [group for group in groups if group["params"]]
        s = self.settings
        fused = torch.cuda.is_available()
        optimizer = build_adamw(groups, lr=s.lr, betas=s.betas, eps=s.eps, fused=fused)
        marker = _marker(num_experts, s.ep, self.groups.name) if num_experts else None
        kept = {n: b.clone() for n, b in self.model.named_buffers() if b.is_floating_point()}
        engine, *_ = deepspeed.initialize(
            model=_Root(self.model, marker),
            optimizer=optimizer,
            config=self._deepspeed_config(),
            dist_init_required=False,
        )
        # A bf16 engine casts floating-point buffers too; routing biases and counts must stay as they were.
        for name, buffer in self.model.named_buffers():
            if name in kept:
                buffer.data = kept[name].to(buffer.device)
        self._check_alignment()
        return engine

    def _deepspeed_config(self) -> dict[str, Any]:
        s = self.settings
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": s.micro_batch,
            "gradient_accumulation_steps": s.accumulation,
            "train_batch_size": s.micro_batch * s.accumulation * self.world_size,
            # Unset means 1.0 since 0.19; ZeRO-0 in fp32 clips wrongly, see `_clip_unpartitioned`.
            "gradient_clipping": s.clip if s.zero else 0.0,
            "communication_data_type": "fp32",
            "zero_optimization": {
                "stage": s.zero,
                "contiguous_gradients": True,
                "reduce_scatter": True,
                "overlap_comm": False,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 2**62,
            "wall_clock_breakdown": False,
        }
        if s.bf16:
            # A step with a non-finite gradient is not skipped silently: the loop stops on it and says so.
            config["bf16"] = {"enabled": True, "check_grad_overflow": False}
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        return config

    def _check_alignment(self) -> None:
        for name, parameter in self.model.named_parameters():
            if is_expert(parameter) and parameter.numel() and parameter.data_ptr() % 16:
                raise CapabilityError(f"expert weight {name} is not 16-byte aligned after DeepSpeed moved it")

    def loss(
        self, tokens: torch.Tensor, targets: torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward pass of one micro-batch: (sum of token losses, count of valid targets) on this rank."""
        return self._deepspeed(tokens, cu_seqlens=cu_seqlens, targets=targets)

    def backward(self, loss_sum: torch.Tensor, global_tokens: float) -> None:
        """Backward pass of one micro-batch, scaled so that the step follows the mean over `global_tokens`.

        Args:
            loss_sum: this rank's summed loss of the micro-batch.
            global_tokens: valid targets of the whole step, over ranks and micro-batches.
        """
        # DeepSpeed divides by accumulation here and by the number of ranks when it reduces.
        scale = self.world_size * self.settings.accumulation / max(global_tokens, 1.0)
        self._deepspeed.backward(loss_sum * scale)

    def end_micro_batch(self) -> None:
        """After every micro-batch of a step but the last: counts towards the accumulation boundary."""
        self._deepspeed.step()

    def step(self, lr: float) -> None:
        """After the last micro-batch: clip, update, clear gradients. Sets `grad_norm` (before clipping)."""
        for group in self._deepspeed.optimizer.param_groups:
            group["lr"] = lr
        if self.settings.zero == 0:
            self.grad_norm = self._clip_unpartitioned()
        self._deepspeed.step()
        if self.settings.zero:
            self.grad_norm = float(self._deepspeed.get_global_grad_norm())
        self.optimizer_steps += 1

    def _clip_unpartitioned(self) -> float:
        """Global norm over dense parameters and the group's experts, and clipping by it (fp32, ZeRO-0)."""
        squares = torch.zeros(2, device=next(self.model.parameters()).device)
        gradients = [(p.grad, is_expert(p)) for p in self.model.parameters() if p.grad is not None]
        for gradient, expert in gradients:
            squares[int(expert)] += gradient.float().square().sum()
        if self.ep_size > 1:
            dist.all_reduce(squares[1:], group=self.groups.ep)
        norm = squares.sum().sqrt()
        if self.settings.clip > 0:
            factor = (self.settings.clip / (norm + 1e-6)).clamp(max=1.0)
            for gradient, _ in gradients:
                gradient.mul_(factor)
        return float(norm)

    def parameter_shapes(self) -> dict[str, tuple[tuple[int, ...], bool]]:
        """name -> (shape on this rank, whether it holds experts); the same order on every rank."""
        return self._shapes

    def parameter_states(self) -> Iterator[tuple[str, dict[str, torch.Tensor], bool]]:
        """Full fp32 weights and both moments of every parameter, in a fixed order. Collective.

        Expert parameters give this rank's home experts. Moments are zero before the first step.
        """
        for name, parameter in self.model.named_parameters():
            state = {"param": self._gather(parameter, None)}
            state.update({key: self._gather(parameter, key) for key in MOMENTS})
            yield name, state, is_expert(parameter)

    def load_parameter_states(self, lookup: Callable[[str], State]) -> None:
        """Puts back what `parameter_states` gave; set `optimizer_steps` first.

        `lookup(name)` returns this rank's tensors of that parameter, under the same keys.
        """
        self._prepare_moments()
        for name, parameter in self.model.named_parameters():
            state = lookup(name)
            full = state["param"].to(parameter.device)
            parameter.data.copy_(full.reshape(parameter.shape))
            self._scatter(parameter, None, full)
            for key in MOMENTS:
                self._scatter(parameter, key, state[key].to(parameter.device))

    def _inner_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._deepspeed.optimizer
        return optimizer if self.settings.zero == 0 else optimizer.optimizer

    def _moment(self, flat: torch.Tensor, key: str) -> torch.Tensor:
        """The moment beside `flat` in AdamW's state; zeros before the first step."""
        state = self._inner_optimizer().state.get(flat, {})
        return state[key] if key in state else torch.zeros_like(flat).detach()

    def _prepare_moments(self) -> None:
        """Makes AdamW's state where it is missing and stamps it with `optimizer_steps`."""
        optimizer = self._inner_optimizer()
        for flat in (p for group in optimizer.param_groups for p in group["params"]):
            state = optimizer.state[flat]
            for key in MOMENTS:
                state.setdefault(key, torch.zeros_like(flat).detach())
            device = flat.device if flat.is_cuda else None
            state["step"] = torch.tensor(float(self.optimizer_steps), dtype=torch.float32, device=device)

    def _owned_fragment(self, parameter: nn.Parameter, key: str | None) -> tuple[torch.Tensor, int] | None:
        """This rank's slice of a partitioned fp32 weight or moment, and where it begins in the parameter."""
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        address = mapping.hp_fragment_address
        flat = self._inner_optimizer().param_groups[mapping.param_group_index]["params"][0]
        source = flat if key is None else self._moment(flat, key)
        return source.detach().narrow(0, address.start, address.numel), mapping.lp_fragment_address.start

    def _gather(self, parameter: nn.Parameter, key: str | None) -> torch.Tensor:
        if self.settings.zero == 0:
            source = parameter if key is None else self._moment(parameter, key)
            return source.detach().clone()
        full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        fragment = self._owned_fragment(parameter, key)
        if fragment is not None:
            values, start = fragment
            full.narrow(0, start, values.numel()).copy_(values)
        # Every element has one owner in the group, so the sum copies.
        dist.all_reduce(full, group=self.groups.replicas if is_expert(parameter) else None)
        return full.view(parameter.shape)

    def _scatter(self, parameter: nn.Parameter, key: str | None, full: torch.Tensor) -> None:
        if self.settings.zero == 0:
            if key is not None:
                self._moment(parameter, key).copy_(full.reshape(parameter.shape))
            return
        fragment = self._owned_fragment(parameter, key)
        if fragment is not None:
            values, start = fragment
            values.copy_(full.reshape(-1).narrow(0, start, values.numel()))
