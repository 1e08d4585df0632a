"""Log lines of the three processes: one format, on standard error."""

from __future__ import annotations

import logging


def setup_logging(process: str, level: str) -> None:
    """Send the records of all loggers to standard error, marked with the process they come from.

    Args:
        process: "frontend", "scheduler" or "worker".
        level: the least severe level that is shown, as in ``ServerArgs.log_level``.
    """
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s {process} %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
