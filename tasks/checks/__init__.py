"""What `deadsure doctor` looks at in the broker: small functions, each answers with findings."""
