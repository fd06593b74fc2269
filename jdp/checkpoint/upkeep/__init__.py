"""Which checkpoints to keep (`retention`), which entries are jdp's (`ownership`), which are damaged (`damage`)."""
