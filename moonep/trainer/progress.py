"""What a person sees while a run trains: a progress bar on a terminal, plain lines elsewhere; rank 0 only."""

from __future__ import annotations

import sys
import time
from typing import Any

LINE_EVERY_S = 10.0


class Progress:
    """Steps done, loss, rate and time left.

    Args:
        total, done: steps of the run, and those before a resume.
        enabled: False on ranks other than 0, or by logging.progress=false.
    """

    def __init__(self, total: int, done: int, *, enabled: bool):
        self.total, self.enabled = total, enabled
        self._bar: Any = None
        self._task: Any = None
        self._last_line = -LINE_EVERY_S
        self._start, self._first = time.monotonic(), done
        if enabled and sys.stdout.isatty():
            self._open_bar(done)

    def _open_bar(self, done: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
        )
        self._task = self._bar.add_task("", total=self.total, completed=done, status="")
        self._bar.start()

    def update(self, step: int, values: dict[str, Any]) -> None:
        """After step `step`; `values` as in metrics.jsonl."""
        if not self.enabled:
            return
        status = f"loss {values['loss']:.4f}  {values['tokens_per_s']:,.0f} tokens/s"
        if values.get("moe"):
            after = max(layer["rank_imbalance_after"] for layer in values["moe"])
            worst = max(layer["maxvio"] for layer in values["moe"])
            status += f"  maxvio {worst:.2f}  rank imbalance {after:.2f}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, status=status)
        elif step == self.total or time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            rate = (step - self._first) / max(time.monotonic() - self._start, 1e-9)
            left = (self.total - step) / max(rate, 1e-9)
            print(f"step {step}/{self.total}  {status}  {left:.0f} s left", flush=True)

    def note(self, text: str) -> None:
        """A line above the bar."""
        if not self.enabled:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
