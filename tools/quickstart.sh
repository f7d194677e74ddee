#!/usr/bin/env bash
# Sets up .venv and trains the tiny preset on the standard library's source, expert-parallel: one rank a GPU where there
# are GPUs, else two ranks on the CPU (about six minutes of two quiet cores). Words are passed on: key=value.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/setup_env.sh
setup_env ""

ranks=2
if has_gpu; then
  # the experiment's 16 sequences a step and 16 experts divide by powers of two
  ranks=$(.venv/bin/python -c 'import torch; n = torch.cuda.device_count(); print(min(16, 1 << max(0, n.bit_length() - 1)))')
else
  # the ranks share the cores; more threads than cores make both slower
  cores=$(nproc)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
fi
exec .venv/bin/torchrun --standalone --nproc_per_node="$ranks" train.py experiment=quickstart "$@"
