import pytest

from ouro_sgl.kvcache.layout import LastExited, Shared
from ouro_sgl.messages import RowParams


@pytest.mark.parametrize(("max_new", "positions"), [(0, 0), (1, 0), (2, 1), (10, 9)])
def test_the_last_output_token_needs_no_slot(max_new: int, positions: int) -> None:
    params = RowParams(max_new_tokens=max_new, max_loops=3)
    assert LastExited(4).generated_need(params) == 3 * positions
    assert Shared(4).generated_need(params) == positions


def test_a_trace_needs_exactly_its_depths() -> None:
    # Depth i predicts output i, so the position of output i runs depth i + 1 of the trace.
    params = RowParams(max_new_tokens=4, exit_trace=[4, 1, 2, 3, 4])
    layout = LastExited(4)
    assert [layout.width(params, i) for i in range(3)] == [1, 2, 3]
    assert layout.generated_need(params) == 6
    assert Shared(4).generated_need(params) == 3


def test_need_of_a_request() -> None:
    assert LastExited(4).need(prompt_len=10, cached_len=4, generated_need=7) == 4 * 6 + 7
    assert Shared(4).need(prompt_len=10, cached_len=0, generated_need=7) == 40
    assert Shared(4).need(prompt_len=10, cached_len=0, generated_need=35) == 45


def test_slots_in_use_after_an_exit() -> None:
    assert LastExited(4).used(3) == 3
    assert Shared(4).used(3) == 1
