"""What every `python -m tools.NAME` shares: typed Hydra-style configuration, one-line errors, tables,
progress, output.

    @dataclass
    class SimulateConfig: ...

    if __name__ == "__main__":
        command(run, "simulate", SimulateConfig)      # reads configs/simulate.yaml, then key=value words

Exit codes: 0 success, 1 the command ran and found something wrong (CommandFailure), 2 wrong input.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from moonep.errors import MoonEPError

T = TypeVar("T")


class CommandFailure(MoonEPError):
    """The input was right and the answer is bad: a broken invariant, a model that does not fit. Exit code
    1."""


def load_config(name: str, schema: type[T], argv: Sequence[str]) -> tuple[T, str | None]:
    """`configs/NAME.yaml` with overrides, as an instance of `schema`; and "help" or "job" if only that was
    asked.

    The primary file's defaults list starts with `NAME_schema`. Raises ConfigError, one line with the nearest
    key.
    """
    from moonep.trainer.compose import compose

    return compose(name, schema, argv)


def command(run: Callable[[Any], object], name: str, schema: type, argv: Sequence[str] | None = None) -> None:
    """Runs a command and exits: never a traceback for what the user can fix."""
    words = list(sys.argv[1:] if argv is None else argv)
    config: Any
    try:
        config, request = load_config(name, schema, words)
        if request == "help":
            print(help_text(run, name, config))
        elif request == "job":
            print(to_yaml(dataclasses.asdict(config)))
        else:
            run(config)
    except CommandFailure as error:
        sys.exit(_fail(error, 1))
    except (MoonEPError, FileNotFoundError, PermissionError) as error:
        sys.exit(_fail(error, 2))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _fail(error: BaseException, code: int) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def help_text(run: Callable[[Any], object], name: str, config: Any) -> str:
    """What the command does, and every key with its value."""
    about = (sys.modules[run.__module__].__doc__ or "").strip()
    keys = to_yaml(dataclasses.asdict(config))
    return f"{about}\n\nKeys and their values (python -m tools.{name} key=value ...):\n\n{keys}"


def to_yaml(values: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(plain(values), sort_keys=False, default_flow_style=None, width=110).rstrip()


def plain(value: Any) -> Any:
    """Python containers and scalars for JSON and YAML: numpy unpacked, paths as text, infinities and NaN as
    null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def write_json(path: str | Path, values: Any) -> Path:
    """Indented JSON, written to a temporary name and renamed."""
    return write_text(path, json.dumps(plain(values), indent=1, allow_nan=False) + "\n")


def write_text(path: str | Path, text: str) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    return path


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], note: str = "") -> str:
    """A table for the terminal; numbers align right, text left."""
    cells = [[cell(value) for value in row] for row in rows]
    numeric = [all(_is_number(row[i]) for row in cells) for i in range(len(columns))]
    widths = [max(len(str(name)), *(len(row[i]) for row in cells), 0) for i, name in enumerate(columns)]

    def line(row: Sequence[str]) -> str:
        parts = [t.rjust(w) if n else t.ljust(w) for t, w, n in zip(row, widths, numeric, strict=True)]
        return "  ".join(parts).rstrip()

    out = [title, line(list(columns)), "  ".join("-" * w for w in widths), *(line(row) for row in cells)]
    return "\n".join([*out, note] if note else out)


def _is_number(text: str) -> bool:
    return text in ("", "-") or text[:1].isdigit() or (text[:1] in "-+<" and text[1:2].isdigit())


def cell(value: Any) -> str:
    """A value in at most about six significant characters."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if not math.isfinite(value):
            return "-"
        if value == 0 or 1e-3 <= abs(value) < 1e5:
            return (
                f"{value:.3f}"
                if abs(value) < 100
                else f"{value:,.1f}"
                if abs(value) < 1e4
                else f"{value:,.0f}"
            )
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def bytes_text(count: float) -> str:
    """1.5 GB (decimal), as memory vendors and network links count."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}" if abs(count) < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} B"


def progress(items: Iterable[T], total: int, label: str, *, after_s: float = 2.0) -> Iterator[T]:
    """Yields the items; on a terminal's stderr shows a bar once they take longer than `after_s` seconds."""
    start = last = time.monotonic()
    shown = False
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - start > after_s and now - last > 0.2 and sys.stderr.isatty():
            filled = int(30 * done / max(total, 1))
            left = (now - start) / done * (total - done)
            print(
                f"\r{label} [{'#' * filled}{'.' * (30 - filled)}] {done}/{total}, {left:.0f} s left ",
                end="",
                file=sys.stderr,
            )
            last, shown = now, True
    if shown:
        print(f"\r{' ' * 90}\r", end="", file=sys.stderr)
