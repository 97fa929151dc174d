"""The HTTP face: OpenAI's chat route, the render route, models, health, metrics, version.

In: HTTP requests. Out: answers, whole or as events, or what another engine needs. `run` serves
until a stop signal, `app` is the ASGI application, `loading` puts a server's parts together.
May import: everything below; needs the extra `serve`.
"""
