"""The database: models, one engine per process, migrations. Imports nothing of ours."""
