"""One plug-in of each kind for lazydecode; `pyproject.toml` offers them by entry points."""
