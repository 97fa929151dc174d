"""What is answered while the model is being loaded."""

from __future__ import annotations

import httpx

from lazydecode.server.doorway import Doorway


async def test_a_request_while_it_loads_gets_an_error_of_the_usual_form() -> None:
    transport = httpx.ASGITransport(app=Doorway())
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answer = await client.post("/v1/chat/completions", json={"messages": []})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json() == {
        "error": {
            "message": "the model is being loaded",
            "type": "ServiceUnavailableError",
            "param": None,
            "code": 503,
            "request_id": answer.headers["x-request-id"],
            "retryable": True,
        }
    }
