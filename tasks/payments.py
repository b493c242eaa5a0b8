"""`payments.charge`: one charge for each charge_id."""

from __future__ import annotations

from app.domain.payments import ChargeAccount, charge, check, classify, hold_account, record_charge
from app.job import Job
from tasks.durable import durable


@durable(
    "payments.charge",
    payload=ChargeAccount,
    key=lambda payload: payload.charge_id,
    check=check,
    classify=classify,
)
def charge_account(job: Job, payload: ChargeAccount) -> dict[str, str]:
    """Charge the account; the record commits with the job's success."""
    hold_account(job.session, payload.account_id)
    made = job.call("charge", lambda key: charge(payload, key))
    record_charge(job.session, job.job_id, payload, made["reference"])
    job.result_key = f"charge:{made['reference']}"
    return {"reference": made["reference"]}
