"""Turn text into token ids and back. Never loads torch."""
