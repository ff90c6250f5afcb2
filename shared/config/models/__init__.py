"""What a model's files say of its texts, and the names of models."""
