"""Bodies of the OpenAI routes: what is accepted and what is answered.

Requests are checked against these models, strictly: a string is no number. Unknown fields are ignored,
null means the default. Answers are plain dicts on the hot path; their models only document them, and a
test holds both together.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

DEFAULT_MODEL = "default"

T = TypeVar("T")
# A long list of wrong values costs one error, not one for each of them.
Items = Annotated[list[T], Field(fail_fast=True)]
TokenIds = Items[int]
# The values are checked where the ids are, one by one until the first wrong one.
LogitBias = Annotated[
    dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})
]


class Body(BaseModel):
    model_config = ConfigDict(strict=True)


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="one more chunk at the end, with the usage")
    continuous_usage_stats: bool | None = Field(None, description="the usage so far in every chunk")


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class SharedFields(Body):
    """Fields of both routes: OpenAI's, SGLang's beyond them, and those of the loop."""

    model: str | None = Field(None, description="any name is accepted; the answer repeats it")
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    logit_bias: LogitBias | None = Field(None, description="added to the logits, by token id")
    n: int | None = Field(None, ge=1, description="samples of each prompt, default 1")
    response_format: ResponseFormat | None = None
    seed: int | None = Field(None, description="64 bit; the same seed gives the same tokens")
    stop: str | Items[str] | None = Field(None, description="at most 32 strings; the first in the list wins")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0.0, description="below 1e-6: greedy")
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    user: str | None = Field(None, description="accepted; changes nothing")

    top_k: int | None = Field(None, description="-1: off")
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    min_tokens: int | None = Field(None, ge=0)
    repetition_penalty: float | None = Field(None, gt=0.0, le=2.0)
    stop_token_ids: TokenIds | None = None
    stop_regex: str | Items[str] | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | None = Field(None, description="a JSON schema, as a string")
    rid: str | Items[str] | None = Field(None, description="id for /abort_request and of the answer")
    extra_key: str | Items[str] | None = Field(None, description="namespace of the prefix cache")
    cache_salt: str | None = Field(None, description="as extra_key; both together are one namespace")
    priority: int | None = Field(None, description="higher goes first")
    return_token_ids: bool | None = Field(None, description="ids of prompt and output in every choice")

    exit_mode: str | None = Field(
        None, description="ouro, ouro_delayed, random_lookahead, lookahead or trace; null: the server's"
    )
    min_loops: int | None = Field(None, ge=1, description="loops that every generated token runs at least")
    max_loops: int | None = Field(None, ge=1, description="loops after which every token leaves")
    exit_threshold: float | None = Field(
        None, ge=0.0, le=1.0, description="leave when the exit probability reached this; 1: never early"
    )
    exit_trace: Items[int] | None = Field(
        None, description="exit depth of each output token; the first is full"
    )
    trace_id: str | None = Field(None, description="an entry of the server's exit trace file")


class CompletionRequest(SharedFields):
    """Body of ``/v1/completions``."""

    prompt: str | Items[str] | TokenIds | Items[TokenIds] = Field(examples=["Once upon a time"])
    max_tokens: int | None = Field(None, ge=1, description="default 16")
    best_of: int | None = Field(None, description="only the value of n")
    echo: bool | None = Field(None, description="the text begins with the prompt")
    logprobs: int | None = Field(None, ge=0, description="likeliest tokens to tell at each position")


class FunctionCall(Body):
    model_config = ConfigDict(strict=True, extra="allow")
    name: str
    arguments: str | dict[str, Any] | None = Field(None, description="JSON of an object, or the object")


class MessageToolCall(Body):
    model_config = ConfigDict(strict=True, extra="allow")
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation. Further fields reach the chat template untouched."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Items[TextPart] | None = Field(
        None, description="parts are joined by a space; null only from the assistant"
    )
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Items[MessageToolCall] | None = None
    tool_call_id: str | None = None


class Function(Body):
    model_config = ConfigDict(strict=True, extra="allow")
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments")
    strict: bool | None = None


class Tool(Body):
    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(SharedFields):
    """Body of ``/v1/chat/completions``."""

    messages: Items[Message] = Field(min_length=1, examples=[[{"role": "user", "content": "Hello!"}]])
    max_tokens: int | None = Field(None, ge=1, description="default: to the end of the context")
    max_completion_tokens: int | None = Field(None, ge=1, description="goes before max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, description="needs logprobs")
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="default: auto with tools; required and a named tool constrain the output"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call, when constrained")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="reaches the chat template; none also sets enable_thinking to false there"
    )
    separate_reasoning: bool | None = Field(
        None, description="default true: what stands in <think> becomes reasoning_content"
    )
    continue_final_message: bool | None = Field(
        None, description="the answer goes on with the last message, which is the assistant's"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables of the chat template")
    input_ids: TokenIds | None = Field(None, description="the prompt, instead of the rendered messages")
    return_prompt_token_ids: bool | None = None
    return_meta_info: bool | None = Field(None, description="meta_info of /generate in every choice")


# --------------------------------------------------------------------------- answers


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="prompt tokens found in the prefix cache")


class Usage(BaseModel):
    """Over all choices; a prompt counts once, however many samples it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class LoopFields(BaseModel):
    """In a stream: null until the last chunk of the choice."""

    matched_stop: int | str | None = Field(None, description="end id or stop string that ended the text")
    exit_depths: list[int] | None = Field(None, description="loops run for each output token")
    mean_exit_depth: float | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str] = Field(description="a part of a character is shown byte by byte, as Latin-1")
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] = Field(description="empty with logprobs 0")
    text_offset: list[int] = Field(description="where each token begins, in characters")


class CompletionChoice(LoopFields):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    token_ids: TokenIds | None = None
    prompt_token_ids: TokenIds | None = None


class Answer(BaseModel):
    id: str
    created: int
    model: str
    mean_exit_depth: float | None = Field(None, description="over the tokens of all choices")


class Completion(Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    metadata: dict[str, Any]


class CompletionChunk(Answer):
    """One event of a stream: the texts of a choice join to its whole text."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None


class TopLogprob(BaseModel):
    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class AnswerFunction(BaseModel):
    name: str
    arguments: str


class AnswerToolCall(BaseModel):
    index: int
    id: str
    type: Literal["function"]
    function: AnswerFunction


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    reasoning_content: str | None
    tool_calls: list[AnswerToolCall] | None = None


FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class ChatChoice(LoopFields):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    prompt_token_ids: TokenIds | None = None
    response_token_ids: TokenIds | None = None
    meta_info: dict[str, Any] | None = None


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    metadata: dict[str, Any]


class Delta(BaseModel):
    role: Literal["assistant"] | None
    content: str | None
    reasoning_content: str | None
    tool_calls: list[AnswerToolCall] | None = Field(None, description="whole calls, one in a chunk")


class ChatChunkChoice(LoopFields):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    prompt_token_ids: TokenIds | None = None
    response_token_ids: TokenIds | None = None
    meta_info: dict[str, Any] | None = None


class ChatChunk(Answer):
    """One event of a stream. The first of a choice has its role, the last its finish reason."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None


class ErrorBody(BaseModel):
    """A request that is refused or failed."""

    object: Literal["error"]
    message: str
    type: str
    param: None
    code: int


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    max_model_len: int = Field(description="longest request, prompt and output together, in tokens")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
