"""Files of exit depths: read for ``--exit-trace``, written for ``--record-exit-trace``.

    {"depths_by_request": {"<request id>": [4, 2, 3, ...]}}

Entry i of a list is the exit depth of output i, so the first one is the model's full depth.
"""

from __future__ import annotations

import os
from pathlib import Path

import orjson

from ouro_sgl.errors import ConfigError, RequestError
from ouro_sgl.frontend.sampling import check_trace
from ouro_sgl.models.config import read_json

KEY = "depths_by_request"


def load_traces(path: Path, total_loops: int) -> dict[str, list[int]]:
    """Exit depths by request id.

    Raises:
        ConfigError: the file is missing, malformed or holds depths that the model does not have.
    """
    requests = read_json(path).get(KEY)
    if not isinstance(requests, dict):
        raise ConfigError(f"{path} has no object {KEY!r}")
    try:
        return {
            request_id: check_trace(f"{KEY}[{request_id!r}]", depths, total_loops)
            for request_id, depths in requests.items()
        }
    except RequestError as error:
        raise ConfigError(f"{path}: {error.message}") from None


def save_traces(path: Path, traces: dict[str, list[int]]) -> None:
    """Write the file whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_bytes(orjson.dumps({KEY: traces}))
    draft.replace(path)
