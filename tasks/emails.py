"""`emails.welcome`: one mail for each account."""

from __future__ import annotations

from app.domain.mail import EXPECTED, WelcomeMail, compose, recipient, record_mail
from app.domain.smtp import deliver
from app.job import Job
from app.settings import settings
from tasks.durable import durable


@durable(
    "emails.welcome",
    payload=WelcomeMail,
    key=lambda payload: str(payload.account_id),
    expire_early=False,  # nobody can be asked what a worker that only seemed dead has sent
    on_uncertain="quarantine",
    expected=EXPECTED,
)
def welcome(job: Job, payload: WelcomeMail) -> dict[str, str]:
    """Send the mail; its record commits with the job's success."""
    message = compose(job.job_id, settings().mail_from, recipient(job.session, payload.account_id))
    job.call("smtp", lambda _key: deliver(message, settings().smtp_url, settings().call_timeout_s), takes_key=False)
    record_mail(job.session, job.job_id, payload.account_id, message["Message-ID"])
    job.result_key = message["Message-ID"]
    return {"message_id": message["Message-ID"]}
