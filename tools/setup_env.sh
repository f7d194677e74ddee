# Sourced by quickstart.sh and test.sh: makes .venv once and installs the project into it.
# usage: source tools/setup_env.sh; setup_env EXTRAS      (for instance "dev"; empty for the core alone)
export DS_BUILD_OPS=0 PIP_DISABLE_PIP_VERSION_CHECK=1

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# The first Python of at least 3.11 that can make virtual environments; PYTHON=... names another.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  echo "error: Python >= 3.11 with venv is needed (Debian: apt install python3-venv);" \
    "tried ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; set PYTHON=/path/to/python3.11" >&2
  return 1
}

setup_env() {
  local extras=$1 python want stamp
  if ! .venv/bin/python -c 'import pip' >/dev/null 2>&1; then
    python=$(find_python) || return 1
    echo "== making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv || return 1
  fi
  stamp=.venv/.installed-${extras:-core}
  want=$(cksum <pyproject.toml)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
    echo "== installing (once; a few minutes)"
    # Where there is no GPU a plain "torch" may be gigabytes of CUDA; this version is a CPU build of about 200 MB.
    if ! has_gpu; then
      .venv/bin/python -c 'import torch' >/dev/null 2>&1 || .venv/bin/pip install -q torch==2.13.0 || return 1
    fi
    .venv/bin/pip install -q -e ".${extras:+[$extras]}" || return 1
    echo "$want" >"$stamp"
  fi
  # A GPU driver without a usable GPU must not make DeepSpeed choose CUDA.
  has_gpu || export DS_ACCELERATOR=cpu
}
