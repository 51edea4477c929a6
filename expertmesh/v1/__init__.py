"""Code generated from `proto/` by `make proto`; nothing here is written by hand but this line."""
