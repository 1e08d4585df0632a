"""``/v1/chat/completions``."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ouro_sgl.config import ServerArgs
from ouro_sgl.errors import ConfigError, RequestError
from ouro_sgl.frontend.chat_template import ChatTemplate
from ouro_sgl.frontend.openai.job import CONSTRAINTS, Job, add_schema, end_fields, extra_key, sampling_params
from ouro_sgl.frontend.openai.logprobs import chat_logprobs
from ouro_sgl.frontend.openai.protocol import ChatRequest, Message, NamedTool
from ouro_sgl.frontend.openai.reasoning import CLOSE, OPEN, ReasoningSplitter
from ouro_sgl.frontend.openai.tool_calls import (
    CallParser,
    ListedCalls,
    MarkedCalls,
    ToolCall,
    calls_schema,
)
from ouro_sgl.frontend.schema import GenerateBody
from ouro_sgl.frontend.tokenizer import Tokenizer
from ouro_sgl.models.config import read_json

TURN_END = "<|im_end|>"  # of ChatML
# What a checkpoint may recommend for chats, in generation_config.json.
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Variables of a template that a request must not set.
RESERVED = ("messages", "tools", "add_generation_prompt", "chat_template")


class ChatFormat:
    """How a checkpoint chats: its template, the ids that end a turn, the sampling that it recommends.

    Args:
        args: resolved settings.

    Raises:
        ConfigError: the template that ``--chat-template`` names cannot be used. A checkpoint without a
            template of its own is served; chats with it are refused.
    """

    def __init__(self, args: ServerArgs, tokenizer: Tokenizer) -> None:
        folder = Path(args.tokenizer_path or args.model_path)
        file = Path(args.chat_template) if args.chat_template else None
        self._template: ChatTemplate | None = None
        self._lack = ""
        self.turn_ends: list[int] = []
        try:
            self._template = ChatTemplate(folder, file)
        except ConfigError as error:
            if file is not None:
                raise
            self._lack = f"this server cannot chat: {error}"
        else:
            # Some checkpoints name the end of a text as their only end id, not that of a turn.
            ends = {self._template.eos_token}
            if TURN_END in self._template.source:
                ends.add(TURN_END)
            found = (tokenizer.special_id(token) for token in ends)
            self.turn_ends = sorted(token_id for token_id in found if token_id is not None)
        self.recommended = _recommended(Path(args.model_path) / "generation_config.json")

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: dict[str, Any]
    ) -> str:
        """The prompt; see :meth:`ChatTemplate.render`.

        Raises:
            RequestError: there is no template, or it refuses these messages.
        """
        if self._template is None:
            raise RequestError(self._lack)
        return self._template.render(messages, tools, variables)


def _recommended(file: Path) -> dict[str, float]:
    values = read_json(file) if file.is_file() else {}
    found = {name: values[name] for name in RECOMMENDED if isinstance(values.get(name), int | float)}
    if found.get("top_k") == 0:
        del found["top_k"]  # "off" there
    return found


def template_message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: content as one string, arguments of calls as objects.

    Raises:
        RequestError: content is missing, or arguments are no JSON object.
    """
    fields = message.model_dump(exclude_none=True, exclude_unset=True)
    content = message.content
    if isinstance(content, list):
        content = " ".join(part.text for part in content)
    if content is None:
        if message.role != "assistant":
            raise RequestError(f"messages: content of a {message.role} message must not be null")
        content = ""
    fields["content"] = content
    for call in fields.get("tool_calls", ()):
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = None
            if not isinstance(arguments, dict):
                raise RequestError("messages: arguments of a tool call must be a JSON object")
            call["function"]["arguments"] = arguments
    return fields


@dataclass
class _Delta:
    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class _Turn:
    """The answer of one sequence, taken apart as it grows."""

    def __init__(self, splitter: ReasoningSplitter | None, parser: CallParser | None) -> None:
        self._splitter = splitter
        self._parser = parser
        self.started = False
        self.characters = 0
        self.scored = 0
        self.calls = 0

    def take(self, text: str, finished: bool) -> _Delta:
        """What the cumulative ``text`` adds."""
        content = text[self.characters :]
        self.characters += len(content)
        delta = _Delta()
        if self._splitter is not None:
            delta.reasoning, content = self._splitter.feed(content)
            if finished:
                rest, tail = self._splitter.finish()
                delta.reasoning += rest
                content += tail
        if self._parser is not None:
            content, delta.calls = self._parser.feed(content)
            if finished:
                tail, calls = self._parser.finish()
                content += tail
                delta.calls += calls
        delta.content = content
        return delta


class ChatJob(Job):
    """One request.

    Raises:
        RequestError: values contradict each other, or the chat template refuses the messages.
    """

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    keep_markers = True

    def __init__(self, request: ChatRequest, chat: ChatFormat, tokenizer: Tokenizer, created: int) -> None:
        super().__init__(request, "chatcmpl-", created)
        if request.top_logprobs and not request.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true")
        self._request = request
        self._tokenizer = tokenizer
        self._turns: dict[int, _Turn] = {}
        self._params = sampling_params(request, request.max_completion_tokens or request.max_tokens)
        for name, value in chat.recommended.items():
            self._params.setdefault(name, value)
        self._params["stop_token_ids"] = [*(request.stop_token_ids or ()), *chat.turn_ends]
        self._names: list[str] = []  # of functions that may be called
        self._opened = ""  # what the prompt holds of the assistant's turn
        self._listed = False  # the output is a list of calls
        tools = self._choose_tools()
        self._constrained = any(self._params.get(name) for name in CONSTRAINTS)
        self._text = "" if request.input_ids else self._render(chat, tools)

    def _choose_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the template sees. Constrains the output if one of them must be called."""
        request = self._request
        choice = request.tool_choice or "auto"
        tools = [tool.model_dump(exclude_unset=True) for tool in request.tools or ()]
        if isinstance(choice, NamedTool):
            name = choice.function.name
            tools = [tool for tool in tools if tool["function"]["name"] == name]
            if not tools:
                raise RequestError(f"tool_choice names the function {name!r}, which tools does not hold")
        elif choice == "required" and not tools:
            raise RequestError("tool_choice required needs tools")
        if not tools or choice == "none":
            return None
        functions = [tool["function"] for tool in tools]
        self._names = [function["name"] for function in functions]
        if choice != "auto":
            self._listed = True
            single = request.parallel_tool_calls is False
            add_schema(self._params, calls_schema(functions, single=single), "tool_choice")
        return tools

    def _render(self, chat: ChatFormat, tools: list[dict[str, Any]] | None) -> str:
        """The prompt; notes how it opens the assistant's turn."""
        request = self._request
        messages = [template_message(message) for message in request.messages]
        prefix = ""
        if request.continue_final_message:
            if messages[-1]["role"] != "assistant":
                raise RequestError("continue_final_message needs a last message of the assistant")
            prefix = messages.pop()["content"]
        variables = request.chat_template_kwargs or {}
        for name in RESERVED:
            if name in variables:
                raise RequestError(f"chat_template_kwargs: {name} cannot be set by a request")
        effort = request.reasoning_effort
        if effort is not None:
            thinks = effort != "none"
            efforts = {"reasoning_effort": effort, "thinking": thinks, "enable_thinking": thinks}
            variables = {**efforts, **variables}
        prompt = chat.render(messages, tools, variables)
        opened = OPEN if prompt.rstrip().endswith(OPEN) else ""
        self._opened = opened + prefix
        return prompt + prefix

    @property
    def body(self) -> GenerateBody:
        request = self._request
        return GenerateBody(
            text=None if request.input_ids else self._text,
            input_ids=list(request.input_ids) if request.input_ids else None,
            sampling_params=self._params,
            rid=self.rid,
            stream=self.stream,
            return_logprob=bool(request.logprobs),
            logprob_start_len=-1,
            top_logprobs_num=request.top_logprobs or 0,
            return_text_in_logprobs=True,
            return_prompt_token_ids=bool(request.return_prompt_token_ids or request.return_token_ids),
            extra_key=extra_key(request),
            priority=request.priority,
        )

    def _turn(self, index: int) -> _Turn:
        turn = self._turns.get(index)
        if turn is None:
            splitter: ReasoningSplitter | None = None
            parser: CallParser | None = None
            # A constrained text is the answer itself, whatever the template opened.
            if self._request.separate_reasoning is not False and not self._constrained:
                splitter = ReasoningSplitter(self._opened.rfind(OPEN) > self._opened.rfind(CLOSE))
            if self._listed:
                parser = ListedCalls(self._names)
            elif self._names and not self._constrained:
                parser = MarkedCalls(self._names)
            turn = self._turns[index] = _Turn(splitter, parser)
        return turn

    def _choice(self, index: int, answer: dict[str, Any]) -> dict[str, Any]:
        turn = self._turn(index)
        delta = turn.take(answer["text"], finished=True)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": delta.content,
            "reasoning_content": delta.reasoning or None,
        }
        if delta.calls:
            message["tool_calls"] = self._calls(turn, delta.calls)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(turn, answer["meta_info"]) if self._request.logprobs else None,
            **self._end(turn, answer),
        }

    def _deltas(self, index: int, answer: dict[str, Any]) -> list[dict[str, Any]]:
        turn = self._turn(index)
        meta = answer["meta_info"]
        finished = meta["finish_reason"] is not None
        delta = turn.take(answer["text"], finished)
        choices = []
        if not turn.started:
            turn.started = True
            choices.append(_chunk_choice(index, role="assistant", content=""))
        first = len(choices)
        if delta.reasoning:
            choices.append(_chunk_choice(index, reasoning_content=delta.reasoning))
        if delta.content:
            choices.append(_chunk_choice(index, content=delta.content))
        calls = self._calls(turn, delta.calls)
        choices += [_chunk_choice(index, tool_calls=[call]) for call in calls]
        if self._request.logprobs and turn.scored < len(meta["output_token_logprobs"]):
            if first == len(choices):
                choices.append(_chunk_choice(index, content=""))
            choices[first]["logprobs"] = self._logprobs(turn, meta)
        if finished:
            choices.append({**_chunk_choice(index), **self._end(turn, answer)})
        return choices

    def _calls(self, turn: _Turn, calls: list[ToolCall]) -> list[dict[str, Any]]:
        first = turn.calls
        turn.calls += len(calls)
        return [
            {
                "index": index,
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(calls, first)
        ]

    def _logprobs(self, turn: _Turn, meta: dict[str, Any]) -> dict[str, Any]:
        """Those not sent yet."""
        triples, tops = meta["output_token_logprobs"], meta.get("output_top_logprobs", [])
        scored = turn.scored
        turn.scored = len(triples)
        return chat_logprobs(triples[scored:], tops[scored:], self._tokenizer)

    def _end(self, turn: _Turn, answer: dict[str, Any]) -> dict[str, Any]:
        request = self._request
        fields = end_fields(answer["meta_info"])
        if turn.calls and fields["finish_reason"] == "stop":
            fields.update(finish_reason="tool_calls", matched_stop=None)
        if request.return_prompt_token_ids or request.return_token_ids:
            fields["prompt_token_ids"] = answer["prompt_token_ids"]
        if request.return_token_ids:
            fields["response_token_ids"] = answer["output_ids"]
        if request.return_meta_info:
            fields["meta_info"] = answer["meta_info"]
        return fields


def _chunk_choice(index: int, **delta: Any) -> dict[str, Any]:
    return {
        "index": index,
        # Clients of SGLang look at these three in every chunk.
        "delta": {"role": None, "content": None, "reasoning_content": None, **delta},
        "logprobs": None,
        "finish_reason": None,
        "matched_stop": None,
    }
