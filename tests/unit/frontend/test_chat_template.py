"""Chat templates: where they come from, what they see, what they cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ouro_sgl.errors import ConfigError, RequestError
from ouro_sgl.frontend.chat_template import ChatTemplate

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HELLO = [{"role": "user", "content": "hi"}]


def write(folder: Path, **settings: object) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_messages_and_special_tokens(tmp_path: Path) -> None:
    folder = write(tmp_path, chat_template=TEMPLATE, eos_token={"content": "<e>"}, bos_token=None)
    assert ChatTemplate(folder).render(HELLO) == "<user>hi<e><assistant>"


def test_a_named_file_goes_before_the_folder_s_file_and_its_settings(tmp_path: Path) -> None:
    folder = write(tmp_path, chat_template="settings")
    assert ChatTemplate(folder).render(HELLO) == "settings"
    (folder / "chat_template.jinja").write_text("file")
    assert ChatTemplate(folder).render(HELLO) == "file"
    other = folder / "other.jinja"
    other.write_text("named")
    assert ChatTemplate(folder, other).render(HELLO) == "named"


def test_lack_and_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--chat-template"):
        ChatTemplate(tmp_path)
    with pytest.raises(ConfigError, match="not valid"):
        ChatTemplate(write(tmp_path, chat_template="{% for %}"))
    with pytest.raises(ConfigError, match="cannot be read"):
        ChatTemplate(tmp_path, tmp_path / "nowhere.jinja")


def test_the_template_can_refuse_messages(tmp_path: Path) -> None:
    template = ChatTemplate(write(tmp_path, chat_template="{{ raise_exception('no system role') }}"))
    with pytest.raises(RequestError, match="no system role"):
        template.render(HELLO)


@pytest.mark.parametrize(
    "source",
    ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ ''.__class__.__subclasses__() }}"],
)
def test_the_template_cannot_leave_its_sandbox(tmp_path: Path, source: str) -> None:
    template = ChatTemplate(write(tmp_path, chat_template=source))
    with pytest.raises(RequestError):
        template.render(HELLO)


def test_tools_and_variables(tmp_path: Path) -> None:
    source = "{{ tools | tojson }} {{ x }} {{ messages | length }} {{ strftime_now('%%') }}"
    template = ChatTemplate(write(tmp_path, chat_template=source))
    tool = {"type": "function", "function": {"name": "<é>"}}
    given = {"x": 5, "messages": "ignored"}
    assert template.render(HELLO, [tool], given) == f"{json.dumps([tool], ensure_ascii=False)} 5 1 %"
    assert template.render(HELLO) == "null  1 %"


def test_one_of_several_templates(tmp_path: Path) -> None:
    several = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    assert ChatTemplate(write(tmp_path, chat_template=several)).render(HELLO) == "yes"
    with pytest.raises(ConfigError, match="no chat template"):
        ChatTemplate(write(tmp_path, chat_template=several[:1]))


def test_a_template_may_fail_in_any_way(tmp_path: Path) -> None:
    for source in ("{{ 1 // 0 }}", "{{ 'a' + messages }}", "{{ messages[0].content.x.y }}"):
        with pytest.raises(RequestError, match="refuses these messages"):
            ChatTemplate(write(tmp_path, chat_template=source)).render(HELLO)
