"""Alembic's entry: runs on the connection that `db.migrate.upgrade` opened."""

from alembic import context

import db.batch
import db.business
import db.parked
import db.periodic
import db.worklist  # noqa: F401  # their tables belong to the metadata
from db.models import Base

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    compare_type=True,
    compare_server_default=True,
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
