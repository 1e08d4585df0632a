"""Two streams on disjoint SMs of one device, so that prefill and decode really run side by side.

On two plain streams they do not: a kernel of either fills every SM's registers, and the kernels of the
other wait for its programs to end. Decode is bound by memory, which a part of the SMs can saturate;
prefill is bound by the SMs, and takes the others. The split is the CUDA driver's (green contexts, driver
550 or newer), called by ctypes: torch's wrapper can only make contexts whose SMs overlap.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

SM_RESOURCE = 1  # CU_DEV_RESOURCE_TYPE_SM
DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
GRANULE = 8  # SMs; the driver rounds a part up to a multiple


class _Resource(ctypes.Structure):
    """CUdevResource, 144 bytes; of the union behind ``padding`` only the count of SMs."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("padding", ctypes.c_ubyte * 92),
        ("sms", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 44),
    )


@dataclass(frozen=True)
class Partition:
    """The streams, and how many SMs each has."""

    decode: torch.cuda.Stream
    prefill: torch.cuda.Stream
    decode_sms: int
    prefill_sms: int


class _Driver:
    """Calls of libcuda that raise RuntimeError with the code of a failure."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} returned {code}")


@functools.cache
def partition(device: torch.device, decode_sms: int) -> Partition | None:
    """``decode_sms`` SMs, rounded up by the driver, for decode and the others for prefill; None, with a
    warning, where the driver cannot. One split of a kind is made in a process, and kept."""
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        driver = _Driver()
        handle = ctypes.c_int()
        whole, mine, others = _Resource(), _Resource(), _Resource()
        driver("cuDeviceGet", ctypes.byref(handle), index)
        driver("cuDeviceGetDevResource", handle, ctypes.byref(whole), SM_RESOURCE)
        driver(
            "cuDevSmResourceSplitByCount",
            ctypes.byref(mine),
            ctypes.byref(ctypes.c_uint(1)),
            ctypes.byref(whole),
            ctypes.byref(others),
            0,
            decode_sms,
        )
        decode, prefill = (_stream(driver, handle, part, index) for part in (mine, others))
    except (OSError, AttributeError, RuntimeError) as error:
        logger.warning("the SMs cannot be split between decode and prefill: %s", error)
        return None
    return Partition(decode, prefill, mine.sms, others.sms)


def _stream(driver: _Driver, device: ctypes.c_int, part: _Resource, index: int) -> torch.cuda.Stream:
    description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    driver("cuDevResourceGenerateDesc", ctypes.byref(description), ctypes.byref(part), 1)
    driver("cuGreenCtxCreate", ctypes.byref(context), description, device, DEFAULT_STREAM)
    driver("cuGreenCtxStreamCreate", ctypes.byref(stream), context, NON_BLOCKING, 0)
    return torch.cuda.ExternalStream(stream.value, device=torch.device("cuda", index))


def _cublas() -> ctypes.CDLL | None:
    """The cuBLAS that torch has loaded."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split()[-1] for line in maps if "/libcublas.so" in line}
    return ctypes.CDLL(min(paths)) if paths else None


@contextmanager
def cublas_sms(count: int) -> Iterator[None]:
    """cuBLAS plans its products for ``count`` SMs inside (0: all of the device)."""
    library = _cublas() if count else None
    if library is None:
        yield
        return
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    library.cublasSetSmCountTarget(handle, count)
    try:
        yield
    finally:
        library.cublasSetSmCountTarget(handle, 0)
