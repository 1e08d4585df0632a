"""The bundled checkpoint: complete, small, sensible, and honest about what it was trained on."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ouro_sgl.frontend.chat_template import ChatTemplate
from ouro_sgl.frontend.tokenizer import Tokenizer
from ouro_sgl.launch import BUNDLED_MODEL
from ouro_sgl.messages import ExitMode, RowParams
from ouro_sgl.models.config import load_config
from ouro_sgl.models.reference import ReferenceModel
from ouro_sgl.models.weights import load_lookahead_head, load_weights

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SIZE_LIMIT = 8_000_000  # bytes, all files together

QUESTIONS = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("what is 7 + 5", "7 + 5 = 12."),
    ("What is 345 + 278?", "345 + 278 = 623."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
)


@pytest.fixture(scope="module")
def corpus() -> Any:
    sys.path.insert(0, str(SCRIPTS))
    try:
        import tiny_corpus
    finally:
        sys.path.remove(str(SCRIPTS))
    return tiny_corpus


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(BUNDLED_MODEL, load_config(BUNDLED_MODEL).vocab_size)


@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    config = load_config(BUNDLED_MODEL)
    return ReferenceModel(config, load_weights(BUNDLED_MODEL, config, torch.float32, "cpu"))


def test_the_files_are_small() -> None:
    assert sum(file.stat().st_size for file in BUNDLED_MODEL.iterdir()) <= SIZE_LIMIT


def test_the_config_describes_four_loops_and_both_end_tokens() -> None:
    config = load_config(BUNDLED_MODEL)
    assert (config.total_loops, config.early_exit_threshold, config.dtype) == (4, 1.0, "bfloat16")
    assert config.end_ids == (0, 2)


def test_the_lookahead_head_lies_beside_the_model() -> None:
    head = load_lookahead_head(BUNDLED_MODEL, load_config(BUNDLED_MODEL).hidden_size)
    assert head is not None
    assert all(tensor.dtype == torch.float32 for tensor in head)


def test_special_tokens_and_digits_have_ids_of_their_own(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert len(tokenizer.encode("1234567890")) == 10


def test_the_chat_template_makes_the_trained_prompt(corpus: Any) -> None:
    rendered = ChatTemplate(BUNDLED_MODEL).render([{"role": "user", "content": "Hello!"}])
    assert rendered == corpus.chat_prompt("Hello!")


@pytest.mark.parametrize(("question", "reply"), QUESTIONS)
@pytest.mark.parametrize("threshold", [0.5, 1.0])
def test_plain_questions_get_sensible_replies(
    model: ReferenceModel, tokenizer: Tokenizer, corpus: Any, question: str, reply: str, threshold: float
) -> None:
    params = RowParams(
        max_new_tokens=24,
        end_ids=[0, 2],
        temperature=0.0,
        exit_mode=ExitMode.OURO,
        exit_threshold=threshold,
    )
    output = model.generate(tokenizer.encode(corpus.chat_prompt(question)), params)
    assert tokenizer.decode(output.output_ids, skip_special_tokens=True) == reply
    if threshold == 1.0:
        assert set(output.exit_depths) == {4}
    else:
        assert len(set(output.exit_depths[1:])) >= 2


def test_held_out_problems_are_not_in_the_corpus(corpus: Any) -> None:
    items = corpus.held_out_items(seed=3, per_kind=5)
    assert {item.kind for item in items} == set(corpus.HARD)
    rng = random.Random(3)
    for kind in corpus.HARD:
        for _ in range(50):
            assert not corpus.is_held_out(corpus.draw_problem(rng, kind, held_out=False))
            assert corpus.is_held_out(corpus.draw_problem(rng, kind, held_out=True))


def test_sums_in_documents_are_right_and_never_held_out(corpus: Any) -> None:
    rng = random.Random(4)
    sums = 0
    for _ in range(2000):
        for text, trained in corpus.document(rng):
            for line in text.replace(",", "\n").split("\n") if trained else ():
                left, sign, right = (
                    line.removesuffix("<|im_end|>").removesuffix("<|endoftext|>").partition(" = ")
                )
                terms = left.strip().split(" ")
                if not sign or len(terms) < 3 or not all(term.isdigit() or term in "+-*" for term in terms):
                    continue
                assert corpus.evaluate(" ".join(terms)) == int(right.rstrip("."))
                assert not corpus.is_held_out(" ".join(terms))
                sums += 1
    assert sums > 300


def test_an_item_is_right_only_when_the_reply_ends_with_its_answer(corpus: Any) -> None:
    item = corpus.Item("addition", "What is 40 + 83?", "123")
    assert item.is_right("40 + 83 = 123.")
    assert not item.is_right("40 + 83 = 1123.")
    assert not item.is_right("123 = 40 + 83.")
    assert corpus.evaluate("7 * 8 + 6 * 3 - 4") == 70
