"""Alembic's entry: runs on the connection that `db.migrate.upgrade` opened."""

from alembic import context

import db.business
from db.models import Base

assert db.business  # its tables belong to the metadata

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
