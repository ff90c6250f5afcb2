"""What the machine and the environment say."""
