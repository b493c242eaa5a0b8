"""The domain layer: states, arrows, retry policy, effects, command line. Knows no broker."""
