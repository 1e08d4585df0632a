"""Files of exit depths."""

from __future__ import annotations

from pathlib import Path

import pytest

from ouro_sgl.errors import ConfigError
from ouro_sgl.frontend.exit_traces import load_traces, save_traces


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "traces.json"
    save_traces(path, {"a": [4, 1, 2], "ü": [4], "none": []})
    save_traces(path, {"a": [4, 1, 2], "ü": [4]})
    assert load_traces(path, 4) == {"a": [4, 1, 2], "ü": [4]}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not readable JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "has no object 'depths_by_request'"),
        ('{"depths_by_request": {"a": 5}}', r"\['a'\] must be a list"),
        ('{"depths_by_request": {"a": [4, 5]}}', r"\['a'\]\[1\]: 5 is not a depth"),
        ('{"depths_by_request": {"a": [3]}}', r"\['a'\] must start with the full depth 4"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "traces.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=reason):
        load_traces(path, 4)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"traces\.json does not exist"):
        load_traces(tmp_path / "traces.json", 4)
