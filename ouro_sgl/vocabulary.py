"""What every token id stands for, in bytes, from a checkpoint's ``tokenizer.json``.

The frontend makes text of it and grammars are matched against it, so both see the same output.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import tokenizers

from ouro_sgl.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # of vocabularies that fall back to bytes


def load_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a folder.

    Raises:
        ConfigError: ``tokenizer.json`` is missing or unreadable.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    try:
        # The bindings raise bare Exception, whatever is wrong with the file.
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise ConfigError(f"{path} is not a readable tokenizer: {error}") from None
    # A truncating or padding tokenizer would silently change prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def special_ids(tokenizer: tokenizers.Tokenizer) -> set[int]:
    """Ids of the special tokens."""
    added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
    return {token_id for token_id, token in added.items() if token.special}


def is_byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether every token is a fixed string of bytes."""
    return _is_byte_level(json.loads(tokenizer.to_str())["decoder"])


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        parts = decoder["decoders"]
        return len(parts) == 1 and _is_byte_level(parts[0])
    return bool(decoder["type"] == "ByteLevel")


def find_anchor(tokenizer: tokenizers.Tokenizer) -> list[int]:
    """An ordinary token whose text does not depend on what follows it, or nothing.

    Decoders treat the first token of a sequence in their own way; behind an anchor a token has the text
    that it has in an output, which continues a prompt.
    """
    special = special_ids(tokenizer)
    for token_id in sorted(tokenizer.get_vocab(with_added_tokens=False).values()):
        text = tokenizer.decode([token_id])
        if (
            token_id not in special
            and text.isascii()
            and text.isalnum()
            and tokenizer.decode([token_id, token_id]).startswith(text)
        ):
            return [token_id]
    return []


def byte_level_table(tokenizer: tokenizers.Tokenizer, vocab_size: int) -> list[bytes]:
    """Bytes of every id below ``vocab_size`` of a byte-level tokenizer; empty for unknown ids."""
    alphabet = _byte_alphabet()
    table: list[bytes] = []
    for token_id in range(vocab_size):
        token = tokenizer.id_to_token(token_id) or ""
        try:
            table.append(bytes([alphabet[character] for character in token]))
        except KeyError:  # an added token that is plain text
            table.append(token.encode("utf-8"))
    return table


def grammar_table(tokenizer: tokenizers.Tokenizer, vocab_size: int) -> list[bytes]:
    """Bytes that every id below ``vocab_size`` adds to an output; empty for special and unknown ids."""
    if is_byte_level(tokenizer):
        table = byte_level_table(tokenizer, vocab_size)
    else:
        anchor = find_anchor(tokenizer)
        start = len(tokenizer.decode(anchor))
        table = []
        for token_id in range(vocab_size):
            token = tokenizer.id_to_token(token_id) or ""
            byte = _BYTE_TOKEN.fullmatch(token)
            if byte is not None:
                table.append(bytes([int(byte[1], 16)]))
            else:
                table.append(tokenizer.decode([*anchor, token_id])[start:].encode("utf-8") if token else b"")
    for token_id in special_ids(tokenizer):
        table[token_id] = b""
    return table


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary, to the byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    alphabet = {chr(byte): byte for byte in shown}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return alphabet
