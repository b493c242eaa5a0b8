# One image for worker, relay, migrations and Flower. Production servers are named in the environment:
# neither the embedded PostgreSQL nor the embedded Valkey is inside.
FROM python:3.13-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /venv
COPY requirements.lock /src/
RUN /venv/bin/pip install --require-hashes -r /src/requirements.lock
COPY pyproject.toml README.md celeryconfig.py /src/
COPY app /src/app
COPY db /src/db
COPY tasks /src/tasks
RUN /venv/bin/pip install --no-deps /src

FROM python:3.13-slim
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin deadsure \
    && install -d -o deadsure /srv/reports /srv/flower
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 REPORTS_DIR=/srv/reports
WORKDIR /srv
USER deadsure
CMD ["celery", "-A", "tasks", "worker", "--loglevel", "INFO"]
