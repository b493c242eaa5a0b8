"""What Prometheus scrapes: counts of this process, figures of the database, and the endpoint that serves both."""
