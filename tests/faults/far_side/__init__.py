"""The other side of external calls: real servers in threads of the test, which misbehave on request.

Each keeps an append-only list of what really took effect there, whatever its client was told.
"""
