"""The body of ``/generate``: its shape, and its expansion into prompts.

Types are checked while the JSON is decoded (:class:`GenerateBody`), values here. Unknown top-level
keys are ignored, as clients of SGLang expect; those of the loop, which no such client sends and which
belong into ``sampling_params``, are refused. A batch is refused as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from ouro_sgl.errors import RequestError
from ouro_sgl.frontend.sampling import Limits, SamplingParams, check_ids, parse_sampling_params

INT64 = 1 << 63
MAX_NAME = 1024  # characters of rid and extra_key; every sequence of a call and every chunk repeats them

T = TypeVar("T")


class SchemaError(RequestError):
    """The body is not JSON, or a field has the wrong type."""


class GenerateBody(msgspec.Struct):
    """Fields of a request; null and absent mean the same. See :class:`Prompt` for their meaning."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_exit_logprobs: bool | None = None
    extra_key: str | list[str] | None = None
    priority: int | None = None


class _ReceivedBody(GenerateBody):
    """With the keys that are easily put beside ``sampling_params``: OpenAI's routes take them there."""

    exit_mode: Any = None
    min_loops: Any = None
    max_loops: Any = None
    exit_threshold: Any = None
    exit_trace: Any = None
    trace_id: Any = None


_MISPLACED = _ReceivedBody.__struct_fields__[len(GenerateBody.__struct_fields__) :]
_decoder = msgspec.json.Decoder(_ReceivedBody)


def decode_body(data: bytes) -> GenerateBody:
    """Parse a request body.

    Raises:
        SchemaError: it is not JSON in UTF-8, not of the shape of :class:`GenerateBody`, or has a key
            of the loop beside ``sampling_params``.
    """
    try:
        if not data.isascii():
            data.decode("utf-8")  # the decoder below skips over what it does not need
        body = _decoder.decode(data)
    except UnicodeDecodeError:
        raise SchemaError("the request body is not valid UTF-8") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise SchemaError(f"the request body cannot be read: {error}") from None
    for name in _MISPLACED:
        if getattr(body, name) is not None:
            raise SchemaError(f"{name} belongs into sampling_params")
    return body


def convert_body(payload: dict[str, Any]) -> GenerateBody:
    """The same for Python objects.

    Raises:
        SchemaError: a field has the wrong type, or a text holds half a character.
    """
    try:
        body = msgspec.convert(payload, GenerateBody)
        msgspec.json.encode(body, enc_hook=repr)  # finds the half characters, which no JSON body has
    except UnicodeEncodeError:
        raise SchemaError("a text of the request holds half a character (a lone surrogate)") from None
    except (msgspec.ValidationError, RecursionError) as error:
        raise SchemaError(str(error)) from None
    return body


@dataclass(slots=True)
class Prompt:
    """One prompt of a call: ``text`` or ``ids``, and how to run it."""

    text: str | None
    ids: list[int]  # empty until the text is tokenized
    sampling: SamplingParams
    logprobs: bool
    logprob_start: int | None  # position of the first prompt token to score; None: none
    top_logprobs_num: int
    token_ids_logprob: list[int]
    extra_key: str | None


@dataclass(slots=True)
class Expanded:
    """A whole call. Its sequences are numbered prompt by prompt, ``samples`` for each."""

    prompts: list[Prompt]
    samples: int  # n
    many: bool  # the client expects a list
    rids: list[str] | None  # by sequence; None: to be made up
    groups: dict[str, range]  # names that the client gave to several sequences together


def expand(body: GenerateBody, limits: Limits, max_sequences: int | None = None) -> Expanded:
    """Check every value that does not need the tokenizer and split the call into prompts.

    Args:
        max_sequences: prompts times samples of the call; None: any number.

    Raises:
        RequestError: a value is out of range, lists differ in length, a field is not served.
    """
    if body.priority is not None and not -INT64 <= body.priority < INT64:
        raise RequestError("priority must be a 64-bit integer")
    inputs, batch = _inputs(body)
    size = len(inputs)
    _check_count(size, 1, max_sequences)  # before anything is done for each of them
    samplings = _samplings(body, size, batch, limits)
    samples = samplings[0].n
    if any(sampling.n != samples for sampling in samplings):
        raise RequestError("n must be the same for all prompts of a batch")
    _check_count(size, samples, max_sequences)

    logprobs = _per_prompt("return_logprob", body.return_logprob, size, False)
    starts = _per_prompt("logprob_start_len", body.logprob_start_len, size, None)
    tops = _per_prompt("top_logprobs_num", body.top_logprobs_num, size, 0)
    extra_keys = _per_prompt("extra_key", body.extra_key, size, None)
    _check_names("extra_key", body.extra_key)
    _check_names("rid", body.rid)
    scored = _scored_ids(body.token_ids_logprob, size, batch, limits.vocab_size)
    # Clients that score bare token lists (unconditional likelihood) send no start and want them all.
    ids_batch = body.text is None and batch
    prompts = []
    for index, given in enumerate(inputs):
        text, ids = (given, []) if isinstance(given, str) else (None, given)
        # An id is looked at only in a list that is short enough to be served.
        if text is None and (not isinstance(ids, list) or len(ids) < limits.served_length):
            ids = check_ids("input_ids", ids, limits.vocab_size)
        sampling, start, top = samplings[index], starts[index], tops[index]
        if not 0 <= top <= limits.vocab_size:
            raise RequestError(f"top_logprobs_num must be in [0, {limits.vocab_size}], got {top}")
        if start is not None and start < -1:
            raise RequestError(f"logprob_start_len must be -1 or a position, got {start}")
        if start is None and ids_batch and sampling.max_new_tokens == 0:
            start = 0
        wanted = logprobs[index]
        prompts.append(
            Prompt(
                text=text,
                ids=ids,
                sampling=sampling,
                logprobs=wanted,
                logprob_start=None if start == -1 or not wanted else start,
                top_logprobs_num=top if wanted else 0,
                token_ids_logprob=scored[index] if wanted else [],
                extra_key=extra_keys[index] or None,
            )
        )
    rids, groups = _rids(body.rid, size, samples, batch)
    return Expanded(prompts, samples, many=batch or samples > 1, rids=rids, groups=groups)


def _check_count(prompts: int, samples: int, max_sequences: int | None) -> None:
    if max_sequences is not None and prompts * samples > max_sequences:
        raise RequestError(
            f"a call may hold at most {max_sequences} sequences, got {prompts} prompts with n {samples}"
        )


def _inputs(body: GenerateBody) -> tuple[Sequence[Any], bool]:
    """Texts or lists of ids (not looked into), one for each prompt, and whether the client sent a batch."""
    if body.text is not None:
        if not body.text and isinstance(body.text, list):
            raise RequestError("text must not be an empty list")
        return ([body.text], False) if isinstance(body.text, str) else (body.text, True)
    if body.input_ids is None:
        raise RequestError("text or input_ids must be given")
    if not body.input_ids:
        raise RequestError("input_ids must not be empty")
    if isinstance(body.input_ids[0], list):
        return body.input_ids, True
    return [body.input_ids], False


def _samplings(body: GenerateBody, size: int, batch: bool, limits: Limits) -> list[SamplingParams]:
    raw = body.sampling_params
    if not isinstance(raw, list):
        return [parse_sampling_params(raw or {}, limits)] * size
    if not batch:
        raise RequestError("sampling_params is a list, but there is a single prompt")
    if len(raw) != size:
        raise RequestError(f"sampling_params holds {len(raw)} entries for {size} prompts")
    return [parse_sampling_params(params, limits) for params in raw]


def _per_prompt(name: str, value: T | list[T] | None, size: int, default: Any) -> list[Any]:
    """A field that may be given once or for each prompt."""
    if isinstance(value, list):
        if len(value) != size:
            raise RequestError(f"{name} holds {len(value)} entries for {size} prompts")
        return value
    return [default if value is None else value] * size


def _check_names(field: str, names: str | list[Any] | None) -> None:
    for name in [names] if isinstance(names, str) else names or ():
        if name is not None and len(name) > MAX_NAME:
            raise RequestError(f"{field} may hold at most {MAX_NAME} characters, got {len(name)}")


def _scored_ids(raw: list[Any] | None, size: int, batch: bool, vocab_size: int) -> list[list[int]]:
    """``token_ids_logprob`` of every prompt; one list that all of them share is looked at once."""

    def check(ids: Any) -> list[int]:
        if isinstance(ids, list) and len(ids) > vocab_size:
            raise RequestError(
                f"token_ids_logprob may hold at most {vocab_size} ids, as many as there are, got {len(ids)}"
            )
        return check_ids("token_ids_logprob", ids, vocab_size)

    if not raw:
        return [[]] * size
    if not any(isinstance(entry, list) or entry is None for entry in raw):
        return [check(raw)] * size
    if not batch:
        raise RequestError("token_ids_logprob must be a flat list of ids for a single prompt")
    if len(raw) != size:
        raise RequestError(f"token_ids_logprob holds {len(raw)} entries for {size} prompts")
    return [[] if entry is None else check(entry) for entry in raw]


def _rids(
    raw: str | list[str] | None, size: int, samples: int, batch: bool
) -> tuple[list[str] | None, dict[str, range]]:
    """Ids of all sequences, and the names of several sequences together."""
    if raw is None or raw == "":
        return None, {}
    if isinstance(raw, str):
        if not batch and samples == 1:
            return [raw], {}
        return [f"{raw}_{index}" for index in range(size * samples)], {raw: range(size * samples)}
    if not batch and samples == 1:
        raise RequestError("rid must be a string for a single prompt")
    if len(raw) != size:
        raise RequestError(f"rid holds {len(raw)} entries for {size} prompts")
    if len(set(raw)) != size:
        raise RequestError("rid holds the same id twice")
    if samples == 1:
        return list(raw), {}
    groups = {rid: range(i * samples, (i + 1) * samples) for i, rid in enumerate(raw)}
    return [f"{rid}_{index}" for rid in raw for index in range(samples)], groups
