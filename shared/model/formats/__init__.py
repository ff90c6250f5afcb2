"""What files of models hold, and how it is read."""
