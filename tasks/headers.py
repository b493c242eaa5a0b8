"""The message headers that are Deadsure's own."""

COPY = "deadsure_copy"
EPISODE = "deadsure_episode"
VERSION = "deadsure_version"
SOURCE = "deadsure_source"  # who made the dead letter, where the broker cannot
TAG = "deadsure_delivery_tag"  # added by the main process for its child; never on the wire
