"""A cage for code that somebody else wrote: a process without secrets, into which arrays go and out of which
arrays come. `outside` holds it, `inside` runs in it, `values` is all that passes between them."""
