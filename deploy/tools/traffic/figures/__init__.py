"""What was measured: records, figures, verdicts and tables."""
