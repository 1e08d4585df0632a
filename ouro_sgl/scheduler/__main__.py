"""``python -m ouro_sgl.scheduler <private directory>``: started by the launcher."""

from __future__ import annotations

import sys
from pathlib import Path

from ouro_sgl.scheduler.process import main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
