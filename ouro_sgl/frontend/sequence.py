"""One sequence while it is generated: its tokens, its text, its answer.

Text is made as late as possible. A sequence with stop strings decodes every token as it comes; any
other decodes when somebody asks for the answer, so a plain request is decoded once, at its end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Any

from ouro_sgl.errors import RequestError
from ouro_sgl.frontend.sampling import SamplingParams
from ouro_sgl.frontend.stops import StopMatch, StopMatcher
from ouro_sgl.frontend.tokenizer import Tokenizer
from ouro_sgl.messages import (
    INITIAL_WEIGHT_VERSION,
    Finished,
    FinishReason,
    OutputLogprobs,
    PromptLogprobs,
    RowParams,
    TopLogprobs,
)

# JSON has neither infinity nor NaN: a masked token gets this instead.
LOWEST_LOGPROB = -9999.0


class SequenceLogprobs:
    """Log-probabilities in the shape of an answer: triples ``[value, id, text or null]``."""

    def __init__(self, tokenizer: Tokenizer | None, params: RowParams) -> None:
        """``tokenizer``: where the texts come from; None: they stay null."""
        self._tokenizer = tokenizer
        self._tops = params.top_logprobs_num > 0
        self._scored_ids = params.token_ids_logprob
        self._input: list[list[Any]] = []
        self._output: list[list[Any]] = []
        self._input_tops: list[list[list[Any]] | None] = []
        self._output_tops: list[list[list[Any]] | None] = []
        self._input_scored: list[list[list[Any]] | None] = []
        self._output_scored: list[list[list[Any]] | None] = []

    def add_input(self, prompt_ids: list[int], logprobs: PromptLogprobs) -> None:
        ids = prompt_ids[logprobs.start : logprobs.start + len(logprobs.values)]
        self._input += [self._triple(v, i) for v, i in zip(logprobs.values, ids, strict=True)]
        for top in logprobs.tops:
            self._add_tops(top, self._input_tops, self._input_scored)

    def add_output(self, ids: Seq[int], logprobs: OutputLogprobs) -> None:
        self._output += [self._triple(v, i) for v, i in zip(logprobs.values, ids, strict=False)]
        for top in logprobs.tops[: len(ids)]:
            self._add_tops(top, self._output_tops, self._output_scored)

    def truncate(self, num_tokens: int) -> None:
        del self._output[num_tokens:], self._output_tops[num_tokens:], self._output_scored[num_tokens:]

    def meta_info(self) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "input_token_logprobs": self._input,
            "output_token_logprobs": self._output,
            "output_token_logprobs_length": len(self._output),
        }
        if self._tops:
            meta["input_top_logprobs"] = self._input_tops
            meta["output_top_logprobs"] = self._output_tops
        if self._scored_ids:
            meta["input_token_ids_logprobs"] = self._input_scored
            meta["output_token_ids_logprobs"] = self._output_scored
        return meta

    def _add_tops(self, top: TopLogprobs | None, tops: list[Any], scored: list[Any]) -> None:
        tops.append(top and [self._triple(v, i) for v, i in zip(top.top_values, top.top_ids, strict=True)])
        scored.append(
            top and [self._triple(v, i) for v, i in zip(top.id_values, self._scored_ids, strict=True)]
        )

    def _triple(self, value: float | None, token_id: int) -> list[Any]:
        if value is not None and not value > LOWEST_LOGPROB:  # NaN too
            value = LOWEST_LOGPROB
        return [value, token_id, None if self._tokenizer is None else self._tokenizer.token_text(token_id)]


class Sequence:
    """State of one sequence, from the request to its terminal message.

    Args:
        uid: of the scheduler's messages.
        rid: of the client.
        index: place among the sequences of its call.
        prompt_ids: P ids.
        params: as sent to the scheduler.
        logprobs: collects log-probabilities, if the client asked for them.
        return_prompt_ids: the answer repeats the prompt's ids.
        keep_markers: the text shows the tokenizer's markers, see :meth:`Tokenizer.detokenizer`.
        weight_version: what is served as the request comes in.
    """

    def __init__(
        self,
        uid: int,
        rid: str,
        index: int,
        prompt_ids: list[int],
        params: RowParams,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        logprobs: SequenceLogprobs | None,
        return_prompt_ids: bool,
        keep_markers: bool = False,
        weight_version: str = INITIAL_WEIGHT_VERSION,
    ) -> None:
        self.uid = uid
        self.rid = rid
        self.index = index
        self.stream_interval = sampling.stream_interval
        self.shown_tokens = 0  # output tokens when the client last got a chunk
        self.prompt_tokens = len(prompt_ids)
        self.output_ids: list[int] = []
        self.exit_depths: list[int] = []
        self.cached_tokens = 0
        self.finish_reason: dict[str, Any] | None = None
        self.error: RequestError | None = None
        self._max_new_tokens = params.max_new_tokens
        self._end_ids = params.end_ids
        self._trim = not sampling.no_stop_trim
        self._prompt_ids = prompt_ids if return_prompt_ids or logprobs is not None else None
        self._return_prompt_ids = return_prompt_ids
        self._logprobs = logprobs
        self._num_retractions = 0
        self._weight_versions = [weight_version]
        self._exit_lambdas: list[list[float]] | None = [] if params.exit_lambdas else None
        self._started = time.monotonic()
        self._latency: float | None = None
        self._tokenizer = tokenizer
        self._skip_special = sampling.skip_special_tokens
        self._keep_markers = keep_markers
        self._detokenizer = tokenizer.detokenizer(self._skip_special, keep_markers)
        self._decoded = 0  # output tokens given to the detokenizer
        self._pieces: list[str] = []
        self._matcher: StopMatcher | None = None
        if sampling.stops or sampling.stop_regexes is not None:
            self._matcher = StopMatcher(sampling.stops, params.min_new_tokens, sampling.stop_regexes)
        self._match: StopMatch | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def start(
        self, cached_tokens: int, logprobs: PromptLogprobs | None, weight_versions: Seq[str] = ()
    ) -> None:
        """The prompt is computed. ``weight_versions``: if others than at the request's arrival."""
        self.cached_tokens = cached_tokens
        if weight_versions:
            self._weight_versions = list(weight_versions)
        if logprobs is not None and self._logprobs is not None and self._prompt_ids is not None:
            self._logprobs.add_input(self._prompt_ids, logprobs)

    def add(
        self,
        ids: list[int],
        exit_depths: list[int],
        logprobs: OutputLogprobs | None,
        exit_lambdas: list[list[float]] | None = None,
    ) -> int | None:
        """New tokens. If they complete a stop string: the number of output tokens that it needs.

        Tokens behind a stop string are dropped here, whatever still arrives.

        Raises:
            RequestError: looking for the stops takes too long.
        """
        if self._match is not None or self.finished:
            return None
        before = len(self.output_ids)
        self.output_ids += ids
        self.exit_depths += exit_depths
        if self._exit_lambdas is not None:
            self._exit_lambdas += exit_lambdas or []
        stopped = None
        if self._matcher is not None and self._find_stop(self._matcher):
            stopped = self._decoded
            self._truncate(stopped)
        if logprobs is not None and self._logprobs is not None:
            self._logprobs.add_output(self.output_ids[before:], logprobs)
        return stopped

    def finish(self, message: Finished) -> None:
        """The terminal message. A stop string found here wins over what the scheduler saw later."""
        self._latency = time.monotonic() - self._started
        self.cached_tokens = message.cached_tokens
        self._num_retractions = message.num_retractions
        self._weight_versions = message.weight_versions or self._weight_versions
        if self._match is not None:
            self.finish_reason = {"type": "stop", "matched": self._match.stop}
            return
        if message.status is not None or message.reason == FinishReason.ERROR:
            self.error = RequestError(message.message or "the request failed", message.status or 500)
            return
        self._truncate(message.num_tokens)
        if message.reason == FinishReason.STOP_ID:
            self.finish_reason = {"type": "stop", "matched": message.matched}
        elif message.reason == FinishReason.LENGTH:
            self.finish_reason = {"type": "length", "length": self._max_new_tokens}
        elif message.reason == FinishReason.STOP_GRAMMAR:
            self.finish_reason = {"type": "stop", "matched": None}
        else:
            self.finish_reason = {"type": "abort", "message": message.message or "the request was aborted"}
        # An end id on the last allowed token is no text either, though the length is what ended it.
        self._decode(self._settled_tokens() if self._trim else len(self.output_ids))
        # The text of an aborted sequence is a prefix of what it would have become, so an unfinished
        # character is left out.
        if message.reason != FinishReason.ABORT:
            self._pieces.append(self._detokenizer.finish())

    def answer(self) -> dict[str, Any]:
        """The answer so far; its lists are this sequence's own and go on growing."""
        if self._matcher is None and not self.finished:
            self._decode(self._settled_tokens())
        text = "".join(self._pieces)
        self._pieces = [text]
        if self._matcher is not None and not self.finished and self._match is None:
            text = text[: len(text) - self._matcher.held_back()]
        count = len(self.output_ids)
        depths = self.exit_depths
        latency = self._latency
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "weight_version": self._weight_versions[-1],
            "num_retractions": self._num_retractions,
            "completion_tokens": count,
            "cached_tokens": self.cached_tokens,
            "exit_depths": depths,
            "mean_exit_depth": sum(depths) / count if count else None,
            "e2e_latency": time.monotonic() - self._started if latency is None else latency,
        }
        if len(self._weight_versions) > 1:
            meta["weight_versions"] = self._weight_versions
        if self._exit_lambdas is not None:
            meta["exit_logprobs"] = self._exit_lambdas
        if self._logprobs is not None:
            meta.update(self._logprobs.meta_info())
        answer: dict[str, Any] = {"text": text, "output_ids": self.output_ids, "meta_info": meta}
        if self._return_prompt_ids:
            answer["prompt_token_ids"] = self._prompt_ids
        return answer

    def _settled_tokens(self) -> int:
        """Output tokens whose text may be shown: all but a last one that is, or may become, the stop."""
        count = len(self.output_ids)
        return count - 1 if count and self.output_ids[-1] in self._end_ids else count

    def _decode(self, until: int) -> None:
        if until > self._decoded:
            self._pieces.append(self._detokenizer.feed(self.output_ids[self._decoded : until]))
            self._decoded = until

    def _find_stop(self, matcher: StopMatcher) -> bool:
        """Decode token by token, up to the first stop string."""
        for position in range(self._decoded, self._settled_tokens()):
            piece = self._detokenizer.feed(self.output_ids[position : position + 1])
            self._pieces.append(piece)
            self._decoded = position + 1
            match = matcher.feed(piece, self._decoded)
            if match is not None:
                self._match = match
                self._pieces = ["".join(self._pieces)[: match.start if self._trim else match.end]]
                return True
        return False

    def _truncate(self, num_tokens: int) -> None:
        del self.output_ids[num_tokens:], self.exit_depths[num_tokens:]
        if self._exit_lambdas is not None:
            del self._exit_lambdas[num_tokens:]
        if self._logprobs is not None:
            self._logprobs.truncate(num_tokens)
        if num_tokens < self._decoded:
            self._detokenizer = self._tokenizer.detokenizer(self._skip_special, self._keep_markers)
            self._pieces = []
            self._decoded = 0
