# Sourced by quickstart.sh and test.sh: makes .venv once and installs the project into it.
# usage: source tools/setup_env.sh EXTRAS      (for instance "dev"; empty for the core alone)
export DS_BUILD_OPS=0 PIP_DISABLE_PIP_VERSION_CHECK=1

setup_env() {
  local extras=$1 python=${PYTHON:-python3}
  "$python" - <<'PY' || return 1
import sys
if sys.version_info < (3, 11):
    sys.exit(f"Python >= 3.11 is needed, this is {sys.version.split()[0]}; set PYTHON=/path/to/python3.11")
PY
  [ -x .venv/bin/python ] || { echo "== making .venv"; "$python" -m venv .venv || return 1; }
  local stamp=.venv/.installed-${extras:-core} want
  want=$(cksum <pyproject.toml)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
    echo "== installing (once; about two minutes)"
    # Where there is no GPU, this version is a CPU build of about 200 MB; a plain "torch" is gigabytes of CUDA.
    if [ -z "${CI_TORCH:-}" ] && ! command -v nvidia-smi >/dev/null 2>&1; then
      .venv/bin/python -c 'import torch' 2>/dev/null || .venv/bin/pip install -q torch==2.13.0 || return 1
    fi
    .venv/bin/pip install -q -e ".${extras:+[$extras]}" || return 1
    echo "$want" >"$stamp"
  fi
  command -v nvidia-smi >/dev/null 2>&1 || export DS_ACCELERATOR=cpu
}
