"""One module per group of routes: handlers that take the context and the exchange."""
