#!/usr/bin/env bash
# Sets up .venv and runs linter, type checker and the whole test suite. Extra arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/setup_env.sh
setup_env dev
cores=$(env -u OMP_NUM_THREADS nproc)  # nproc believes OMP_NUM_THREADS
export OMP_NUM_THREADS=1 WANDB_MODE=disabled HYDRA_FULL_ERROR=1
if [ $# -gt 0 ]; then exec .venv/bin/python -m pytest "$@"; fi
.venv/bin/ruff check .
.venv/bin/mypy
# one process a core for the single-process tests; those that start ranks of their own then have the cores to themselves
.venv/bin/python -m pytest -n "$cores" --dist loadfile -m "not distributed"
.venv/bin/python -m pytest -m distributed
