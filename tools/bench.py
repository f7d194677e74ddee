"""Benchmarks of this project against its peers: `python -m tools.bench target=NAME key=value ...`.

`target=ep` measures the expert-parallel exchange; every module tools/bench_NAME.py is a target, with its
keys in configs/bench_NAME.yaml. `python -m tools.bench target=NAME --help` lists them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

PREFIX = "bench_"


def targets() -> list[str]:
    """Names of the modules tools/bench_NAME.py that have a `main`."""
    return sorted(path.stem.removeprefix(PREFIX) for path in Path(__file__).parent.glob(f"{PREFIX}*.py"))


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = [word for word in words if word.startswith("target=")]
    name = chosen[-1].removeprefix("target=") if chosen else ""
    if name not in targets():
        shown = f"target={name}: no such target" if chosen else "target= is missing"
        print(f"error: {shown}; allowed: {', '.join(targets())}", file=sys.stderr)
        sys.exit(2)
    importlib.import_module(f"tools.{PREFIX}{name}").main([w for w in words if w not in chosen])


if __name__ == "__main__":
    main()
