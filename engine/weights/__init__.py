"""Which weights an engine has, and how they are replaced while it runs."""
