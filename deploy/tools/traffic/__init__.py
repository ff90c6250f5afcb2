"""A load on a running router: described by flags, sent, recorded, judged. `baton load` and `baton plan` share it."""
