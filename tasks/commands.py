"""Commands that need the broker, added to the domain's group. Importing `tasks` fills the allowlist of job types."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import tasks
from app.cli.batch import batch_group
from app.cli.main import database, deadsure
from app.cli.output import reporting_errors
from app.cli.prune import prune
from app.demo.command import demo
from app.job_types import queues
from app.journal import JournalWriter, configure_logging, log
from app.metrics.endpoint import Endpoint
from app.settings import settings
from app.sweep import Swept
from db.migrate import check
from tasks.diagnose import diagnose_job
from tasks.doctor import doctor
from tasks.gauges import LoopGauges
from tasks.intake import Intake
from tasks.periodic import periodic
from tasks.relay import Relay
from tasks.services import keeps_messages
from tasks.sweeper import SweeperThread

assert tasks.app is not None


@deadsure.command("relay")
@reporting_errors
def relay_command() -> None:
    """Run relay, sweeper and intake without a worker, until SIGTERM or Ctrl-C."""
    settings().need_broker()
    with database() as connection:
        check(connection)
    configure_logging(settings().log, settings().log_level)
    journal = JournalWriter(settings().need_database())
    relay = Relay(settings(), journal, queues())
    intake = Intake(settings())

    def on_lost(swept: Swept) -> None:
        if keeps_messages(swept, settings()):
            relay.note_loss()

    sweeper = SweeperThread(settings(), on_lost)
    ended = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        ended.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    for thread in (journal, relay, intake, sweeper):
        thread.start()
    loops = LoopGauges(relay=relay, intake=intake, sweeper=sweeper)
    endpoint = Endpoint(settings(), queues(), [loops])
    endpoint.start()
    log.info("relay.ready", queues=queues())
    ended.wait()
    for running in (relay, intake, sweeper, journal, endpoint):
        running.stop()


deadsure.add_command(batch_group)

deadsure.add_command(demo)

deadsure.add_command(doctor)

deadsure.add_command(diagnose_job)

deadsure.add_command(periodic)

deadsure.add_command(prune)

__all__ = ["deadsure"]
