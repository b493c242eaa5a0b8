"""The message headers that are Deadsure's own."""

COPY = "deadsure_copy"
EPISODE = "deadsure_episode"
VERSION = "deadsure_version"
JOBS = "deadsure_jobs"  # all jobs of a coalesced delivery, the one in `id` first
SOURCE = "deadsure_source"  # who made the dead letter, where the broker cannot
NO_ENVELOPE = "deadsure_no_envelope"  # the body is an entry of a Redis/Valkey list that was no message
TAG = "deadsure_delivery_tag"  # added by the main process for its child; never on the wire
