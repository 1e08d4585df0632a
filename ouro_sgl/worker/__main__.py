"""``python -m ouro_sgl.worker <ipc_dir>``: started by the launcher."""

import sys
from pathlib import Path

from ouro_sgl.worker.process import main

sys.exit(main(Path(sys.argv[1])))
