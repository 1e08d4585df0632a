"""The settings of the scheduler, resolved against the facts of a worker."""

from __future__ import annotations

from dataclasses import dataclass

from ouro_sgl.config import ServerArgs
from ouro_sgl.messages import WorkerReady


@dataclass(frozen=True)
class SchedulerConfig:
    """Resolved settings; the names are those of :class:`ServerArgs` where it has them."""

    total_loops: int
    num_slots: int
    max_rows: int
    rounds_in_flight: int
    chunked_prefill_size: int  # tokens
    kv_layout: str = "last_exited"
    max_prefill_tokens: int | None = None
    # Chunks that are planned and not retired: those that run between two rounds and one behind
    # them, so that the worker never waits for a plan and an abort never waits for many chunks.
    max_chunks_ahead: int = 2
    admission_scan_limit: int = 64
    max_admission_bypasses: int = 8
    max_queued_requests: int | None = None
    schedule_policy: str = "fcfs"
    radix_cache: bool = True
    radix_insert_generated: str = "never"

    @classmethod
    def resolve(cls, args: ServerArgs, ready: WorkerReady) -> SchedulerConfig:
        """What the settings and the facts of a worker that is ready come to."""
        return cls(
            total_loops=ready.total_loops,
            num_slots=ready.num_slots,
            max_rows=ready.max_rows,
            rounds_in_flight=ready.rounds_in_flight,
            # The worker has resolved it: its memory and graphs are made for chunks of this size.
            chunked_prefill_size=int(ready.server_info["chunked_prefill_size"]),
            kv_layout=args.kv_layout,
            max_prefill_tokens=args.max_prefill_tokens,
            max_chunks_ahead=args.max_prefill_batches_before_decode + 1,
            admission_scan_limit=args.admission_scan_limit,
            max_admission_bypasses=args.max_admission_bypasses,
            max_queued_requests=args.max_queued_requests,
            schedule_policy=args.schedule_policy,
            radix_cache=not args.disable_radix_cache and args.kv_layout != "shared",
            radix_insert_generated=args.radix_insert_generated,
        )
