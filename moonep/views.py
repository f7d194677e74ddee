"""Views of a shard: when one has gone stale, and whether two tensors are the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from moonep.errors import ContractError


class CompletedEvent:
    """Stands where a CUDA event would: on a CPU the work is done when the call returns."""

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        """Nothing is left to wait for."""

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


class ViewGuard:
    """Debug mode: hands out views that refuse to be used after a later call has overwritten the shard.

    Attributes:
        generation: how often the shard was overwritten.
    """

    def __init__(self) -> None:
        self.generation = 0

    def hand_out(self, view: torch.Tensor) -> torch.Tensor:
        """The same memory as a tensor that checks, at every operation, that it is still current."""
        guarded = view.as_subclass(GuardedView)
        guarded.guard, guarded.born = self, self.generation
        return guarded


class GuardedView(torch.Tensor):
    """A zero-copy view in debug mode. Slices and other views of it are guarded too; new tensors are not."""

    guard: ViewGuard
    born: int

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        guards: list[GuardedView] = []

        def bare(value: Any) -> Any:
            if not isinstance(value, GuardedView):
                return value
            guards.append(value)
            with torch._C.DisableTorchFunctionSubclass():
                return value.as_subclass(torch.Tensor)

        args, kwargs = tree_map(bare, args), tree_map(bare, kwargs or {})
        for view in guards:
            check_current(view)
        result = func(*args, **kwargs)

        def guarded(value: Any) -> Any:
            for view in guards:
                if isinstance(value, torch.Tensor) and _same_storage(value, view):
                    again = value.as_subclass(GuardedView)
                    again.guard, again.born = view.guard, view.born
                    return again
            return value

        return tree_map(guarded, result)


def check_current(tensor: torch.Tensor) -> None:
    """Raises ContractError if `tensor` is a guarded view whose shard has been overwritten."""
    if isinstance(tensor, GuardedView) and tensor.born != tensor.guard.generation:
        raise ContractError(
            f"stale view: dispatch {tensor.born} returned it, and {tensor.guard.generation - tensor.born} "
            "later dispatch or combine calls have overwritten it; use it before, or pass zero_copy=False"
        )


def bare_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its guard."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor) if isinstance(tensor, GuardedView) else tensor


def same_memory(given: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether `given` is `view` or a prefix of it, row for row in place."""
    return (
        given.data_ptr() == view.data_ptr()
        and given.dtype == view.dtype
        and given.shape[1:] == view.shape[1:]
        and given.stride() == view.stride()
    )


def _same_storage(value: torch.Tensor, view: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return value.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
