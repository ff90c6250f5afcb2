"""Turn text into token ids and back. Nodes handle only ids. Never loads torch."""
