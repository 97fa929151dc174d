"""How families frame a conversation, and the chat template that does it.

The published templates differ in defaults, tool formats and checks; ours keeps the frame of a
turn and the text of each media item, which is what decides token ids around media.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
QWEN = Turns(
    CHATML.before,
    CHATML.after,
    CHATML.answer,
    tokens=CHATML.tokens,
    system="You are a helpful assistant.",
)
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
    if turns.system:
        lines += [
            "{%- if messages and messages[0]['role'] != 'system' -%}",
            _write(turns.before.replace("{role}", "system") + turns.system + turns.after),
            "{%- endif -%}",
        ]
    role = "role_names.get(message['role'], message['role'])" if turns.roles else "message['role']"
    lines += [
        "{%- for message in messages -%}",
        _write_with_role(turns.before, role),
        "{%- if message['content'] is string -%}",
        "{{- message['content'] -}}",
        "{%- elif message['content'] -%}",
        "{%- for part in message['content'] -%}",
        "{%- if part['type'] == 'text' -%}",
        "{{- part['text'] -}}",
    ]
    for modality, slot in slots.items():
        types = ", ".join(_quote(name) for name in PART_TYPES[modality])
        lines.append("{%- elif part['type'] in (" + types + ") -%}")
        lines += _slot_lines(modality, slot)
    lines += ["{%- endif -%}", "{%- endfor -%}", "{%- endif -%}"]
    if turns.after:
        lines.append(_write_with_role(turns.after, role))
    lines.append("{%- endfor -%}")
    if turns.answer:
        lines += ["{%- if add_generation_prompt -%}", _write(turns.answer), "{%- endif -%}"]
    return "\n".join(line for line in lines if line) + "\n"


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
