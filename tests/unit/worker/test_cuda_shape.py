"""Shapes that the CUDA kernels do not cover are refused by name, not by the compiler."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ouro_sgl.errors import ConfigError
from ouro_sgl.models.config import load_config
from tests.models import rand_checkpoint

pytest.importorskip("triton")


def test_shapes_that_the_kernels_do_not_cover(tmp_path: Path) -> None:
    from ouro_sgl.worker.cuda_build import check_shape

    config = load_config(rand_checkpoint(tmp_path))
    check_shape(config)
    for change, problem in (
        ({"head_dim": 80}, "head_dim 80"),
        ({"head_dim": 8}, "head_dim 8"),
        ({"hidden_size": 100}, "hidden_size 100"),
        ({"intermediate_size": 24}, "intermediate_size 24"),
    ):
        with pytest.raises(ConfigError, match=problem):
            check_shape(dataclasses.replace(config, **change))
