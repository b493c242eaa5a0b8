"""What `deadsure doctor` looks at in the database: small functions, each answers with findings."""
