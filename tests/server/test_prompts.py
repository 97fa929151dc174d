"""How the fields of a request that shape the prompt show in its token ids."""

from __future__ import annotations

from typing import Any

from tests.server.harness import Server, request, text


def ids(server: Server, **fields: Any) -> list[int]:
    body = {**request(text("Hello there")), **fields}
    response = server.render(body)
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["token_ids"]
    return found


def prompt(server: Server, **fields: Any) -> str:
    return server.context.frontend.decode(ids(server, **fields), skip_special_tokens=False)


def test_the_answers_header_can_be_left_out(render_server: Server) -> None:
    whole = ids(render_server)
    bare = ids(render_server, add_generation_prompt=False)
    assert whole[: len(bare)] == bare
    assert len(whole) > len(bare)


def test_a_final_message_can_be_continued(render_server: Server) -> None:
    messages = [
        {"role": "user", "content": "Hello there"},
        {"role": "assistant", "content": "General"},
    ]
    open_end = prompt(render_server, messages=messages, continue_final_message=True)
    assert open_end.endswith("General")
    closed = prompt(render_server, messages=messages, add_generation_prompt=False)
    assert closed.startswith(open_end)
    assert len(closed) > len(open_end)


def test_tools_are_shown_to_the_model(render_server: Server) -> None:
    tool = {
        "type": "function",
        "function": {"name": "weather_of", "parameters": {"type": "object", "properties": {}}},
    }
    shown = prompt(render_server, tools=[tool])
    assert shown.index("<tools>") < shown.index('"name": "weather_of"') < shown.rindex("</tools>")
    assert "weather_of" not in prompt(render_server)


def test_a_developer_message_is_a_system_message(render_server: Server) -> None:
    user = {"role": "user", "content": "x"}
    found = [
        ids(render_server, messages=[{"role": role, "content": "Be brief."}, user])
        for role in ("system", "developer")
    ]
    assert found[0] == found[1]


def test_several_turns_with_tool_results(render_server: Server) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        {"role": "user", "content": [text("and"), text("now?")]},
    ]
    shown = prompt(render_server, messages=messages)
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in shown
    assert "<tool_response>\nsunny\n</tool_response>" in shown
    assert shown.index("sunny") < shown.index("now?")
