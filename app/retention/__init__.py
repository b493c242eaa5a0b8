"""Retention: what has ended long ago goes in small transactions, and leaves a tombstone where its id may return."""
