"""Settings of the model tests."""

from __future__ import annotations

import torch

# The matrices are tiny: a second thread costs more than it brings, most of all on a busy machine.
torch.set_num_threads(1)
