"""Triton kernels of the decode round and of prefill, for CUDA devices.

Two families, each exact within itself: the kernels of a decode round give a lane the same bits in
every bucket, and those of prefill give a position the same bits in every chunk. What makes it so
is written at each kernel: one K order per weight, splits from a lane's own length merged in index
order, no float atomics.
"""
