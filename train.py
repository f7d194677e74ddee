"""Trains a K3-style model: `python train.py experiment=quickstart`, or under torchrun with several ranks.

Configuration is `configs/train.yaml` and its groups; every key can be set on the command line as key=value.
`dry_run=true` prints the resolved configuration and what follows from it, and trains nothing.
"""

from __future__ import annotations

import sys

from moonep.trainer.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
