"""From parsed fields to a plan: defaults, limits, and the form of the answer."""
