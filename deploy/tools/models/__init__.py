"""`baton models`: tell what models would do here, before their weights are fetched."""
