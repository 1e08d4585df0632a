"""``sampling_params``: from what a client sent to what the worker needs.

Parsing needs the model's facts alone (:class:`Limits`); the length of the prompt comes in later, with
:meth:`SamplingParams.row_params`. ``null`` means the default everywhere. A key that is not known, or
not served yet, is refused by name.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ouro_sgl.config import EXIT_MODES
from ouro_sgl.errors import RequestError
from ouro_sgl.frontend.grammar import KINDS, MAX_SOURCE_BYTES, Grammar
from ouro_sgl.frontend.stops import StopRegexes
from ouro_sgl.messages import ExitMode, RowParams

DEFAULT_MAX_NEW_TOKENS = 128
GREEDY_BELOW = 1e-6  # a lower temperature is greedy
# The worker computes in fp32. Larger biases and temperatures and smaller penalties mean the same as
# these, but would bring infinities and NaN into the logits.
LARGEST = 1e30
SMALLEST = 1e-20
MAX_STOPS = 32
UINT64 = (1 << 64) - 1


@dataclass(frozen=True)
class Limits:
    """What requests are checked against, and the server's defaults."""

    total_loops: int  # T
    vocab_size: int
    context_length: int  # tokens, prompt and output together
    served_length: int  # tokens; below context_length when the K/V slots hold less
    has_lookahead: bool
    end_ids: tuple[int, ...]  # of the model
    exit_mode: ExitMode
    exit_threshold: float
    min_loops: int
    max_loops: int
    traces: dict[str, list[int]] = field(default_factory=dict)  # exit depths by trace_id


def mix_seed(seed: int, index: int) -> int:
    """Seed of sample ``index`` of a request with ``n`` > 1; sample 0 keeps the seed itself.

    The finaliser of SplitMix64 over seed and index: neighbouring seeds and samples get unrelated
    streams. Unsigned 64 bit in and out.
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & UINT64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & UINT64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & UINT64
    return z ^ (z >> 31)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(low: int | None = None, high: int | None = None) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if not _is_int(value):
            raise RequestError(f"{name} must be an integer, got {_show(value)}")
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f">= {low}" if high is None else f"in [{low}, {high}]"
            raise RequestError(f"{name} must be {bounds}, got {_show(value)}")
        return int(value)

    return check


def _number(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str, Any], float]:
    """A finite number in [low, high], or (low, high] if ``above``."""
    bounds = f"in {'(' if above else '['}{low:g}, {high:g}]" if high < math.inf else "finite"
    if high == math.inf and low > -math.inf:
        bounds = f"finite and >= {low:g}"

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(f"{name} must be a number, got {_show(value)}")
        # Compared before the conversion: an integer can be too large for a float. NaN fails both.
        inside = (low < value if above else low <= value) and value <= high
        if not inside or value in (math.inf, -math.inf):
            raise RequestError(f"{name} must be {bounds}, got {_show(value)}")
        try:
            return float(value)
        except OverflowError:
            raise RequestError(f"{name} is too large") from None

    return check


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {_show(value)}")
    return value


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string, got {_show(value)}")
    return value


def _show(value: Any) -> str:
    """A value as a client may read it in a message: short, whatever was sent."""
    text = repr(value) if not _is_int(value) or abs(value) < 1 << 64 else "a very large integer"
    return text if len(text) <= 60 else text[:57] + "..."


def _top_k(name: str, value: Any) -> int:
    checked = _integer()(name, value)
    if checked != -1 and checked < 1:
        raise RequestError(f"{name} must be -1 (off) or >= 1, got {_show(value)}")
    return checked


def _stops(name: str, value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
        raise RequestError(f"{name} must be a string or a list of strings, got {_show(value)}")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"{name} may hold at most {MAX_STOPS} strings, got {len(stops)}")
    if not all(stops):
        raise RequestError(f"{name} must not hold an empty string")
    return list(stops)


def _stop_regexes(name: str, value: Any) -> StopRegexes | None:
    patterns = [] if value == "" else _stops(name, value)  # clients send it empty for none
    return StopRegexes(patterns) if patterns else None


def _grammar_text(name: str, value: Any) -> str:
    return _check_grammar_size(name, _string(name, value))


def _json_schema(name: str, value: Any) -> str:
    """The schema as JSON; clients send a text or the object itself."""
    if isinstance(value, dict):
        return _check_grammar_size(name, msgspec.json.encode(value).decode())
    return _grammar_text(name, value)


def _check_grammar_size(name: str, source: str) -> str:
    try:
        size = len(source.encode())
    except UnicodeEncodeError:
        raise RequestError(f"{name} holds half a character (a lone surrogate)") from None
    if size > MAX_SOURCE_BYTES:
        raise RequestError(f"{name} must have at most {MAX_SOURCE_BYTES} bytes, got {size}")
    return source


def check_ids(name: str, ids: Any, vocab_size: int) -> list[int]:
    """A list of token ids.

    Raises:
        RequestError: it is no list, or an entry is not an id of the model; names it.
    """
    if not isinstance(ids, list | tuple):
        raise RequestError(f"{name} must be a list of token ids, got {_show(ids)}")
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return list(ids)
    for token_id in ids:
        if not _is_int(token_id):
            raise RequestError(f"{name}: {_show(token_id)} is not a token id")
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{name}: token id {_show(token_id)} is outside [0, {vocab_size})")
    return list(ids)


def _identity(name: str, value: Any) -> Any:
    return value


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "max_new_tokens": _integer(0),
    "min_new_tokens": _integer(0),
    "stop": _stops,
    "stop_regex": _stop_regexes,
    "json_schema": _json_schema,
    "regex": _grammar_text,
    "ebnf": _grammar_text,
    "stop_token_ids": _identity,  # checked against the vocabulary below, as the next one
    "logit_bias": _identity,
    "temperature": _number(0.0),
    "top_p": _number(0.0, 1.0, above=True),
    "top_k": _top_k,
    "min_p": _number(0.0, 1.0),
    "frequency_penalty": _number(-2.0, 2.0),
    "presence_penalty": _number(-2.0, 2.0),
    "repetition_penalty": _number(0.0, 2.0, above=True),
    "n": _integer(1),
    "ignore_eos": _boolean,
    "skip_special_tokens": _boolean,
    # Kept for clients that send it: it means nothing to the tokenizers of fast checkpoints.
    "spaces_between_special_tokens": _boolean,
    "no_stop_trim": _boolean,
    "stream_interval": _integer(1),
    "sampling_seed": _integer(-(1 << 63), (1 << 63) - 1),
    "exit_mode": _string,
    "min_loops": _integer(1),
    "max_loops": _integer(1),
    "exit_threshold": _number(0.0, 1.0),
    "exit_trace": _identity,
    "trace_id": _string,
}


@dataclass(frozen=True)
class SamplingParams:
    """The checked parameters of one request.

    ``row`` lacks what depends on the prompt and the sample: length, seed, log-probabilities.
    """

    row: RowParams
    n: int
    max_new_tokens: int | None  # None: to the end of the context
    explicit_length: bool  # the client gave a number, so it is refused rather than clipped
    seed: int | None  # unsigned 64 bit; None: a random one for each prompt
    stops: list[str]
    stop_regexes: StopRegexes | None
    grammar: Grammar | None  # what the output must match, as the client wrote it
    skip_special_tokens: bool
    no_stop_trim: bool
    stream_interval: int
    limits: Limits

    def new_seed(self, seeds: random.Random) -> int:
        """The seed of one prompt, unsigned 64 bit: the client's, else the next of ``seeds``."""
        return seeds.getrandbits(64) if self.seed is None else self.seed

    def row_params(
        self,
        prompt_tokens: int,
        seed: int,
        *,
        logprobs: bool = False,
        top_logprobs_num: int = 0,
        token_ids_logprob: list[int] | None = None,
        exit_lambdas: bool = False,
    ) -> RowParams:
        """What the worker needs for one sequence.

        Args:
            prompt_tokens: P.
            seed: of this sample, see :func:`mix_seed`.

        Raises:
            RequestError: the prompt or the output does not fit into the served length, or the exit
                trace is too short for it.
        """
        length = self._output_length(prompt_tokens)
        trace = self.row.exit_trace
        if trace is not None:
            if len(trace) < length:
                raise RequestError(f"the exit trace holds {len(trace)} depths for {length} new tokens")
            trace = trace[:length]
        return msgspec.structs.replace(
            self.row,
            max_new_tokens=length,
            seed=seed,
            exit_trace=trace,
            logprobs=logprobs,
            top_logprobs_num=top_logprobs_num,
            token_ids_logprob=token_ids_logprob or [],
            exit_lambdas=exit_lambdas,
        )

    def _output_length(self, prompt_tokens: int) -> int:
        served, context = self.limits.served_length, self.limits.context_length
        limit = f"the context length of {context} tokens"
        if served < context:
            limit = f"the {served} tokens that the K/V slots hold (the context length is {context})"
        room = served - prompt_tokens
        if room <= 0:
            raise RequestError(f"the prompt of {prompt_tokens} tokens is too long for {limit}")
        if self.max_new_tokens is None:
            length = room
        elif self.explicit_length:
            length = self.max_new_tokens
            if length > room:
                raise RequestError(
                    f"the prompt of {prompt_tokens} tokens and max_new_tokens {length} are together "
                    f"{prompt_tokens + length} tokens, more than {limit}"
                )
        else:
            length = min(self.max_new_tokens, room)
        if self.row.min_new_tokens > length:
            raise RequestError(
                f"min_new_tokens {self.row.min_new_tokens} is more than the {length} tokens "
                f"that may follow a prompt of {prompt_tokens}"
            )
        return length


def parse_sampling_params(raw: dict[str, Any], limits: Limits) -> SamplingParams:
    """Check one ``sampling_params`` object.

    Raises:
        RequestError: an unknown key, a wrong type, a value out of range, or keys that contradict each
            other; names the key.
    """
    given: dict[str, Any] = {}
    for name, value in raw.items():
        check = CHECKS.get(name)
        if check is None:
            raise RequestError(f"sampling_params: unknown key {_show(name)}")
        if value is not None:
            given[name] = check(name, value)

    max_new_tokens: int | None = given.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    explicit_length = "max_new_tokens" in given
    if not explicit_length and "max_new_tokens" in raw:
        max_new_tokens = None
    min_new_tokens = given.get("min_new_tokens", 0)
    if max_new_tokens is not None and min_new_tokens > max_new_tokens:
        raise RequestError(f"min_new_tokens {min_new_tokens} is more than max_new_tokens {max_new_tokens}")

    vocab_size = limits.vocab_size
    end_ids: set[int] = set()
    stop_ids = [i for i in _as_list("stop_token_ids", given.get("stop_token_ids", [])) if i is not None]
    stop_ids = check_ids("stop_token_ids", stop_ids, vocab_size)
    if not given.get("ignore_eos", False):
        end_ids.update(limits.end_ids, stop_ids)
    if min_new_tokens and len(end_ids) == vocab_size:
        raise RequestError("min_new_tokens leaves no token: every id of the vocabulary is an end id")
    bias = _logit_bias(given.get("logit_bias", {}), vocab_size)
    temperature = given.get("temperature", 1.0)
    top_k = given.get("top_k", -1)
    seed = given.get("sampling_seed")

    grammar = _grammar(given)

    row = RowParams(
        max_new_tokens=0,  # set with the prompt
        min_new_tokens=min_new_tokens,
        end_ids=sorted(end_ids),
        temperature=min(temperature, LARGEST) if temperature >= GREEDY_BELOW else 0.0,
        top_p=given.get("top_p", 1.0),
        top_k=top_k if 0 < top_k < vocab_size else 0,
        min_p=given.get("min_p", 0.0),
        frequency_penalty=given.get("frequency_penalty", 0.0),
        presence_penalty=given.get("presence_penalty", 0.0),
        repetition_penalty=max(given.get("repetition_penalty", 1.0), SMALLEST),
        bias_ids=list(bias),
        bias_values=list(bias.values()),
        constrained=grammar is not None,
        **_exit_fields(given, limits),
    )
    return SamplingParams(
        row=row,
        n=given.get("n", 1),
        max_new_tokens=max_new_tokens,
        explicit_length=explicit_length,
        seed=None if seed is None else seed & UINT64,
        stops=given.get("stop", []),
        stop_regexes=given.get("stop_regex"),
        grammar=grammar,
        skip_special_tokens=given.get("skip_special_tokens", True),
        no_stop_trim=given.get("no_stop_trim", False),
        stream_interval=given.get("stream_interval", 1),
        limits=limits,
    )


def _grammar(given: dict[str, Any]) -> Grammar | None:
    """The one grammar of a request; an empty text is none."""
    grammars = [Grammar(kind, given[kind]) for kind in KINDS if given.get(kind)]
    if len(grammars) > 1:
        kinds = " and ".join(grammar.kind for grammar in grammars)
        raise RequestError(f"{kinds} cannot both constrain the output: give one of them")
    return grammars[0] if grammars else None


def _logit_bias(raw: Any, vocab_size: int) -> dict[int, float]:
    """Bias by token id, in increasing order of the ids."""
    if not isinstance(raw, dict):
        raise RequestError(f"logit_bias must be an object of token ids and numbers, got {_show(raw)}")
    check = _number(-math.inf)
    bias: dict[int, float] = {}
    for key, value in raw.items():
        # JSON has no integer keys.
        if not isinstance(key, str | int) or not str(key).isascii() or not str(key).isdigit():
            raise RequestError(f"logit_bias: {_show(key)} is not a token id")
        # The length is looked at first: converting a very long number is slow.
        if len(str(key)) > 20 or int(key) >= vocab_size:
            raise RequestError(f"logit_bias: token id {_show(key)} is outside [0, {vocab_size})")
        bias[int(key)] = max(-LARGEST, min(check(f"logit_bias[{key}]", value), LARGEST))
    return dict(sorted(bias.items()))


def _exit_fields(given: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """The exit rule of a request, as fields of :class:`RowParams`."""
    loops = limits.total_loops
    mode = limits.exit_mode
    if "exit_mode" in given:
        name = given["exit_mode"]
        if name not in EXIT_MODES:
            raise RequestError(f"exit_mode {_show(name)} is not one of {', '.join(EXIT_MODES)}")
        mode = EXIT_MODES[name]
    trace = _exit_trace(given, limits)
    if trace is not None:
        if "exit_mode" in given and mode is not ExitMode.TRACE:
            raise RequestError(f"exit_mode {given['exit_mode']} contradicts the exit trace of the request")
        for name in ("min_loops", "max_loops", "exit_threshold"):
            if name in given:
                raise RequestError(f"{name} and an exit trace cannot both be given")
        return {"exit_mode": ExitMode.TRACE, "max_loops": loops, "exit_trace": trace}
    if mode is ExitMode.TRACE:
        raise RequestError("exit_mode trace needs exit_trace or trace_id in the request")
    if mode is ExitMode.LOOKAHEAD and not limits.has_lookahead:
        raise RequestError("exit_mode lookahead: the checkpoint has no trained lookahead head")

    low, high = given.get("min_loops"), given.get("max_loops")
    for name, value in (("min_loops", low), ("max_loops", high)):
        if value is not None and value > loops:
            raise RequestError(f"{name} {_show(value)} is more than the model's {loops} loops")
    # A server default gives way to what the client asked for.
    if low is None:
        low = min(limits.min_loops, high or loops)
    if high is None:
        high = max(limits.max_loops, low)
    if low > high:
        raise RequestError(f"min_loops {low} is more than max_loops {high}")
    threshold = given.get("exit_threshold", limits.exit_threshold)
    return {"exit_mode": mode, "min_loops": low, "max_loops": high, "exit_threshold": threshold}


def _exit_trace(given: dict[str, Any], limits: Limits) -> list[int] | None:
    if "exit_trace" in given and "trace_id" in given:
        raise RequestError("exit_trace and trace_id cannot both be given")
    if "trace_id" in given:
        trace_id = given["trace_id"]
        if trace_id not in limits.traces:
            raise RequestError(f"trace_id {_show(trace_id)} is not in the server's exit trace file")
        return limits.traces[trace_id]
    if "exit_trace" in given:
        return check_trace("exit_trace", given["exit_trace"], limits.total_loops)
    return None


def check_trace(name: str, depths: Any, total_loops: int) -> list[int]:
    """A list of exit depths: the first is T, the others lie in 1..T.

    Raises:
        RequestError: it is not.
    """
    checked: list[int] = _as_list(name, depths)
    for index, depth in enumerate(checked):
        if not _is_int(depth) or not 1 <= depth <= total_loops:
            raise RequestError(f"{name}[{index}]: {_show(depth)} is not a depth in 1..{total_loops}")
    if checked and checked[0] != total_loops:
        raise RequestError(f"{name} must start with the full depth {total_loops}, got {checked[0]}")
    return checked


def _as_list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name} must be a list, got {_show(value)}")
    return list(value)
