"""``/v1/completions``."""

from __future__ import annotations

from typing import Any

from ouro_sgl.errors import RequestError
from ouro_sgl.frontend.openai.job import Job, end_fields, extra_key, sampling_params
from ouro_sgl.frontend.openai.logprobs import CompletionLogprobs
from ouro_sgl.frontend.openai.protocol import CompletionRequest
from ouro_sgl.frontend.sampling import check_ids
from ouro_sgl.frontend.schema import GenerateBody
from ouro_sgl.frontend.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


class _State:
    """What one sequence of a stream has sent."""

    def __init__(self, echo: str, logprobs: CompletionLogprobs) -> None:
        self.echo = echo
        self.logprobs = logprobs  # of the output
        self.started = False
        self.characters = 0
        self.tokens = 0
        self.scored = 0  # output tokens whose log-probabilities were sent


class CompletionJob(Job):
    """One request.

    Args:
        vocab_size: of the model; ids beyond it are refused.

    Raises:
        RequestError: values contradict each other.
    """

    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(
        self, request: CompletionRequest, tokenizer: Tokenizer, vocab_size: int, created: int
    ) -> None:
        super().__init__(request, "cmpl-", created)
        if not request.prompt:
            raise RequestError("the prompt is empty")
        if request.best_of is not None and request.best_of != self.samples:
            raise RequestError(f"best_of {request.best_of} must be n, which is {self.samples}")
        self._params = sampling_params(request, request.max_tokens or DEFAULT_MAX_TOKENS)
        self._request = request
        self._tokenizer = tokenizer
        self._skip_special = request.skip_special_tokens is not False
        self._states: dict[int, _State] = {}
        first = request.prompt[0] if isinstance(request.prompt, list) else request.prompt
        self._is_text = isinstance(first, str)
        self._echoes = self._echo_texts(vocab_size) if request.echo else None

    def _echo_texts(self, vocab_size: int) -> list[str]:
        """Texts of the prompts."""
        prompt = self._request.prompt
        prompts: list[Any] = prompt if isinstance(prompt, list) else [prompt]
        if isinstance(prompts[0], int):
            prompts = [prompts]
        return [
            one
            if isinstance(one, str)
            else self._tokenizer.decode(check_ids("prompt", one, vocab_size), self._skip_special)
            for one in prompts
        ]

    @property
    def body(self) -> GenerateBody:
        request = self._request
        prompt: Any = request.prompt
        return GenerateBody(
            text=prompt if self._is_text else None,
            input_ids=None if self._is_text else prompt,
            sampling_params=self._params,
            rid=self.rid,
            stream=self.stream,
            return_logprob=request.logprobs is not None,
            logprob_start_len=0 if request.echo else -1,
            top_logprobs_num=request.logprobs or 0,
            return_text_in_logprobs=True,
            return_prompt_token_ids=bool(request.return_token_ids),
            extra_key=extra_key(request),
            priority=request.priority,
        )

    def _state(self, index: int) -> _State:
        state = self._states.get(index)
        if state is None:
            echo = "" if self._echoes is None else self._echoes[index // self.samples]
            logprobs = CompletionLogprobs(self._tokenizer, len(echo), self._skip_special)
            state = self._states[index] = _State(echo, logprobs)
        return state

    def _choice(self, index: int, answer: dict[str, Any]) -> dict[str, Any]:
        # A plain answer is a stream of one chunk.
        (choice,) = self._deltas(index, answer)
        return choice

    def _deltas(self, index: int, answer: dict[str, Any]) -> list[dict[str, Any]]:
        state = self._state(index)
        meta = answer["meta_info"]
        finished = meta["finish_reason"] is not None
        text = answer["text"][state.characters :]
        state.characters += len(text)
        if not state.started:
            text = state.echo + text
        logprobs = None if self._request.logprobs is None else self._logprobs(state, meta)
        if not text and logprobs is None and not finished:
            return []
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None,
            "matched_stop": None,
        }
        if finished:
            choice.update(end_fields(meta))
        if self._request.return_token_ids:
            choice["token_ids"] = answer["output_ids"][state.tokens :]
            if not state.started:
                choice["prompt_token_ids"] = answer["prompt_token_ids"]
            state.tokens = len(answer["output_ids"])
        state.started = True
        return [choice]

    def _logprobs(self, state: _State, meta: dict[str, Any]) -> dict[str, Any] | None:
        """Those not sent yet; None if there are none."""
        triples, tops = meta["output_token_logprobs"], meta.get("output_top_logprobs", [])
        scored = state.scored
        state.scored = len(triples)
        if state.started and scored == len(triples):
            return None
        shape: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        if self._request.echo and not state.started:
            # A text is echoed as it was sent, special tokens and all.
            skip_special = self._skip_special and not self._is_text
            prompt = CompletionLogprobs(self._tokenizer, 0, skip_special)
            prompt.add(shape, meta["input_token_logprobs"], meta.get("input_top_logprobs", []))
        state.logprobs.add(shape, triples[scored:], tops[scored:])
        return shape
