"""Celery's settings for durable jobs; each differs from Celery's default for the reason given."""

from typing import Any

from celery.schedules import crontab

from app.settings import settings
from tasks.topology import EXCHANGE, WORK_QUEUE, task_queues

broker_url = settings().broker_url or None
result_backend = "tasks.results:JobResults"  # answers from the job row: no second store to disagree with
task_store_eager_result = True  # eager jobs have their row too; Celery would warn that `get()` finds nothing

task_queues = task_queues(settings().broker_is_amqp)
task_default_queue = WORK_QUEUE
task_default_exchange = EXCHANGE
task_default_exchange_type = "direct"
task_default_routing_key = WORK_QUEUE
task_create_missing_queues = False  # a typo must fail, not make a queue that nobody reads

task_acks_late = True  # acknowledge the durable result, not the receipt
task_reject_on_worker_lost = True  # a dead child's message goes back
task_acks_on_failure = False  # a failure is settled by its arrow, never acknowledged away
task_acks_on_timeout = False
worker_prefetch_multiplier = settings().prefetch  # bounded: what a dying worker holds is redelivered
worker_consumer = "tasks.consumer:DurableConsumer"
worker_cancel_long_running_tasks_on_connection_loss = False  # the fence settles it; work goes on
worker_detect_quorum_queues = True  # quorum queues refuse global QoS
worker_redirect_stdouts = False

accept_content = ["json"]
task_serializer = result_serializer = event_serializer = "json"
enable_utc = True
timezone = "UTC"

# Two workers of one name, or one that returns before the broker saw its old connection die, share their queues.
# Durable, since RabbitMQ 4.3 refuses transient queues that are not exclusive.
control_queue_exclusive = event_queue_exclusive = False
control_queue_durable = event_queue_durable = True

beat_scheduler = "tasks.beat:DurableScheduler"  # one job per tick, whatever the number of beats
beat_schedule: dict[str, Any] = {
    "prune": {
        "task": "deadsure.prune",
        "schedule": crontab(minute=17, hour=3),  # once a day; what it does not finish is the next day's
        "options": {"expires": 20 * 3600},  # workers that were away for days need not prune twice
    },
}

broker_connection_retry_on_startup = True
broker_connection_max_retries = None  # an outage of the broker is waited for, however long
broker_channel_error_retry = True  # consumer_timeout closes the channel: reconnect instead of exiting
broker_heartbeat = 30
broker_transport_options = (
    {"confirm_publish": True, "client_properties": {"connection_name": "deadsure"}}
    if settings().broker_is_amqp
    else {"visibility_timeout": 3600, "socket_keepalive": True, "health_check_interval": 10}
)
