"""How families frame a conversation, and the chat template that does it.

The published templates differ in defaults, tool formats and checks; ours keeps the frame of a
turn and the text of each media item, which is what decides token ids around media.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Turns:
    """The frame of a turn: `{role}` stands for the role's name in this family."""

    before: str
    after: str
    answer: str
    """What opens the assistant's turn when an answer is wanted."""
    tokens: tuple[str, ...] = ()
    """Control tokens of the frame."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Names that differ from the API's."""
    opening: str = ""
    """What stands before the first turn; the tokenizer's bos is added before it."""
    system: str = ""
    """System message when the conversation has none; empty: none."""
    tools: bool = False
    """Whether the template shows tools, calls and their results, in the form of Hermes."""


@dataclass(frozen=True, slots=True)
class Slot:
    """What the chat template writes where a media item stands."""

    text: str
    label: str = ""
    """Text before it; `{n}` is the item's number within its modality, from 1."""
    label_if: str = ""
    """Name of a template option that turns the label on; empty: always on."""


CHATML = Turns(
    "<|im_start|>{role}\n",
    "<|im_end|>\n",
    "<|im_start|>assistant\n",
    tokens=("<|im_start|>", "<|im_end|>"),
)
HERMES = replace(CHATML, roles={"tool": "user"}, tools=True)
QWEN = replace(HERMES, system="You are a helpful assistant.")
VICUNA = Turns("{role}: ", " ", "ASSISTANT:", roles={"user": "USER", "assistant": "ASSISTANT"})
GEMMA = Turns(
    "<start_of_turn>{role}\n",
    "<end_of_turn>\n",
    "<start_of_turn>model\n",
    tokens=("<start_of_turn>", "<end_of_turn>"),
    roles={"assistant": "model"},
)
GEMMA4 = Turns(
    "<|turn>{role}\n",
    "<turn|>\n",
    "<|turn>model\n",
    tokens=("<|turn>", "<turn|>"),
    roles={"assistant": "model"},
)
MISTRAL = Turns("[INST]", "[/INST]", "", tokens=("[INST]", "[/INST]"))
LLAMA3 = Turns(
    "<|start_header_id|>{role}<|end_header_id|>\n\n",
    "<|eot_id|>",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)
LLAMA4 = Turns(
    "<|header_start|>{role}<|header_end|>\n\n",
    "<|eot|>",
    "<|header_start|>assistant<|header_end|>\n\n",
    tokens=("<|header_start|>", "<|header_end|>", "<|eot|>"),
)
GLM = Turns(
    "<|{role}|>\n",
    "",
    "<|assistant|>\n",
    tokens=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
    opening="[gMASK]<sop>",
)
PHI = Turns(
    "<|{role}|>",
    "<|end|>",
    "<|assistant|>",
    tokens=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
)
COHERE = Turns(
    "<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    tokens=(
        "<|START_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|USER_TOKEN|>",
        "<|CHATBOT_TOKEN|>",
        "<|SYSTEM_TOKEN|>",
    ),
    roles={"user": "USER", "assistant": "CHATBOT", "system": "SYSTEM"},
)
IDEFICS = Turns(
    "{role}:",
    "<end_of_utterance>\n",
    "Assistant:",
    tokens=("<end_of_utterance>",),
    roles={"user": "User", "assistant": "Assistant", "system": "System"},
)
KIMI = Turns(
    "<|im_{role}|>{role}<|im_middle|>",
    "<|im_end|>",
    "<|im_assistant|>assistant<|im_middle|>",
    tokens=("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
)
BARE = Turns("", "", "")
"""No frame: the texts of the messages, one after the other."""


_TOOLS_BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
_TOOLS_AFTER = """
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

PART_TYPES: Mapping[str, tuple[str, ...]] = {
    "image": ("image", "image_url"),
    "video": ("video", "video_url"),
    "audio": ("audio", "audio_url", "input_audio"),
}
"""Content part types that stand for an item of each modality."""


def chat_template(turns: Turns, slots: Mapping[str, Slot], *, bos: str | None) -> str:
    """Return the Jinja chat template of a family, ready for `chat_template.jinja`.

    Args:
        turns: The frame of a turn.
        slots: What stands for an item, by modality.
        bos: Token before everything; None or empty for none.
    """
    lines = []
    opening = (bos or "") + turns.opening
    if opening:
        lines.append(_write(opening))
    if turns.roles:
        names = ", ".join(f"{_quote(api)}: {_quote(own)}" for api, own in turns.roles.items())
        lines.append("{%- set role_names = {" + names + "} -%}")
    numbered = [modality for modality, slot in slots.items() if slot.label]
    if numbered:
        counters = ", ".join(f"{modality}=0" for modality in numbered)
        lines.append("{%- set seen = namespace(" + counters + ") -%}")
    lines += _system_lines(turns)
    role = "role_names.get(message['role'], message['role'])" if turns.roles else "message['role']"
    lines.append("{%- for message in messages -%}")
    if turns.tools:
        lines.append("{%- if not (tools and loop.first and message['role'] == 'system') -%}")
    lines.append(_write_with_role(turns.before, role))
    if turns.tools:
        lines.append(
            "{%- if message['role'] == 'tool' -%}{{- '<tool_response>\\n' -}}{%- endif -%}"
        )
    lines += _content_lines("message", slots)
    if turns.tools:
        lines += _call_lines()
        lines.append(
            "{%- if message['role'] == 'tool' -%}{{- '\\n</tool_response>' -}}{%- endif -%}"
        )
    if turns.after:
        lines.append(_write_with_role(turns.after, role))
    if turns.tools:
        lines.append("{%- endif -%}")
    lines.append("{%- endfor -%}")
    if turns.answer:
        lines += ["{%- if add_generation_prompt -%}", _write(turns.answer), "{%- endif -%}"]
    return "\n".join(line for line in lines if line) + "\n"


def _system_lines(turns: Turns) -> list[str]:
    """Write what comes first: the tools, or the default system message."""
    before = turns.before.replace("{role}", "system")
    has_own = "messages and messages[0]['role'] == 'system'"
    default = [
        "{%- if not (" + has_own + ") and messages -%}",
        _write(before + turns.system + turns.after),
        "{%- endif -%}",
    ]
    if not turns.tools:
        return default if turns.system else []
    lines = ["{%- if tools -%}", _write(before), "{%- if " + has_own + " -%}"]
    lines += [*_content_lines("messages[0]", {}), _write("\n\n")]
    if turns.system:
        lines += ["{%- else -%}", _write(turns.system + "\n\n")]
    lines += ["{%- endif -%}", _write(_TOOLS_BEFORE)]
    lines.append("{%- for tool in tools -%}{{- '\\n' ~ (tool | tojson) -}}{%- endfor -%}")
    lines.append(_write(_TOOLS_AFTER + turns.after))
    if turns.system:
        lines += ["{%- else -%}", *default]
    return [*lines, "{%- endif -%}"]


def _content_lines(message: str, slots: Mapping[str, Slot]) -> list[str]:
    """Write a message's text and media items."""
    lines = [
        "{%- if " + message + "['content'] is string -%}",
        "{{- " + message + "['content'] -}}",
        "{%- elif " + message + "['content'] -%}",
        "{%- for part in " + message + "['content'] -%}",
        "{%- if part['type'] == 'text' -%}",
        "{{- part['text'] -}}",
    ]
    for modality, slot in slots.items():
        types = ", ".join(_quote(name) for name in PART_TYPES[modality])
        lines.append("{%- elif part['type'] in (" + types + ") -%}")
        lines += _slot_lines(modality, slot)
    return [*lines, "{%- endif -%}", "{%- endfor -%}", "{%- endif -%}"]


def _call_lines() -> list[str]:
    """Write the calls that an assistant's message makes."""
    return [
        "{%- for call in message['tool_calls'] or [] -%}",
        "{%- set function = call['function'] -%}",
        "{%- if message['content'] or not loop.first -%}{{- '\\n' -}}{%- endif -%}",
        "{{- '<tool_call>\\n{\"name\": ' ~ (function['name'] | tojson) ~ ', \"arguments\": ' -}}",
        "{%- if function['arguments'] is string -%}",
        "{{- function['arguments'] -}}",
        "{%- else -%}",
        "{{- function['arguments'] | tojson -}}",
        "{%- endif -%}",
        "{{- '}\\n</tool_call>' -}}",
        "{%- endfor -%}",
    ]


def _slot_lines(modality: str, slot: Slot) -> list[str]:
    """Write one media item, with its number where the family gives one."""
    if not slot.label:
        return [_write(slot.text)] if slot.text else []
    before, after = slot.label.split("{n}")
    lines = [
        "{%- set seen." + modality + " = seen." + modality + " + 1 -%}",
        "{{- " + _quote(before) + " ~ seen." + modality + " ~ " + _quote(after) + " -}}",
    ]
    if slot.label_if:
        lines = ["{%- if " + slot.label_if + " -%}", *lines, "{%- endif -%}"]
    return [*lines, _write(slot.text)]


def _write(text: str) -> str:
    return "{{- " + _quote(text) + " -}}"


def _write_with_role(text: str, role: str) -> str:
    if not text:
        return ""
    pieces = [_quote(piece) if piece else "" for piece in text.split("{role}")]
    return "{{- " + f" + {role} + ".join(pieces).strip(" +") + " -}}"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"
