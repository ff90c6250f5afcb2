"""`baton doctor`: the `look_*` modules gather facts, and the pure `check_*` modules judge them."""
