"""Reported faults of runtimes for looped models."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ouro_sgl.config import ServerArgs
from ouro_sgl.errors import ConfigError
from ouro_sgl.messages import RowParams
from ouro_sgl.models.config import load_config
from ouro_sgl.models.reference import ReferenceModel
from ouro_sgl.worker.build import build
from tests.e2e.reports.runtime import Runtime
from tests.e2e.reports.support import Client, greedy
from tests.models import rand_checkpoint
from tests.server import running_server
from tests.worker_driver import Model

LOOPS = 4


@pytest.fixture(scope="module")
def model(ouro_model: Path) -> Model:
    torch.set_num_threads(1)
    return Model(ouro_model)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 259) for _ in range(length)]


def assert_follows_the_reference(model: Model, ids: list[int], **limits: Any) -> list[int]:
    """Cached decoding against recomputing the whole sequence for every token; the exit depths."""
    loops = model.config.total_loops
    params = {"max_new_tokens": 32, "max_loops": loops, "exit_threshold": 0.7, **limits}
    heard = Runtime(model).answer(ids, prompt_logprob_start=0, **params)
    reference = ReferenceModel(model.config, model.weights).generate(
        ids, RowParams(temperature=0.0, **params)
    )
    assert heard.ids == reference.output_ids
    assert heard.depths == reference.exit_depths
    expected = reference.logits.log_softmax(-1)[torch.arange(len(heard.ids)), torch.tensor(heard.ids)]
    torch.testing.assert_close(torch.tensor(heard.logprobs), expected, atol=1e-4, rtol=0)
    assert heard.prompt_logprobs is not None
    known = reference.prompt_logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    found = torch.tensor(heard.prompt_logprobs.values[1:])  # type: ignore[arg-type]
    torch.testing.assert_close(found, known, atol=1e-4, rtol=0)
    return heard.depths


def test_our_01_every_loop_has_its_own_keys(model: Model) -> None:
    for threshold in (1.0, 0.7):
        depths = assert_follows_the_reference(model, prompt(12, 1), exit_threshold=threshold)
        assert set(depths) == ({LOOPS} if threshold == 1.0 else {1, 2, 3, 4})


def test_our_01_over_http(ouro: Client, model: Model) -> None:
    ids = prompt(12, 2)
    answer = ouro.generate(ids, greedy(32, ignore_eos=True))
    params = RowParams(max_new_tokens=32, temperature=0.0, exit_threshold=0.7)
    reference = ReferenceModel(model.config, model.weights).generate(ids, params)
    assert answer["output_ids"] == reference.output_ids
    assert answer["meta_info"]["exit_depths"] == reference.exit_depths


HOSTILE = "import pathlib\npathlib.Path({marker!r}).touch()\nraise RuntimeError('this code must not run')\n"


def test_our_04_the_code_of_a_checkpoint_never_runs(
    ouro_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is any version of transformers needed: one that cannot be imported lies in the way."""
    folder, marker = tmp_path / "model", tmp_path / "it-ran"
    shutil.copytree(ouro_model, folder)
    code = HOSTILE.format(marker=str(marker))
    (folder / "modeling_ouro.py").write_text(code)
    (folder / "configuration_ouro.py").write_text("def (")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_ouro.OuroConfig",
        "AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM",
    }
    config["transformers_version"] = "99.0"
    (folder / "config.json").write_text(json.dumps(config))
    package = tmp_path / "path" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.chdir(folder)  # the worst place to start from
    with running_server(folder, "--num-slots", "4096") as server:
        assert len(server.generate("hello", **greedy(4, ignore_eos=True))["output_ids"]) == 4
    assert not marker.exists()


@pytest.mark.parametrize("loops", [1, 2, 3, 4, 6, None])
def test_our_05_the_config_says_how_many_loops(tmp_path: Path, loops: int | None) -> None:
    torch.set_num_threads(1)
    folder = rand_checkpoint(tmp_path / "model", total_loops=loops or LOOPS, threshold=0.7)
    if loops is None:
        config = json.loads((folder / "config.json").read_text())
        del config["total_ut_steps"]
        (folder / "config.json").write_text(json.dumps(config))
    count = loops or LOOPS
    depths = assert_follows_the_reference(Model(folder), prompt(12, 3), max_new_tokens=16)
    assert depths[0] == count
    assert max(depths) <= count

    # Bytes per token: keys and values of every layer in every loop.
    shape = load_config(folder)
    token_bytes = 2 * shape.num_layers * count * shape.num_kv_heads * shape.head_dim * 4
    memory = 1 << 22
    args = ServerArgs(model_path=str(folder), device="cpu", kv_cache_memory_bytes=memory)
    _, ready = build(args)
    assert ready.num_slots // count == memory // token_bytes
    assert ready.total_loops == count


@pytest.mark.parametrize("loops", [0, -1, 2.5, "4"])
def test_our_05_impossible_loops_are_refused(tmp_path: Path, loops: Any) -> None:
    folder = rand_checkpoint(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "total_ut_steps": loops}))
    with pytest.raises(ConfigError, match="total_ut_steps"):
        load_config(folder)


def traced(seed: int, count: int) -> dict[str, Any]:
    """Sampling parameters that fix a random exit depth for every token."""
    rng = random.Random(seed)
    trace = [LOOPS, *(rng.randint(1, LOOPS) for _ in range(count - 1))]
    return greedy(count, ignore_eos=True, exit_trace=trace)


def test_our_08_rows_of_any_length_and_depth_in_one_batch(ouro: Client) -> None:
    """Requests of different lengths and rules join and leave; each is what it is alone."""
    rules: list[dict[str, Any]] = [
        greedy(12, ignore_eos=True),
        greedy(25, ignore_eos=True, exit_threshold=0.5),
        greedy(9, ignore_eos=True, exit_threshold=1.0),
        greedy(30, ignore_eos=True, max_loops=1),
        traced(1, 20),
        traced(2, 33),
        greedy(17, ignore_eos=True, min_loops=3, exit_threshold=0.3),
        greedy(14, ignore_eos=True, exit_mode="random_lookahead", exit_threshold=0.5),
    ]
    prompts = [prompt(length, 40 + length) for length in (1, 3, 9, 20, 33, 50, 71, 120)]
    solo = [ouro.solo(ids, rule) for ids, rule in zip(prompts, rules, strict=True)]
    depths = {depth for answer in solo for depth in answer["meta_info"]["exit_depths"]}
    assert depths == {1, 2, 3, 4}
    rng = random.Random(8)
    for _ in range(5):
        order = [rng.randrange(len(rules)) for _ in range(24)]
        calls = [lambda i=i: ouro.generate(prompts[i], rules[i]) for i in order]
        for index, answer in zip(order, ouro.at_once(calls), strict=True):
            assert answer["output_ids"] == solo[index]["output_ids"], index
            assert answer["meta_info"]["exit_depths"] == solo[index]["meta_info"]["exit_depths"], index


def test_our_08_fifty_batches_beside_chunks(model: Model) -> None:
    """The same in process: arrivals at random moments, prompts in chunks, rounds in flight."""
    rng = random.Random(9)
    kinds = []
    alone = Runtime(model, chunked_prefill_size=16)
    for index in range(8):
        ids = prompt([1, 4, 9, 15, 16, 17, 40, 70][index], 60 + index)
        threshold = [0.4, 0.7, 0.8, 1.0][index % 4]
        fields: dict[str, Any] = {"max_new_tokens": 4 + 3 * index, "exit_threshold": threshold}
        kinds.append((ids, fields, alone.answer(ids, **fields).bits()))
    crowd = Runtime(model, rows=6, chunked_prefill_size=16, rounds_in_flight=3, num_slots=4 * 600)
    sent = []
    for _ in range(50):
        for _ in range(rng.randint(1, 4)):
            ids, fields, bits = rng.choice(kinds)
            sent.append((crowd.submit(ids, **fields), bits))
        for _ in range(rng.randint(1, 40)):
            crowd.turn()
    crowd.run()
    for uid, bits in sent:
        assert crowd.heard[uid].bits() == bits
