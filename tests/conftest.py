"""What holds for all tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# The same examples in every run, without limits of time; --hypothesis-profile=default looks for new ones.
settings.load_profile("ci")

# No test may depend on the hub: a name that is not cached fails at once instead of being fetched.
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needs_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
