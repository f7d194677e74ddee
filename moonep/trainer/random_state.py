"""Random states of this process (Python, numpy, torch CPU and CUDA) as plain JSON values: no pickle."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The four generators' states; `cuda` only where there is a CUDA device in use."""
    version, words, gauss = random.getstate()
    algorithm, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [str(algorithm), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = _encode(torch.cuda.get_rng_state())
    return state


def restore(state: dict[str, Any]) -> None:
    """Puts back what `capture` returned; a missing CUDA state leaves that generator alone."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    algorithm, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((algorithm, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(state["cuda"]))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
