"""Text generation: prefill, then one token at a time with recurrent KDA states and the compressed MLA cache.

Shapes: B batch, T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from model.k3 import K3Model


@dataclass
class Cache:
    """What each layer's mixer carries from token to token (KDACache or MLACache), in layer order."""

    mixers: list[Any]


@torch.no_grad()
def generate(
    self: K3Model,
    prompt: torch.Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
    stop_token: int | None = None,
    agree: Callable[[int], int] | None = None,
) -> torch.Tensor:
    """The prompt and what follows it.

    Args:
        prompt: [T] or [B, T] int64 with T >= 1; all sequences of a batch have one length.
        max_new_tokens: tokens to add.
        temperature: 0 takes the likeliest token; else logits are divided by it.
        top_k: sample among the k likeliest tokens only.
        seed: of the sampling; None draws from the default generator.
        stop_token: stop once every sequence has produced it; a sequence that has repeats it.
        agree: on several ranks with collective experts: a function that returns the maximum over ranks of
            its argument (an all-reduce). A rank with fewer forward passes to make then makes idle ones, so
            that all make the same number. The prompt is fed in pieces of at most the experts' capacity.

    Returns:
        [T + new] or [B, T + new], on the prompt's device, new <= max_new_tokens.

    Raises:
        ValueError: an empty prompt, or a batch that exceeds the experts' capacity.
    """
    tokens = prompt.unsqueeze(0) if prompt.dim() == 1 else prompt
    pieces = _pieces(self, tokens, max_new_tokens, temperature, top_k)
    calls = (len(pieces) + max_new_tokens - 1) if max_new_tokens else 0
    calls_of_all = calls if agree is None else agree(calls)
    was_training = self.training
    self.eval()
    try:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        produced, made = _sample(
            self, tokens, pieces, max_new_tokens, temperature, top_k, generator, stop_token
        )
        if agree is not None:
            for _ in range(calls_of_all - made):
                self.idle_forward()
    finally:
        self.train(was_training)
    result = torch.cat([tokens, *produced], dim=1)
    return result[0] if prompt.dim() == 1 else result


def next_token(
    logits_BV: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> torch.Tensor:
    """[B, 1] int64, sampled on the CPU so that a seed gives the same text wherever the logits are the
    same.
    """
    if temperature == 0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    logits = logits_BV.float().cpu() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    choice = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator)
    return choice.to(logits_BV.device)


def _pieces(
    model: K3Model, tokens: torch.Tensor, max_new_tokens: int, temperature: float, top_k: int | None
) -> list[torch.Tensor]:
    """The prompt in pieces that fit the experts' capacity."""
    batch, length = tokens.shape
    if length == 0:
        raise ValueError("the prompt is empty; generation needs at least one token to begin from")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must not be negative")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must not be negative; 0 takes the likeliest token")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1; None samples from all tokens")
    capacity = model.capacity
    if capacity is None:
        return [tokens]
    if batch > capacity:
        raise ValueError(
            f"a batch of {batch} sequences exceeds the experts' capacity of {capacity} tokens a call"
        )
    return list(tokens.split(capacity // batch, dim=1))


def _sample(
    model: K3Model,
    tokens: torch.Tensor,
    pieces: list[torch.Tensor],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
    stop_token: int | None,
) -> tuple[list[torch.Tensor], int]:
    """New tokens, [B, 1] each, and the number of forward passes made."""
    if max_new_tokens == 0:
        return [], 0
    device = model.embedding.weight.device
    cache = model.make_cache(tokens.shape[0], tokens.shape[1] + max_new_tokens)
    for piece in pieces:
        logits = model.step(piece.to(device), cache)
    made, produced = len(pieces), []
    stopped = torch.zeros(tokens.shape[0], 1, dtype=torch.bool)
    while True:
        chosen = next_token(logits[:, -1], temperature, top_k, generator)
        if stop_token is not None:
            chosen = torch.where(stopped.to(chosen.device), stop_token, chosen)
            stopped |= (chosen == stop_token).cpu()
        produced.append(chosen.to(tokens.device))
        if len(produced) == max_new_tokens or (stop_token is not None and bool(stopped.all())):
            return produced, made
        logits = model.step(chosen, cache)
        made += 1
