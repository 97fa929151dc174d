"""`lazydecode demo`: the whole way of a request, watched from outside.

In: nothing but this package. Out: a table per media item and the answers of a tiny model. It
talks to the server over HTTP like any client and imports nothing of it.
"""
