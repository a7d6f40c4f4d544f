"""Which ops autocast casts, and the kernels that do it."""
