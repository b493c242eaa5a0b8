"""The checks of the database in the order in which `deadsure doctor` runs them."""

from __future__ import annotations

from app.checks import expected, jobs, postgres, quarantine, workers

DATABASE = (*jobs.CHECKS, *quarantine.CHECKS, *workers.CHECKS, *postgres.CHECKS, *expected.CHECKS)
PRE_DEPLOY = (jobs.known_types,)
