"""SGLang's frontend backend with the limits of the loop. The only file that needs ``sglang`` to import."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint as SGLangEndpoint
from sglang.lang.interpreter import StreamExecutor
from sglang.lang.ir import SglSamplingParams


@dataclass
class LoopSamplingParams(SglSamplingParams):  # type: ignore[misc]
    """SGLang's sampling parameters plus those that its client has no names for."""

    loop_params: dict[str, float | int] = field(default_factory=dict)

    def to_srt_kwargs(self) -> dict[str, Any]:
        return {**super().to_srt_kwargs(), **self.loop_params}


class RuntimeEndpoint(SGLangEndpoint):  # type: ignore[misc]
    """``sglang.RuntimeEndpoint`` whose every ``gen`` carries defaults of the early exit.

    A value of None is not sent, so the server's own default holds. The server checks the values:
    a bad one fails the first ``gen``. Role blocks are written as ChatML, which Ouro models speak,
    unless ``chat_template_name`` says otherwise (None: SGLang guesses from the model's path).
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | None = None,
        chat_template_name: str | None = "chatml",
        *,
        exit_threshold: float | None = None,
        min_loops: int | None = None,
        max_loops: int | None = None,
    ) -> None:
        super().__init__(base_url, api_key, verify, chat_template_name)
        given = {"exit_threshold": exit_threshold, "min_loops": min_loops, "max_loops": max_loops}
        self.loop_params = {name: value for name, value in given.items() if value is not None}

    def generate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> tuple[str, dict[str, Any]]:
        text, meta_info = super().generate(s, self._with_limits(sampling_params))
        return text, meta_info

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from super().generate_stream(s, self._with_limits(sampling_params))

    def _with_limits(self, sampling_params: SglSamplingParams) -> LoopSamplingParams:
        if sampling_params.n != 1:
            raise ValueError(
                "gen(n=...) is not supported by SGLang's client; use fork(n) and a gen per branch"
            )
        params = LoopSamplingParams(**vars(sampling_params), loop_params=self.loop_params)
        if not isinstance(params.stop, str):
            # The client appends the template's stops to the program's own list at every gen, so a
            # list that a program keeps would grow past what a server accepts.
            params.stop = list(dict.fromkeys(params.stop))
        return params
