"""Ask a running server about a picture, with OpenAI's client.

Needs `pip install openai` and a server, for example:

    lazydecode make-model qwen2_5_vl models/qwen2_5_vl
    lazydecode serve models/qwen2_5_vl
    python examples/openai_chat.py http://127.0.0.1:8000 picture.jpg
"""

from __future__ import annotations

import base64
import mimetypes
import sys
from pathlib import Path

from openai import OpenAI


def main(server: str, path: str) -> None:
    """Send the picture twice as a data URL; the second time the server decodes nothing."""
    client = OpenAI(base_url=f"{server}/v1", api_key="none")
    media_type = mimetypes.guess_type(path)[0] or "image/jpeg"
    url = f"data:{media_type};base64,{base64.b64encode(Path(path).read_bytes()).decode()}"
    for _ in range(2):
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": url}},
                        {"type": "text", "text": "What is in the picture?"},
                    ],
                }
            ],
            max_tokens=8,
            temperature=0,
            extra_body={"timeline": True},
        )
        item = answer.model_extra["timeline"]["items"][0]  # type: ignore[index]
        print("hit" if item["hit"] else "miss", repr(answer.choices[0].message.content))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
