"""When one rank fails the others stop and name it: a thread watches while the main one computes.

A rank that raises writes its message into the store that the ranks met through; a rank that is killed leaves
a process id that no longer lives. The thread of every other rank sees either within seconds, prints one line
and ends the process: the main thread may be deep in a collective that will never return.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any

import torch.distributed as dist

from moonep.errors import PeerFailure, PeerTimeout

EXIT_FAILED = 1
POLL_S = 0.5
CAUSE_S = 6.0  # a dead process is noticed after 2 polls
LINGER_S = 3.0  # how long a failed rank stays so that the others read why before the launcher ends them


class FailureWatch:
    """Watches the other ranks from `start()` to `close()`.

    Args:
        store: a key-value store shared by all ranks.
        rank, world_size: this process.
    """

    def __init__(self, store: Any, rank: int, world_size: int):
        self.store = dist.PrefixStore("failure_watch", store)
        self.rank, self.world_size = rank, world_size
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._first = False

    def start(self) -> None:
        """Registers this process and begins to watch."""
        if self.world_size == 1:
            return
        me = {"host": socket.gethostname(), "pid": os.getpid()}
        self.store.set(f"process/{self.rank}", json.dumps(me))
        self._thread = threading.Thread(target=self._watch, name="failure-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """This rank ends well; the others must not take its end for a failure."""
        self._closing.set()
        if self.world_size > 1:
            self.store.set(f"done/{self.rank}", "1")

    def announce(self, message: str) -> bool:
        """Tells the other ranks why this one stops. Returns whether this rank should say it to the user."""
        self._closing.set()
        if self.world_size == 1:
            return True
        mine = json.dumps({"rank": self.rank, "message": message})
        try:
            first = json.loads(self.store.compare_set("failed", "", mine))
        except (RuntimeError, ValueError):
            return True
        self._first = first["rank"] == self.rank
        # Every rank found the same fault (a wrong key, a short corpus): one line is enough.
        return self._first or first["message"] != message

    def wait_for_cause(self) -> None:
        """After an error that another rank's end explains: gives the thread time to find and name that rank.

        Returns only when it found none.
        """
        if self._thread is not None:
            self._thread.join(CAUSE_S)

    def linger(self) -> None:
        """The first rank to fail stays a little, so that the others read why before a launcher ends them."""
        if self._first:
            time.sleep(LINGER_S)

    def failure(self) -> tuple[int, str] | None:
        """(rank, message) of the first failure, or None."""
        if self.store.check(["failed"]):
            first = json.loads(self.store.get("failed"))
            return first["rank"], first["message"]
        return None

    def _watch(self) -> None:
        dead_since: dict[int, float] = {}
        while not self._closing.wait(POLL_S):
            try:
                failure = self.failure() or self._dead_peer(dead_since)
            except RuntimeError:
                failure = (0, "its process, which keeps the ranks' store, is gone")
            if failure is not None and not self._closing.is_set():
                self._stop(*failure)

    def _dead_peer(self, dead_since: dict[int, float]) -> tuple[int, str] | None:
        """A rank of this host whose process ended without a word, two polls in a row."""
        host = socket.gethostname()
        for peer in range(self.world_size):
            if peer == self.rank or not self.store.check([f"process/{peer}"]):
                continue
            process = json.loads(self.store.get(f"process/{peer}"))
            if process["host"] != host or _alive(process["pid"]) or self.store.check([f"done/{peer}"]):
                dead_since.pop(peer, None)
                continue
            if time.monotonic() - dead_since.setdefault(peer, time.monotonic()) > 2 * POLL_S:
                return peer, "its process ended without a message (killed, perhaps out of memory)"
        return None

    def _stop(self, rank: int, message: str) -> None:
        print(f"rank {self.rank}: stopped because rank {rank} failed: {message}", file=sys.stderr, flush=True)
        os._exit(EXIT_FAILED)


def lost_peer(error: BaseException) -> bool:
    """Whether an error may only say that another rank is gone: a closed connection, a time-out."""
    if isinstance(error, (PeerFailure, PeerTimeout, dist.DistError)):
        return True
    words = ("closed by peer", "Connection reset", "Broken pipe", "gloo", "NCCL", "Connection refused")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return True


class StopRequest:
    """SIGTERM and Ctrl-C ask the loop to stop after the step; a second Ctrl-C, a second later, ends at once.

    Attributes:
        signal_name: the first signal received, or None.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._number = 0
        self._at = 0.0
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, the shell's convention."""
        return 128 + (self._number or signal.SIGINT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is None:
            self.signal_name, self._number = signal.Signals(number).name, number
            self._at = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._at > 1.0:
            os._exit(self.exit_code)
