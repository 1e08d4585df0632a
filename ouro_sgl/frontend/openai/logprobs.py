"""Log-probabilities in the two shapes of OpenAI's API.

In: the native triples ``[value, id, text]`` and lists of them for the likeliest tokens.
"""

from __future__ import annotations

from typing import Any

from ouro_sgl.frontend.tokenizer import Tokenizer

Triple = list[Any]


def chat_logprobs(
    triples: list[Triple], tops: list[list[Triple] | None], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Shape of chat completions. ``tops``: as long as ``triples``, or empty."""

    def entry(triple: Triple) -> dict[str, Any]:
        value, token_id, text = triple
        return {"token": text, "bytes": list(tokenizer.token_bytes(token_id)), "logprob": value}

    content = []
    for position, triple in enumerate(triples):
        best = tops[position] if tops else None
        content.append({**entry(triple), "top_logprobs": [entry(top) for top in best or ()]})
    return {"content": content}


class CompletionLogprobs:
    """Shape of completions, built up along a part (the prompt or the output) of one sequence.

    Args:
        offset: characters of the choice's text in front of the part.
        skip_special_tokens: whether the text lacks special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._offset = offset
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens)

    def add(
        self, shape: dict[str, list[Any]], triples: list[Triple], tops: list[list[Triple] | None]
    ) -> None:
        """Put the next tokens into ``shape``. ``tops``: as long as ``triples``, or empty."""
        for _, token_id, _ in triples:
            shape["text_offset"].append(self._offset)
            self._offset += len(self._detokenizer.feed((token_id,)))
        shape["tokens"] += [self._text(triple) for triple in triples]
        shape["token_logprobs"] += [value for value, _, _ in triples]
        shape["top_logprobs"] += [best and self._best(best) for best in tops]

    def _best(self, triples: list[Triple]) -> dict[str, float]:
        best: dict[str, float] = {}
        for triple in triples:
            best.setdefault(self._text(triple), triple[0])  # tokens that read alike: the likeliest
        return best

    def _text(self, triple: Triple) -> str:
        text: str = triple[2]
        if "\ufffd" not in text:
            return text
        data = self._tokenizer.token_bytes(triple[1])
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return data.decode("latin-1")  # a part of a character: one character for each byte
