"""Which checkpoints are kept (`retention`), whose they are (`ownership`), which are damaged (`damage`)."""
