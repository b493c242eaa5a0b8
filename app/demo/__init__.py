"""`deadsure demo`: kill a worker in the middle of real jobs, start another, and count what was lost or doubled."""
