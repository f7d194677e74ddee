"""The program around a run: reads the command line, joins the ranks, turns failures into one line.

Exit codes: 0 finished, 1 failed while running, 2 wrong input, 128 + n stopped by signal n.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model.config import ModelConfigError
from moonep.errors import CheckpointError, ContractError, DataError, MoonEPError

WRONG_INPUT = (
    ContractError,
    DataError,
    CheckpointError,
    ModelConfigError,
    FileNotFoundError,
    PermissionError,
)
HELP = """train.py: trains a K3-style mixture-of-experts model.

  python train.py experiment=quickstart                                   one process
  torchrun --standalone --nproc_per_node=2 train.py experiment=quickstart two ranks
  python train.py experiment=quickstart dry_run=true                      what would run

Every key below is set as key=value; model=NAME and the other groups choose a file of configs/GROUP/.
--config-dir DIR adds a folder of configs; --cfg job prints the configuration alone.
"""


def main(argv: Sequence[str]) -> int:
    """Runs `train.py` with these words. Returns the exit code."""
    # The launcher shows every rank's output: what all ranks would say alike, one rank of each node says.
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        config, request = _configure(argv)
        if request is not None or config.dry_run:
            if speaks:
                _print_request(config, request)
            return 0
    except (MoonEPError, ValueError, OSError) as error:
        if speaks:
            print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
        _tell_launcher(one_line(error))
        return 2
    except KeyboardInterrupt:
        return 130
    return _run(config)


def one_line(error: BaseException) -> str:
    """The message without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def _configure(argv: Sequence[str]) -> tuple[Any, str | None]:
    from model.config import K3Config
    from moonep.trainer.compose import compose
    from moonep.trainer.config import Config
    from moonep.trainer.derived import check_values, derive

    config, request = compose("train", Config, argv)
    check_values(config)
    # Before any rank waits for another; the corpus, which sets the vocabulary, is read later.
    model_config = K3Config.preset(config.model.preset, **config.model_overrides())
    derive(config, model_config, world_size(config))
    return config, request


def world_size(config: Any) -> int:
    """Ranks that the launcher started; without one, a dry run shows as many as parallel.ep asks for."""
    alone = (config.parallel.ep or 1) if config.dry_run else 1
    return int(os.environ.get("WORLD_SIZE", alone))


def _print_request(config: Any, request: str | None) -> None:
    import yaml

    if request == "help":
        print(HELP)
    print(yaml.safe_dump(config.to_dict(), sort_keys=False).rstrip())
    if request is None:
        from moonep.trainer.loop import describe

        print(f"\n{describe(config, world_size(config))}")


def _run(config: Any) -> int:
    """Trains; reports a failure to the other ranks and to the user."""
    import torch.distributed as dist

    from moonep.trainer import ending, loop
    from moonep.trainer.engine import init_distributed
    from moonep.trainer.watch import FailureWatch, StopRequest

    stop = StopRequest()
    stop.install()
    watch: FailureWatch | None = None
    run: loop.Run | None = None
    try:
        device = init_distributed()
        store = dist.distributed_c10d._get_default_store()
        watch = FailureWatch(store, dist.get_rank(), dist.get_world_size())
        watch.start()
        run = loop.prepare(config, device, stop)
        loop.train(run)
        if stop.signal_name is not None or run.step < config.train.steps:
            return _stopped(run, watch)
        ending.finish(run)
        dist.barrier()
        watch.close()
        dist.destroy_process_group()
        return 0
    except BaseException as error:
        return _failed(error, watch, run)


def _stopped(run: Any, watch: Any) -> int:
    """A signal asked to stop between two steps: save, say how to go on."""
    from moonep.trainer import loop

    saved = loop.save(run) if run.step else None
    watch.close()
    run.parts.routing.close()
    if run.is_first:
        if run.metrics is not None:
            run.metrics.close()
        name = run.stop.signal_name or "a signal to another rank"
        words = f"stopped by {name} after step {run.step}"
        if saved is not None:
            words += f"; wrote {saved}; go on with run.dir={run.folder} checkpoint.resume=true"
        print(words, file=sys.stderr, flush=True)
    return run.stop.exit_code


def _failed(error: BaseException, watch: Any, run: Any) -> int:
    """One line on stderr, the traceback of an unexpected error in a file, the other ranks told."""
    from moonep.trainer.watch import lost_peer

    if isinstance(error, SystemExit):
        return int(error.code or 0) if not isinstance(error.code, str) else 1
    if watch is not None and lost_peer(error):
        watch.wait_for_cause()
    expected = isinstance(error, (MoonEPError, *WRONG_INPUT))
    message = one_line(error) if expected else f"{type(error).__name__}: {one_line(error)}"
    if isinstance(error, KeyboardInterrupt):
        message = "interrupted"
    rank = int(os.environ.get("RANK", "0"))
    if not expected and not isinstance(error, KeyboardInterrupt):
        message += f" (traceback in {_write_traceback(error, run, rank)})"
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if watch is None or watch.announce(message):
        prefix = f"rank {rank}: " if several else ""
        print(f"error: {prefix}{message}", file=sys.stderr, flush=True)
    _tell_launcher(message)
    if watch is not None:
        watch.linger()
    code = 2 if isinstance(error, WRONG_INPUT) else 1
    # A collective of another thread may hold the interpreter: leave without waiting for anything.
    sys.stdout.flush()
    if several:
        os._exit(code)
    return code


def _tell_launcher(message: str) -> None:
    """Leaves the message where torchrun looks for it, so that its own report says why a rank ended."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with contextlib.suppress(OSError):
            extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def _write_traceback(error: BaseException, run: Any, rank: int) -> Path:
    folder = run.folder if run is not None else Path(".")
    path = folder / f"error_rank_{rank}.txt"
    try:
        path.write_text("".join(traceback.format_exception(error)))
    except OSError:
        traceback.print_exception(error)
    return path
