"""`baton doctor`: facts are gathered in `look_router` and `look_here`, judged by the pure `check_*` modules."""
