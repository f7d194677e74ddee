"""What ranks tell each other before a plan: histograms, and enough to notice that they do not agree.

Every rank always takes part, also one whose arguments are wrong: it says so, all ranks raise, and the next
call works again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from moonep.errors import PeerFailure, RankDisagreement
from moonep.symmetric import SymmetricMemory

TEXT_WORDS = 40  # 320 bytes of a message
WIDTH_STEP = 1024  # rows are padded to it, so that ranks with other sizes still understand each other


class Agreement:
    """Rows `[flag, text, sizes, values, private values, counts]` gathered from every rank.

    Args:
        memory: whose `gather` carries them.
        num_experts: E.
        sizes: name -> (number, or a word of `meanings[name]`) of what the ranks must share for good.
        values: names of the numbers on which they must agree in each call.
        meanings: name -> words that numbers stand for.
        private: how many numbers of a rank may differ.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        num_experts: int,
        sizes: Mapping[str, int],
        values: Sequence[str],
        meanings: Mapping[str, Sequence[str]],
        private: int,
    ):
        self.memory, self.meanings = memory, dict(meanings)
        self._names = [*sizes, *values]
        self._sizes = list(sizes.values())
        self._agreed = 1 + TEXT_WORDS
        self._private = self._agreed + len(self._names)
        self._counts = self._private + private
        self._end = self._counts + num_experts
        self.width = -(-self._end // WIDTH_STEP) * WIDTH_STEP

    def row(self, values: Sequence[int], private: Sequence[int], counts_E: torch.Tensor) -> torch.Tensor:
        """int64 `[width]` of a rank whose arguments are fine."""
        row = torch.zeros(self.width, dtype=torch.int64)
        row[self._agreed : self._counts] = torch.tensor([*self._sizes, *values, *private], dtype=torch.int64)
        row[self._counts : self._end] = counts_E
        return row

    def greet(self) -> None:
        """Compares sizes before anything of these sizes is made. Collective. Raises as `exchange`."""
        row = torch.zeros(self.width, dtype=torch.int64)
        row[self._agreed : self._agreed + len(self._sizes)] = torch.tensor(self._sizes)
        self.exchange([row] * len(self.memory.local_ranks), None, "first call")

    def refusal(self, error: Exception) -> torch.Tensor:
        """int64 `[width]` of a rank that will raise `error`."""
        text = np.zeros(8 * TEXT_WORDS, dtype=np.uint8)
        encoded = np.frombuffer(str(error).encode()[: len(text) - 1], dtype=np.uint8)
        text[: len(encoded)] = encoded
        row = np.zeros(self.width, dtype=np.int64)
        row[0], row[1 : self._agreed] = 1, text.view(np.int64)
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
            text = words[rank, 1 : self._agreed].tobytes().split(b"\0", 1)[0].decode(errors="replace")
            raise PeerFailure(rank, text)
        agreed = words[:, self._agreed : self._private]
        if (agreed != agreed[0]).any():
            self._disagree(agreed)
        return words[:, self._private : self._counts], table[:, self._counts : self._end]

    def _disagree(self, agreed: np.ndarray) -> None:
        for column, name in enumerate(self._names):
            given = agreed[:, column].tolist()
            if len(set(given)) > 1:
                words = self.meanings.get(name)
                raise RankDisagreement(name, dict(enumerate(words[v] if words else v for v in given)))
