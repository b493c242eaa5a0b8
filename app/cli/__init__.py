"""The command line. Every command takes `--json`, exits non-zero on failure, and asks before it destroys."""
