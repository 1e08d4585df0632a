"""The real server on the GPU: concurrent streams give the tokens of the offline engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from ouro_sgl import Engine
from tests.server import start_server

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

STREAMS = 64
ALONE = 16  # of these: generated one by one
START_SECONDS = 150.0  # kernels of every bucket may have to be compiled


def prompt(index: int) -> str:
    return f"<|im_start|>user\nWhat is {index} + {3 * index + 1}?<|im_end|>\n<|im_start|>assistant\n"


def params(index: int) -> dict[str, Any]:
    return {
        "temperature": 0 if index % 2 else 0.9,
        "sampling_seed": index,
        "max_new_tokens": 24,
        "exit_threshold": [0.3, 0.5, 0.8, 1.0][index % 4],
    }


async def stream(session: aiohttp.ClientSession, url: str, index: int) -> dict[str, Any]:
    """The last chunk of one stream."""
    body = {"text": prompt(index), "sampling_params": params(index), "stream": True}
    last: dict[str, Any] = {}
    async with session.post(f"{url}/generate", json=body) as response:
        assert response.status == 200
        async for line in response.content:
            text = line.decode().strip()
            if text.startswith("data: ") and text != "data: [DONE]":
                last = json.loads(text[6:])
    return last


def test_concurrent_streams_equal_the_offline_engine() -> None:
    with Engine(device="cuda", num_slots=200_000, max_running_requests=8) as engine:
        offline = [engine.generate(prompt(index), params(index)) for index in range(ALONE)]
        rest = range(ALONE, STREAMS)
        offline += engine.generate([prompt(index) for index in rest], [params(index) for index in rest])

    async def all_streams(url: str) -> list[dict[str, Any]]:
        connector = aiohttp.TCPConnector(limit=STREAMS)
        async with aiohttp.ClientSession(connector=connector) as session:
            return await asyncio.gather(*(stream(session, url, index) for index in range(STREAMS)))

    with start_server(None, "--device", "cuda", "--num-slots", "200000") as server:
        server.wait_ready(START_SECONDS)
        online = asyncio.run(all_streams(server.url))
    for index, (got, expected) in enumerate(zip(online, offline, strict=True)):
        assert got["output_ids"] == expected["output_ids"], index
        assert got["meta_info"]["exit_depths"] == expected["meta_info"]["exit_depths"], index
    depths = {depth for got in online for depth in got["meta_info"]["exit_depths"][1:]}
    assert depths == {1, 2, 3, 4}
