"""Who is next, and how much each tenant may ask: admission, fair queue, rate limits."""
