"""What ranks tell each other before a plan: histograms, and enough to notice that they do not agree.

Every rank always takes part, also one whose arguments are wrong: it says so, all ranks raise, and the next
call works again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moonep.errors import PeerFailure, RankDisagreement
from moonep.symmetric import SymmetricMemory

TEXT_WORDS = 40  # 320 bytes of a message


class Agreement:
    """Rows `[flag, text, agreed values, private values, counts]` gathered from every rank.

    Args:
        memory: whose `gather` carries them.
        num_experts: E.
        agreed: names of the integers on which all ranks must agree, with the words for each value (or None).
        private: how many integers of a rank follow that may differ.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        num_experts: int,
        agreed: Mapping[str, Sequence[str] | None],
        private: int = 0,
    ):
        self.memory, self.num_experts, self.agreed = memory, num_experts, dict(agreed)
        self._values = 1 + TEXT_WORDS
        self._private = self._values + len(self.agreed)
        self._counts = self._private + private
        self.width = self._counts + num_experts

    def row(self, values: Sequence[int], private: Sequence[int], counts_E: torch.Tensor) -> torch.Tensor:
        """int64 `[width]` of a rank whose arguments are fine."""
        row = torch.zeros(self.width, dtype=torch.int64)
        row[self._values : self._counts] = torch.tensor([*values, *private], dtype=torch.int64)
        row[self._counts :] = counts_E
        return row

    def refusal(self, error: Exception) -> torch.Tensor:
        """int64 `[width]` of a rank that will raise `error`."""
        text = np.zeros(8 * TEXT_WORDS, dtype=np.uint8)
        encoded = np.frombuffer(str(error).encode()[: len(text) - 1], dtype=np.uint8)
        text[: len(encoded)] = encoded
        row = np.zeros(self.width, dtype=np.int64)
        row[0], row[1 : self._values] = 1, text.view(np.int64)
        return torch.from_numpy(row)

    def exchange(
        self, rows: Sequence[torch.Tensor], own_error: Exception | None, phase: str
    ) -> tuple[np.ndarray, torch.Tensor]:
        """(private values `[R, n]`, counts `[R, E]` int64) of all ranks.

        Raises:
            own_error, if this rank refused; PeerFailure, if another did; RankDisagreement.
        """
        table = self.memory.gather(rows, phase)
        words = table.numpy()
        if own_error is not None:
            raise own_error
        if words[:, 0].any():
            rank = int(words[:, 0].argmax())
            text = words[rank, 1 : self._values].tobytes().split(b"\0", 1)[0].decode(errors="replace")
            raise PeerFailure(rank, text)
        values = words[:, self._values : self._private]
        if (values != values[0]).any():
            self._disagree(values)
        return words[:, self._private : self._counts], table[:, self._counts :]

    def _disagree(self, values: np.ndarray) -> None:
        for column, (name, meanings) in enumerate(self.agreed.items()):
            if (values[:, column] != values[0, column]).any():
                given = values[:, column].tolist()
                raise RankDisagreement(
                    name, {rank: meanings[v] if meanings else v for rank, v in enumerate(given)}
                )


def agree_once(group: Any, num_ranks: int, settings: Mapping[str, object]) -> None:
    """Compares settings over a process group, before memory is shared. Collective.

    Raises:
        RankDisagreement: names the first setting that differs, with every rank's value; on every rank.
    """
    if num_ranks == 1 or not (dist.is_available() and dist.is_initialized()):
        return
    everyone: list[dict[str, object]] = [{} for _ in range(num_ranks)]
    dist.all_gather_object(everyone, dict(settings), group=group)
    for name in settings:
        values = [theirs.get(name) for theirs in everyone]
        if any(value != values[0] for value in values):
            raise RankDisagreement(name, dict(enumerate(values)))
