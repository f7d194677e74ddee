"""Compiles Triton kernels for Hopper on a machine without a GPU and reads what the compiler made of them.

The report answers, before any GPU time is spent: does it spill, how many programs fit a multiprocessor, do
the matrix products use wgmma (HGMMA), are global loads and stores wide. Compilation happens in a process of
its own with TRITON_INTERPRET unset, so tests that interpret kernels can also gate on reports.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HOPPER = 90
OPCODE = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+)"
WIDTH_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "": 4, "64": 8, "128": 16}


@dataclass(frozen=True)
class CompileCase:
    """One kernel in one configuration.

    kernel: "package.module:function" of a `triton.jit` function.
    signature: argument -> Triton type ("*bf16", "*fp32", "i32", "i64", "fp32"), of all that is no constant.
    constants: argument -> constexpr value (None for an absent pointer; "tl.bfloat16" names a type).
    not_divisible: pointers not known to be a multiple of 16; all other pointers are assumed to be.
    divisible: integer arguments known to be a multiple of 16.
    """

    kernel: str
    signature: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    not_divisible: tuple[str, ...] = ()
    divisible: tuple[str, ...] = ()


@dataclass(frozen=True)
class CompileReport:
    """What ptxas made of a case. Sizes in bytes, instruction counts static.

    stack: local memory of a thread; spill: bytes that a thread's spill instructions move (each counted once).
    loads, stores: width in bytes of a thread's global access -> number of such instructions.
    """

    kernel: str
    registers: int
    stack: int
    spill: int
    shared: int
    hgmma: int
    hmma: int
    ffma: int
    loads: dict[int, int]
    stores: dict[int, int]
    barriers: int
    instructions: int
    seconds: float


def _resolve(kernel: str):
    module, name = kernel.split(":")
    return getattr(importlib.import_module(module), name)


def _constant(value: Any) -> Any:
    """Cases travel as JSON, so types come by name."""
    if isinstance(value, str) and value.startswith("tl."):
        import triton.language as tl

        return getattr(tl, value.removeprefix("tl."))
    return value


def _source(case: CompileCase):
    from triton.compiler import ASTSource

    function = _resolve(case.kernel)
    names = function.arg_names
    missing = [n for n in names if n not in case.signature and n not in case.constants]
    unknown = [n for n in (*case.signature, *case.constants) if n not in names]
    if missing or unknown:
        raise ValueError(
            f"{case.kernel}: arguments without type or value {missing}, unknown arguments {unknown}"
        )
    signature = {n: case.signature.get(n, "constexpr") for n in names}
    constants = {(names.index(n),): _constant(v) for n, v in case.constants.items()}
    aligned = [n for n, t in case.signature.items() if t.startswith("*") and n not in case.not_divisible]
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in (*aligned, *case.divisible)}
    return ASTSource(function, signature, constexprs=constants, attrs=attributes)


def _tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """Resource report and SASS of a cubin, by the tools in Triton's wheel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        outputs = [
            subprocess.run(
                [_tool("cuobjdump"), flag, file.name], capture_output=True, text=True, check=True, timeout=120
            ).stdout
            for flag in ("-res-usage", "-sass")
        ]
    return outputs[0], outputs[1]


def _widths(opcodes: Counter[str], name: str) -> dict[int, int]:
    """Access width in bytes -> count, of opcodes such as LDG.E.128.CONSTANT."""
    widths: Counter[int] = Counter()
    for opcode, count in opcodes.items():
        parts = opcode.split(".")
        if parts[0] == name:
            width = next((WIDTH_BYTES[p] for p in parts[1:] if p in WIDTH_BYTES), 4)
            widths[width] += count
    return dict(sorted(widths.items()))


def compile_case(case: CompileCase) -> CompileReport:
    """Compiles in this process, which must not interpret. Use `compile_reports` from tests."""
    import triton
    from triton.backends.compiler import GPUTarget

    started = time.perf_counter()
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(_source(case), target=GPUTarget("cuda", HOPPER, 32), options=options)
    seconds = time.perf_counter() - started
    usage, sass = _disassemble(compiled.asm["cubin"])
    opcodes = Counter(re.findall(OPCODE, sass, re.MULTILINE))
    families: Counter[str] = Counter()
    for opcode, count in opcodes.items():
        families[opcode.split(".")[0]] += count
    spill = sum(width * n for op in ("STL", "LDL") for width, n in _widths(opcodes, op).items())
    return CompileReport(
        kernel=case.kernel,
        registers=int(re.search(r"REG:(\d+)", usage)[1]),  # type: ignore[index]
        stack=int(re.search(r"STACK:(\d+)", usage)[1]),  # type: ignore[index]
        spill=spill,
        shared=compiled.metadata.shared,
        hgmma=families["HGMMA"],
        hmma=families["HMMA"],
        ffma=families["FFMA"],
        loads=_widths(opcodes, "LDG"),
        stores=_widths(opcodes, "STG"),
        barriers=families["BAR"],
        instructions=sum(opcodes.values()),
        seconds=seconds,
    )


def compile_reports(cases: list[CompileCase], timeout_s: float = 600) -> list[CompileReport]:
    """Reports of all cases, compiled one after another in a fresh process that does not interpret.

    Raises:
        RuntimeError: a case does not compile; the message ends with the compiler's own.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    process = subprocess.run(
        [sys.executable, "-m", "kernels.compile_check"],
        input=json.dumps([asdict(case) for case in cases]),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
    )
    if process.returncode != 0:
        raise RuntimeError(f"compilation for sm_{HOPPER}a failed: {process.stderr[-4000:]}")
    reports = json.loads(process.stdout.splitlines()[-1])
    for report in reports:
        for key in ("loads", "stores"):
            report[key] = {int(width): count for width, count in report[key].items()}
    return [CompileReport(**report) for report in reports]


def main() -> None:
    cases = [CompileCase(**case) for case in json.load(sys.stdin)]
    print(json.dumps([asdict(compile_case(case)) for case in cases]))


if __name__ == "__main__":
    main()
