"""Run steps on the device. A worker runs a frozen plan, a lease holds its data, and a relay links steps."""
