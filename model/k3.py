"""The K3 text model: embedding, layers joined by Attention Residuals, head, optionally an MTP layer.

Shapes: B batch, T time, D hidden size, V vocabulary, N packed documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from kernels.loss import linear_cross_entropy
from model.attention_residuals import AttentionResidual, ResidualStream
from model.block import Block
from model.config import K3Config, ModelConfigError
from model.generate import Cache, generate
from model.latent_moe import BalancerFactory, ExpertsFactory, LatentMoE
from model.layers import Linear, RMSNorm
from model.mtp import MTPLayer, mtp_targets

IGNORE_INDEX = -100


class K3Model(nn.Module):
    """A K3-style language model.

    Args:
        config: sizes.
        experts: factory `(config, layer) -> module` of routed experts (see model.latent_moe.Experts);
            None: all of them in this process.
        balancer: factory `(config, layer) -> module` (see model.router.Balancer); None: a frozen bias.

    Attributes:
        activation_checkpointing: recompute mixers, norms and dense FFNs in backward instead of keeping their
            activations; routers and routed experts are never run twice.
        last_mtp_loss: of the last forward with targets in training mode: the MTP layer's mean token loss
            (detached), or None.

    Raises:
        ModelConfigError: a parameter whose size is no multiple of 8 elements (a plugged-in module's).
    """

    def __init__(
        self,
        config: K3Config,
        experts: ExpertsFactory | None = None,
        balancer: BalancerFactory | None = None,
    ):
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        self.last_mtp_loss: torch.Tensor | None = None
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, layer, experts, balancer, first=layer == 0) for layer in range(config.num_layers)
        )
        self.output_residual = AttentionResidual(config)
        self.output_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size)
        self.mtp = MTPLayer(config, experts, balancer) if config.num_mtp_layers else None
        self._init_embeddings()
        _check_alignment(self)

    @torch.no_grad()
    def _init_embeddings(self) -> None:
        """Logits of standard deviation 0.2 at first, so that step-0 loss exceeds ln V by about 0.02.

        A tied embedding serves as the head and takes the head's scale; an untied one has unit variance,
        the scale of what layers add to it.
        """
        head = self.head_weight
        if self.head is not None:
            nn.init.normal_(self.embedding.weight)
        nn.init.normal_(head, std=0.2 * self.config.hidden_size**-0.5)

    @property
    def head_weight(self) -> torch.Tensor:
        """[V, D]; the embedding's when tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(
        self,
        tokens: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        token_mask: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Logits, or the loss.

        Args:
            tokens: [B, T] int64.
            cu_seqlens: [N+1] int32 or int64, document boundaries 0 .. T with B = 1; documents do not see
                each other.
            targets: [B, T] int64, the token that follows each token; -100 is not counted.
            token_mask: [B, T] bool, False where a token is padding: the balancer and the expert statistics
                skip it.

        Returns:
            Without targets, logits [B, T, V]. With targets, (sum of token losses, number of valid
            targets), both scalars; in training mode with an MTP layer the sum includes `mtp_weight` times
            the sum of its token losses.

        Raises:
            ValueError: shapes that do not fit.
        """
        self._check(tokens, cu_seqlens, targets, token_mask)
        hidden = self._backbone(tokens, cu_seqlens, token_mask)
        final = self.output_norm(hidden)
        if targets is None:
            return F.linear(final, self.head_weight)
        loss, count = self._loss(final, targets)
        if self.mtp is not None and self.training:
            mtp_tokens, next_targets = mtp_targets(tokens, targets, cu_seqlens, IGNORE_INDEX)
            embedded = self.embedding(mtp_tokens)
            mtp_hidden = self.mtp(hidden, embedded, cu_seqlens, token_mask, self._run)
            mtp_loss, mtp_count = self._loss(mtp_hidden, next_targets)
            self.last_mtp_loss = mtp_loss.detach() / mtp_count.clamp(min=1)
            # a sum, like the main loss, so that the split into micro-batches does not change the answer
            loss = loss + self.config.mtp_weight * mtp_loss
        return loss, count

    def moe_layers(self) -> Iterator[LatentMoE]:
        """The layers with experts, in order, an MTP layer's last: `.layer`, `.router`, `.experts` of each."""
        for block in self._blocks() if self.mtp is None else [*self._blocks(), self.mtp.block]:
            if isinstance(block.ffn, LatentMoE):
                yield block.ffn

    def idle_forward(self) -> None:
        """Stand in for a forward pass on a rank that has no tokens left, so that collective experts do not
        wait.
        """
        with torch.no_grad():
            for block in self._blocks():
                if isinstance(block.ffn, LatentMoE):
                    block.ffn.idle()

    @property
    def capacity(self) -> int | None:
        """Tokens a forward pass may hold: the least capacity of its experts, or None without a limit."""
        limits = [c for moe in self.moe_layers() if (c := getattr(moe.experts, "capacity", None)) is not None]
        return min(limits) if limits else None

    def make_cache(self, batch: int, max_length: int) -> Cache:
        """An empty cache for `batch` sequences of at most `max_length` tokens."""
        like = self.embedding.weight
        return Cache([block.mixer.make_cache(batch, max_length, like) for block in self._blocks()])

    def step(self, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Logits [B, T, V] of tokens [B, T] that follow those in the cache, which takes them in."""
        final = self.output_norm(self._backbone(tokens, None, None, cache))
        return F.linear(final, self.head_weight)

    generate = generate

    def _blocks(self) -> list[Block]:
        return [block for block in self.layers if isinstance(block, Block)]

    def _backbone(
        self,
        tokens: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        token_mask: torch.Tensor | None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """The output mix over depth, before the final norm: [B, T, D]."""
        stream = ResidualStream(self.embedding(tokens))
        for index, block in enumerate(self._blocks()):
            block(stream, cu_seqlens, token_mask, cache.mixers[index] if cache else None, self._run)
        return self._run(lambda *sources: self.output_residual(list(sources)), *stream.sources())

    def _run(self, function: Any, *tensors: torch.Tensor) -> torch.Tensor:
        """`function(*tensors)`, under activation checkpointing where that is on."""
        if self.activation_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
        return function(*tensors)

    def _loss(self, final_BTD: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return linear_cross_entropy(
            final_BTD.flatten(0, 1), self.head_weight, targets.flatten(), ignore_index=IGNORE_INDEX
        )

    @staticmethod
    def _check(
        tokens: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        targets: torch.Tensor | None,
        token_mask: torch.Tensor | None,
    ) -> None:
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be [B, T]; got shape {tuple(tokens.shape)}")
        if cu_seqlens is not None and tokens.shape[0] != 1:
            raise ValueError(
                f"with cu_seqlens the batch must be packed into one row; got tokens {tuple(tokens.shape)}"
            )
        for name, tensor in (("targets", targets), ("token_mask", token_mask)):
            if tensor is not None and tensor.shape != tokens.shape:
                raise ValueError(
                    f"{name} must be {tuple(tokens.shape)} like tokens; got {tuple(tensor.shape)}"
                )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups, "decay" and "no_decay", each with its parameters and their names, in the
    model's order.

    Matrices decay; embeddings, norms, convolutions, gate biases and pseudo-queries do not.
    """
    groups: dict[str, dict[str, Any]] = {
        "decay": {"name": "decay", "params": [], "names": [], "weight_decay": weight_decay},
        "no_decay": {"name": "no_decay", "params": [], "names": [], "weight_decay": 0.0},
    }
    for name, parameter in model.named_parameters():
        group = groups["decay" if decays(name, parameter) else "no_decay"]
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies to this parameter of a K3Model."""
    return parameter.dim() >= 2 and not name.endswith(("embedding.weight", "conv_weight"))


def _check_alignment(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.numel() % 8:
            raise ModelConfigError(
                f"parameter {name} has {parameter.numel()} elements; a multiple of 8 is needed, so that "
                "in bf16 the parameter laid out after it starts on 16 bytes"
            )
