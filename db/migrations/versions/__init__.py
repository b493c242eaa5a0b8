"""The revisions, numbered in a row."""
