"""Private PostgreSQL, RabbitMQ and Valkey on loopback, for development, tests and the demo.

Nothing here is used in production: there the servers are named by `DATABASE_URL` and `BROKER_URL`.
Every server has a directory of its own, a random password and free ports; no server that this
package did not start is ever signalled (see `process.py`).
"""

from app.stack.errors import StackError
from app.stack.install import ensure_rabbitmq
from app.stack.postgres import Postgres
from app.stack.rabbitmq import RabbitMQ
from app.stack.stack import Stack, temporary_stack
from app.stack.valkey import Valkey

__all__ = [
    "Postgres",
    "RabbitMQ",
    "Stack",
    "StackError",
    "Valkey",
    "ensure_rabbitmq",
    "temporary_stack",
]
