"""How many slots a request needs, and which of them are free when.

Both layouts keep T slots per prompt token while the prompt is prefilled. They differ in what a
generated token gets and in what stays of the prompt afterwards. The attention kernels never learn
which one is used: they only read the slot table.
"""

from __future__ import annotations

from typing import Protocol

from ouro_sgl.messages import RowParams


class Layout(Protocol):
    """A way to fill the slot table. ``T`` is the number of loops, ``P`` the prompt length."""

    total_loops: int
    collapses_prompt: bool  # after prefill only the deepest slot of each prompt token stays

    def width(self, params: RowParams, index: int) -> int:
        """Slots granted to the position of output token ``index``."""

    def generated_need(self, params: RowParams) -> int:
        """Slots of all generated positions of a request (the last output token has no K/V)."""

    def need(self, prompt_len: int, cached_len: int, generated_need: int) -> int:
        """The most slots that a request owns at one time, its cached prefix not counted."""

    def used(self, exit_depth: int) -> int:
        """How many of a generated position's slots are in use once it left the loop."""


class LastExited:
    """A generated token has a slot per depth that it ran; deeper table entries alias the last."""

    collapses_prompt = False

    def __init__(self, total_loops: int) -> None:
        self.total_loops = total_loops

    def width(self, params: RowParams, index: int) -> int:
        if params.exit_trace is not None:
            # Depth i of a trace belongs to the position that predicts output i: the one before it.
            return params.exit_trace[index + 1]
        return min(self.total_loops, params.max_loops)

    def generated_need(self, params: RowParams) -> int:
        if params.exit_trace is not None:
            return sum(params.exit_trace[1 : params.max_new_tokens])
        return min(self.total_loops, params.max_loops) * max(params.max_new_tokens - 1, 0)

    def need(self, prompt_len: int, cached_len: int, generated_need: int) -> int:
        return self.total_loops * (prompt_len - cached_len) + generated_need

    def used(self, exit_depth: int) -> int:
        return exit_depth


class Shared:
    """A generated token has one slot that each of its loops overwrites; the prompt keeps one too.

    A prefix cache would let prompts be prefilled against collapsed K/V, so there is none.
    """

    collapses_prompt = True

    def __init__(self, total_loops: int) -> None:
        self.total_loops = total_loops

    def width(self, params: RowParams, index: int) -> int:
        return 1

    def generated_need(self, params: RowParams) -> int:
        return max(params.max_new_tokens - 1, 0)

    def need(self, prompt_len: int, cached_len: int, generated_need: int) -> int:
        return max(self.total_loops * prompt_len, prompt_len + generated_need)

    def used(self, exit_depth: int) -> int:
        return 1


LAYOUTS: dict[str, type[LastExited] | type[Shared]] = {"last_exited": LastExited, "shared": Shared}
