"""Run steps on the device. A worker runs a frozen plan, a lease holds the step's data, and a relay links steps."""
