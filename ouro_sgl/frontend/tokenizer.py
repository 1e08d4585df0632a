"""The checkpoint's tokenizer: ``tokenizer.json`` through ``tokenizers``, never ``transformers``.

Nothing is added to a prompt (no BOS). Special tokens written in a text are recognised, as the
tokenizer file says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ouro_sgl.errors import ConfigError
from ouro_sgl.frontend.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from ouro_sgl.vocabulary import (
    byte_level_table,
    find_anchor,
    is_byte_level,
    load_tokenizer,
    special_ids,
)

# What structures a chat answer. Some checkpoints declare these tokens special, others do not.
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


class Tokenizer:
    """Text to ids and back.

    Args:
        folder: holds ``tokenizer.json``.
        vocab_size: rows of the model's embedding; ids that the tokenizer does not know show nothing.

    Raises:
        ConfigError: the file is missing or unreadable, or has ids that the model lacks.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        path = folder / "tokenizer.json"
        self._tokenizer = load_tokenizer(folder)
        definition = json.loads(self._tokenizer.to_str())
        largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= vocab_size:
            raise ConfigError(f"{path}: token id {largest} is not below the model's vocab_size {vocab_size}")
        self._tables: dict[bool, list[bytes]] | None = None
        self._anchor: list[int] = []
        markers = {self._tokenizer.token_to_id(marker) for marker in MARKERS}
        self._hidden = frozenset(special_ids(self._tokenizer) - markers)  # with keep_markers
        if is_byte_level(self._tokenizer):
            self._tables = self._byte_tables(vocab_size)
            everything = self._tables[False]
            self._marked_table = [b"" if i in self._hidden else data for i, data in enumerate(everything)]
        else:
            self._anchor = find_anchor(self._tokenizer)
        self.longest_token = self._longest_token(definition)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``. Releases the interpreter lock, so it may run beside the event loop."""
        # encode_batch_fast: unlike encode it drops the lock and does not compute offsets.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def detokenizer(self, skip_special_tokens: bool, keep_markers: bool = False) -> Detokenizer:
        """A detokenizer for one sequence.

        Args:
            keep_markers: show the :data:`MARKERS` even when special tokens are skipped.
        """
        marked = skip_special_tokens and keep_markers
        if self._tables is not None:
            return ByteDetokenizer(self._marked_table if marked else self._tables[skip_special_tokens])
        if marked:
            return WindowDetokenizer(self._tokenizer, False, self._anchor, self._hidden)
        return WindowDetokenizer(self._tokenizer, skip_special_tokens, self._anchor)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Text of whole ``ids``, as a sequence of its own."""
        if self._tables is None:
            text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
            return text
        return b"".join([self._tables[skip_special_tokens][i] for i in ids]).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself; U+FFFD where it holds a part of a character."""
        detokenizer = self.detokenizer(skip_special_tokens=False)
        return detokenizer.feed((token_id,)) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, a part of a character included where the tokenizer tells them."""
        if self._tables is not None:
            return self._tables[False][token_id]
        return self.token_text(token_id).encode("utf-8")

    def special_id(self, token: str) -> int | None:
        """Id of the special token that is written ``token``, if there is one."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id if token_id in special_ids(self._tokenizer) else None

    def _byte_tables(self, vocab_size: int) -> dict[bool, list[bytes]]:
        """Bytes of every id, by ``skip_special_tokens``."""
        everything = byte_level_table(self._tokenizer, vocab_size)
        skipped = list(everything)
        for token_id in special_ids(self._tokenizer):
            skipped[token_id] = b""
        return {False: everything, True: skipped}

    def _longest_token(self, definition: dict[str, Any]) -> int | None:
        """Bytes of the longest token, when P tokens can never stand for more than P times as many."""
        shrinks = definition["normalizer"] is not None or any(
            token["lstrip"] or token["rstrip"] for token in definition["added_tokens"]
        )
        if self._tables is None or shrinks or definition["model"].get("unk_token") is not None:
            return None
        return max(map(len, self._tables[False]))
