"""The business that ships with Deadsure: accounts, orders, report exports, a ledger; put yours here."""
