"""HTTP as RFC 9110 and 9112 say, where the HTTP library does otherwise."""
