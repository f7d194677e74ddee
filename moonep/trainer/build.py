"""Puts the parts of a run together: process groups, the model with its experts spread, the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from model import K3Config, K3Model
from moonep.trainer.balancers import Balancers, make_balancer
from moonep.trainer.config import Config
from moonep.trainer.derived import Derived
from moonep.trainer.engine import Engine, EngineSettings, ExpertGroups, create_expert_groups
from moonep.trainer.routing import RoutingMonitor, forced_routing


@dataclass
class Parts:
    """What `build_parts` returns."""

    engine: Engine
    balancers: Balancers
    routing: RoutingMonitor


def build_model(
    config: Config, model_config: K3Config, derived: Derived, groups: ExpertGroups, device: torch.device
) -> K3Model:
    """K3Model with experts spread over `groups.ep` and routers that balance as `routing.balancer` says."""
    from moonep import MoonEPExperts

    routing, parallel = config.routing, config.parallel

    def experts(c: K3Config, layer: int) -> nn.Module:
        return MoonEPExperts(
            c.num_experts,
            c.latent_size,
            c.expert_ffn_size,
            c.top_k,
            derived.capacity,
            group=groups.ep,
            policy=routing.policy,
            tau=routing.tau,
            slots=routing.slots,
            max_imbalance=routing.max_imbalance,
            memory=parallel.memory,
            beta_gate=c.situ_beta_gate,
            beta_up=c.situ_beta_up,
            timeout_s=parallel.timeout_s,
            dtype=torch.bfloat16 if config.precision.name == "bf16" else torch.float32,
            device=device,
        )

    def balancer(c: K3Config, layer: int) -> Any:
        return make_balancer(routing, c.num_experts, c.top_k, device)

    torch.manual_seed(config.seed)
    return K3Model(model_config, experts=experts, balancer=balancer).to(device)


def build_parts(config: Config, model_config: K3Config, derived: Derived, device: torch.device) -> Parts:
    """Model, engine, balancers and routing hooks of this rank. Collective."""
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    groups = create_expert_groups(derived.ep)
    model = build_model(config, model_config, derived, groups, device)
    model.activation_checkpointing = config.train.activation_checkpointing
    layers = list(model.moe_layers())
    o = config.optimizer
    settings = EngineSettings(
        micro_batch=derived.micro_batch,
        accumulation=derived.accumulation,
        ep=derived.ep,
        zero=config.parallel.zero,
        bf16=config.precision.name == "bf16",
        lr=o.lr,
        betas=(o.betas[0], o.betas[1]),
        eps=o.eps,
        weight_decay=o.weight_decay,
        clip=o.clip,
    )
    engine = Engine(
        model,
        settings,
        groups,
        expert_modules=[layer.experts for layer in layers],
        num_experts=model_config.num_experts,
    )
    balancers = Balancers({layer.layer: layer.router.balancer for layer in layers})
    source = forced_routing(config, model_config, derived)
    routing = RoutingMonitor(config, model_config, derived, layers, groups, source)
    return Parts(engine, balancers, routing)
