"""The first state, made sharded: for a step (`train_state`), or as trees for your own loop (`trees`)."""
