"""The kernels written in Gluon for compute capability 9, where Triton and the device have what they need.

Gluon is Triton's lower language and experimental: where its names have changed the modules are None, and
the Triton kernels of ``gemm`` and ``prefill`` do it all.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

products: Any
chunk: Any
prefill: Any
try:
    products = importlib.import_module("ouro_kernels.triton_ops.hopper_products")
    chunk = importlib.import_module("ouro_kernels.triton_ops.hopper_chunk")
    prefill = importlib.import_module("ouro_kernels.triton_ops.hopper_prefill")
except ImportError:
    products = chunk = prefill = None


def supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels can be had, the device has their instructions and they take the dtype."""
    sixteen_bits = dtype in (torch.bfloat16, torch.float16)
    on_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return products is not None and sixteen_bits and on_hopper
