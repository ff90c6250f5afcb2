"""Products of rows and weights, and the vector code that they share with attention."""
