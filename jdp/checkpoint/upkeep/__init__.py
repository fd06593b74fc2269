"""Which checkpoints are kept (`retention`), whose they are (`ownership`, `lineage`), which are damaged (`damage`)."""
