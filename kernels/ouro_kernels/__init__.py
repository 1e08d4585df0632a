"""Kernels of ouro_sgl: each operation of a round, with a plain-torch twin of the same result.

The twins are what the CPU worker runs, and what a device kernel is compared with. They are exact:
a row's result has the same bits whatever other rows, padding, chunk borders or cache slots stand
beside it. Four habits make them so, and ``tests/unit/kernels`` checks each operation for all of
M = 1..33 and every offset:

- every matrix product runs on a multiple of 16 rows (``linear``, and query blocks of 16 in
  ``prefill_attention``): below that, BLAS picks another summation order;
- attention walks keys in tiles of 64 at absolute positions and merges them in index order, and a
  masked key or tile leaves the running state bit for bit unchanged;
- ``exp``, ``log`` and their kin run over whole SIMD vectors (``elementwise``);
- reductions run along one contiguous row; nothing is ever summed across rows.
"""
